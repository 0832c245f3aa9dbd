"""Sharded data parallelism: `fully_shard` over the blocks of a model."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from paceline.distributed.dtensor import local_tensor, storage_id
from paceline.errors import PlanError, TaskError
from paceline.plan.plan import Plan


def shard(
    model: nn.Module,
    units: list[nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    whole: Collection[nn.Parameter] = (),
) -> None:
    """Apply `fully_shard` to each unit and to `model`.

    Parameters that it cannot shard and those in `whole` stay whole.
    """
    from torch.distributed.fsdp import fully_shard  # 0.7 s to import

    for unit in [*units, model]:
        unit.register_forward_hook(copy_output_views)
    ignored = find_unshardable(model) | {*whole}
    for unit in units:
        if any(parameter not in ignored for parameter in unit.parameters()):
            fully_shard(unit, mesh=mesh, reshard_after_forward=plan.zero == 3, ignored_params=ignored)
    # The backward pass gathers the root again at once, so resharding it has no benefit.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)


def drop_gathered(model: nn.Module) -> None:
    """Free whole parameters that `fully_shard` gathered for a forward pass without a backward pass.

    The next forward pass would use their old values.
    """
    for module in model.modules():
        if reshard := getattr(module, "reshard", None):
            reshard()


def refuse_changed_weights(model: nn.Module, plan: Plan) -> None:
    """Let the first forward pass of a module raise TaskError if it changes its parameters.

    Call before `shard`. The module would change whole parameters that `fully_shard` has gathered, and frees
    again. An embedding with `max_norm` does so.
    """
    names = {module: name for name, module in model.named_modules()}
    hooks: dict[nn.Module, tuple[RemovableHandle, ...]] = {}
    before: dict[nn.Module, list[tuple[str, nn.Parameter, int, int]]] = {}

    def begin(module: nn.Module, args: Any) -> None:
        before[module] = [
            (name, parameter, parameter._version, storage_id(local_tensor(parameter)))
            for name, parameter in module.named_parameters(names[module], recurse=False)
            if parameter.device.type != "meta"
        ]

    def end(module: nn.Module, args: Any, output: Any) -> None:
        for name, parameter, version, storage in before.pop(module, ()):
            if parameter._version != version or storage_id(local_tensor(parameter)) != storage:
                raise TaskError(
                    f"plan {plan} would lose what forward() changes in the parameter {name}; use ddp or "
                    "zero1, or let the optimizer change it"
                )
            for hook in hooks.pop(module, ()):
                hook.remove()

    for module in names:
        if next(module.parameters(recurse=False), None) is not None:
            # `fully_shard` prepends the hook that gathers later, and appends the hook that frees.
            hooks[module] = (
                module.register_forward_pre_hook(begin, prepend=True),
                module.register_forward_hook(end),
            )


def copy_output_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy outputs that are views (a forward hook).

    torch 2.13: an in-place operation on a view removes `fully_shard`'s hook for the backward pass, which
    gathers weights; torch warns of it.
    """

    def is_view(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view()

    return (
        tree_map(lambda leaf: leaf.clone() if is_view(leaf) else leaf, output)
        if any(map(is_view, tree_leaves(output)))
        else None
    )


def find_unshardable(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that `fully_shard` cannot shard; each rank keeps them whole.

    torch 2.13: a unit whose parameters are all empty ends with an assertion.
    """
    return {parameter for parameter in model.parameters() if not parameter.dim() or not parameter.numel()}


def check_dtypes(
    model: nn.Module, units: Sequence[nn.Module], plan: Plan, whole: Collection[nn.Parameter] = ()
) -> None:
    """Raise PlanError if `shard` would shard trained parameters of different data types together."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    remaining = {*names} - find_unshardable(model) - {*whole}
    for unit in [*units, model]:
        own = [parameter for parameter in unit.parameters() if parameter in remaining]
        remaining -= {*own}
        trained = [parameter for parameter in own if parameter.requires_grad]
        for first, other in itertools.pairwise(trained):
            if other.dtype != first.dtype:
                raise PlanError(
                    f"plan {plan} shards parameters together, which must have one data type, got "
                    f"{names[first]} with {_dtype_name(first)} and {names[other]} with {_dtype_name(other)}; "
                    "use ddp or zero1, or another data type"
                )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def average_scalars_(params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average the gradients of scalars over the data ranks, as `fully_shard` does for sharded parameters.

    Scalars may be complex. A gradient stays None if it is None on all ranks.
    """
    # A row for each: real part, imaginary part, and whether the rank has a gradient.
    sums = torch.zeros(len(params), 3, dtype=torch.float64, device=params[0].device)
    for row, parameter in zip(sums, params, strict=True):
        if parameter.grad is not None:
            row[:2] = torch.view_as_real(parameter.grad.to(torch.complex128))
            row[2] = 1.0
    for axis in range(mesh.ndim):
        dist.all_reduce(sums, group=mesh.get_group(axis))
    for (real, imaginary, holders), parameter in zip(sums / mesh.size(), params, strict=True):
        if holders:
            mean = torch.complex(real, imaginary) if parameter.is_complex() else real
            parameter.grad = mean.to(parameter.dtype)


@torch.no_grad()
def average_whole_(params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average the gradients of parameters that each rank keeps whole over the data ranks.

    A gradient stays None if it is None on all ranks.
    """
    held = torch.tensor([float(parameter.grad is not None) for parameter in params], device=params[0].device)
    for axis in range(mesh.ndim):
        dist.all_reduce(held, group=mesh.get_group(axis))
    used = [parameter for parameter, holders in zip(params, held.tolist(), strict=True) if holders]
    for dtype in dict.fromkeys(parameter.dtype for parameter in used):  # in one order on all ranks
        same = [parameter for parameter in used if parameter.dtype == dtype]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in same])
        for axis in range(mesh.ndim):
            dist.all_reduce(flat, group=mesh.get_group(axis))
        flat /= mesh.size()
        for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
            parameter.grad = part.view_as(parameter)
