"""torch.compile, one block at a time."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import LaunchError, PlanError
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


def compile_units(units: list[nn.Module]) -> None:
    """Compile each unit; equal units are compiled once.

    Raises LaunchError if another user owns the compiler's cache.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    owner = os.stat(cache_dir()).st_uid
    # Code from the cache runs in this process, and torch uses any directory in /tmp with this user's name.
    if owner not in (os.geteuid(), 0):
        raise LaunchError(
            f"the cache of torch's compiler, {cache_dir()}, belongs to user {owner}; set "
            "TORCHINDUCTOR_CACHE_DIR"
        )
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
