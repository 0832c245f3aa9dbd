"""Apply a plan to a model: split, recompute, compile, shard, initialize and replicate."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.distributed.mesh import build_mesh, select_data_mesh
from paceline.parallel.blocks import find_blocks
from paceline.parallel.compile import recompute_and_compile
from paceline.parallel.data_parallel.ddp import replicate
from paceline.parallel.data_parallel.fsdp import refuse_changed_weights, shard
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
    """Apply `plan` to `model`, which is on the meta device, and return the module to call instead of `model`.

    fill: gives the model its weights after it is split and sharded.
    mesh: of the plan; required for `splits`.
    splits: how tensor parallelism splits the model; None: no tensor parallelism.
    gathered: names of the modules that `fully_shard` gathers separately; None: the blocks.

    The order matters: split weights, split the sequence, recompute, compile, shard, fill, replicate.
    """
    units = find_blocks(model, layout)
    if splits is not None:
        from paceline.parallel.tensor.apply import split_model

        assert mesh is not None
        split_model(model, splits, mesh["tp"])
    if plan.cp > 1:
        from paceline.parallel.context.apply import install_context_parallel
        from paceline.parallel.context.stacks import find_stacks

        install_context_parallel(model, find_stacks(model, layout), plan, device)
    recompute_and_compile(units or [model], plan, compile, whole=model if plan.zero < 2 else None)
    if plan.zero >= 2 or (plan.splits_model and plan.data_ranks > 1):
        if gathered is not None:
            units = [model.get_submodule(name) for name in gathered]
        if not compile:  # whose graphs know no versions of tensors
            refuse_changed_weights(model, plan)
        shard(model, units, plan, select_data_mesh(mesh if mesh is not None else build_mesh(plan, device)))
        fill(model)
        return model
    fill(model)
    if plan.data_ranks == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return replicate(model)
