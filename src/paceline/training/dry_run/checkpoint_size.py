"""What a checkpoint holds, worked out on tensors without memory: weights, buffers and optimizer state."""

import torch

from paceline.plan.plan import Plan
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.checkpoint import save as checkpoint
from paceline.training.dry_run.dry_run import CPU, without_memory
from paceline.training.init.deferred_init import allocate_
from paceline.training.optimizer import make_optimizer
from paceline.training.setup import build

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
        return more + sum(
            tensor.nbytes + FRAME_BYTES for tensor in checkpoint.tensors(model, optimizer).values()
        )
