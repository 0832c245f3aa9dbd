"""The size of a checkpoint, computed on fake tensors: weights, buffers and optimizer state."""

import torch

from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task
from paceline.torch_compat import make_fake_mode
from paceline.training.checkpoint.state import collect_state
from paceline.training.dry_run.dry_run import CPU, RealInputsMode
from paceline.training.init.deferred_init import allocate_
from paceline.training.model_facts.model_analysis import build_meta_model
from paceline.training.optimization.optimizer import make_optimizer
from paceline.training.optimization.read_updates import assign_parameters, read_updates

FRAME_BYTES = 2048  # that torch.save adds to a tensor (torch 2.13)
MOMENTS = 2  # tensors per weight, assumed for an optimizer that needs values and cannot run on fake tensors


def compute_state_bytes(spec: Spec, task: Task) -> int:
    """Return the bytes of a checkpoint on disk after a step, each tensor counted once."""
    model = build_meta_model(spec, task).model
    with make_fake_mode(), RealInputsMode():  # numbers of steps are integers, and so real
        allocate_(model, CPU)
        updates = read_updates(task, ResolvedPlan())
        names = assign_parameters(updates, model) if updates else {}
        optimizers = [
            make_optimizer(
                task, update.optimizer or spec.optimizer, ResolvedPlan(), model, names=names[update.name]
            )
            for update in updates
        ] or [make_optimizer(task, spec.optimizer, ResolvedPlan(), model)]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        try:
            for optimizer in optimizers:
                optimizer.step()
            unknown_bytes = 0
        except RuntimeError:
            for optimizer in optimizers:
                optimizer.state.clear()  # some of it may exist
            unknown_bytes = MOMENTS * sum(parameter.nbytes for parameter in trained)
        return unknown_bytes + sum(
            tensor.nbytes + FRAME_BYTES for tensor in collect_state(model, optimizers).values()
        )
