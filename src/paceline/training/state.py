"""What a checkpoint holds, worked out on tensors without memory: weights, buffers and optimizer state."""

import torch

from paceline.plan.plan import Plan
from paceline.spec import Spec
from paceline.task import Task
from paceline.training import checkpoint
from paceline.training.dry import CPU, without_memory
from paceline.training.optim import make_optimizer
from paceline.training.prepare import build
from paceline.training.weights import allocate_

FRAME_BYTES = 2048  # that torch.save puts round a tensor (torch 2.13)
MOMENTS = 2  # of each weight, for an optimizer that looks at values and cannot be asked


def state_bytes(spec: Spec, task: Task) -> int:
    """On disk, after a step, each tensor once."""
    model = build(spec, task).model
    with without_memory():
        allocate_(model, CPU)
        optimizer = make_optimizer(task, spec.optimizer, Plan(dp=1), model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
            more = 0
        except RuntimeError:
            more = MOMENTS * sum(parameter.nbytes for parameter in trained)
        return more + sum(tensor.nbytes + FRAME_BYTES for tensor in checkpoint.tensors(model, optimizer).values())
