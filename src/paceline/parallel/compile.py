"""torch.compile, one block at a time."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import LaunchError, PlanError
from paceline.parallel.activation_checkpoint import has_buffers, recompute, refuse_changed_buffers
from paceline.plan.plan import Plan


def check_compilable(plan: Plan) -> None:
    """Raise PlanError for a plan whose blocks cannot be compiled."""
    if plan.cp > 1:
        raise PlanError(f"plan {plan}: ring attention cannot be compiled yet; leave --compile or cp out")
    # torch 2.13: the compiler saves the mesh of split weights as if it were a tensor
    if plan.tp > 1 and plan.recompute != "none":
        raise PlanError(
            f"plan {plan}: recomputed blocks with split weights cannot be compiled yet; "
            "leave --compile, recompute or tp out"
        )
    if plan.splits_backward:
        raise PlanError(
            f"pp_schedule={plan.pp_schedule} delays the gradients of weights, but a compiled block computes "
            "all of its gradients at once; use pp_schedule=1f1b or interleaved, or leave --compile out"
        )


def recompute_and_compile(
    units: Sequence[nn.Module], plan: Plan, compile: bool, whole: nn.Module | None = None
) -> None:
    """Recompute `units` as the plan says and, with `compile`, compile them.

    whole: compiled in place of its `units` where units of torch's own classes allow no other way; None:
    the units are compiled in any case.
    """
    # A recomputation gives buffers back their values, which compiled code cannot do: such units are compiled
    # inside of the recomputation.
    inside = [unit for unit in units if compile and plan.recompute == "full" and has_buffers(unit)]
    outside = [unit for unit in units if unit not in inside]
    compile_units(inside)
    if plan.recompute != "none":
        for unit in units:
            recompute(unit, plan, buffers_change=not compile or unit in inside)
    if not compile:
        return
    if whole is not None and not inside and any(map(is_torch_module, units)):
        outside = [whole]
    compile_units(outside)
    if plan.recompute != "none":
        for unit in filter(has_buffers, outside):
            refuse_changed_buffers(unit, plan, "use recompute=full, or leave --compile or recompute out")


def compile_units(units: Sequence[nn.Module]) -> None:
    """Compile each unit; equal units are compiled once.

    Raises LaunchError if another user owns the compiler's cache.
    """
    check_compiler_cache()
    for module in units:
        inner = module.forward

        def forward(*args: Any, inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        # Dynamo does not trace a forward of torch's own that is called first, and counts recompilations by
        # code object.
        forward.__code__ = forward.__code__.replace()
        module.forward = torch.compile(forward if is_torch_module(module) else inner)


def is_torch_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def check_compiler_cache() -> None:
    """Raise LaunchError if another user owns the compiler's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    owner = os.stat(cache_dir()).st_uid
    # Code from the cache runs in this process, and torch uses any directory in /tmp with this user's name.
    if owner not in (os.geteuid(), 0):
        raise LaunchError(
            f"the cache of torch's compiler, {cache_dir()}, belongs to user {owner}; set "
            "TORCHINDUCTOR_CACHE_DIR"
        )
