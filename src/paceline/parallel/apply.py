"""The one place where a model meets a plan."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.distributed.mesh import build_mesh, select_data_mesh
from paceline.errors import PlanError
from paceline.parallel.activation_checkpoint import recompute
from paceline.parallel.blocks import find_blocks
from paceline.parallel.compile import compile_units, is_torch_module
from paceline.parallel.ddp import replicate
from paceline.parallel.fsdp import shard
from paceline.plan.plan import ResolvedPlan
from paceline.task import Layout

if TYPE_CHECKING:
    from paceline.parallel.tensor.apply import Splits


def parallelize(
    model: nn.Module,
    layout: Layout,
    plan: ResolvedPlan,
    device: torch.device,
    fill: Callable[[nn.Module], None],
    compile: bool = False,
    mesh: DeviceMesh | None = None,
    splits: "Splits | None" = None,
    gathered: Sequence[str] | None = None,
) -> nn.Module:
    """Lay `model`, which is on the meta device, out as `plan` says; `fill` gives a laid-out model its weights.

    gathered: names of the modules that `fully_shard` gathers on their own; None: the blocks.

    Returns what is to be called in place of `model`. The order matters: split weights, split the sequence, recompute, compile, shard,
    fill, replicate.
    """
    units = find_blocks(model, layout)
    if splits is not None:
        from paceline.parallel.tensor.apply import split_model

        assert mesh is not None
        split_model(model, splits, mesh["tp"])
    if plan.cp > 1:
        from paceline.parallel.context.apply import install_context_parallel

        install_context_parallel(model, units, plan, device)
    if plan.recompute != "none":
        for unit in units or [model]:
            recompute(unit, plan)
    if compile and plan.zero < 2 and any(map(is_torch_module, units)):
        compile_units([model])
    elif compile:
        compile_units(units or [model])
    if plan.zero >= 2 or (plan.splits_model and plan.data_ranks > 1):
        if gathered is not None:
            units = [model.get_submodule(name) for name in gathered]
        shard(model, units, plan, select_data_mesh(mesh if mesh is not None else build_mesh(plan, device)))
        fill(model)
        return model
    fill(model)
    if plan.data_ranks == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return replicate(model)


def check_elementwise(plan: ResolvedPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for an optimizer whose update of a shard is not the shard of its update."""
    if plan.zero >= 2 and not plan.dp == plan.cp == 1 and type(optimizer).__name__ not in ELEMENTWISE:
        raise PlanError(
            f"plan {plan} cuts the weights, and {type(optimizer).__name__} is not known to update each element on its own; "
            f"use ddp or zero1, or one of {', '.join(sorted(ELEMENTWISE))}"
        )


ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
)
