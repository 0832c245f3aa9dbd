"""torch.compile, one block at a time."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import LaunchError, PlanError
from paceline.plan.plan import Plan


def check_compilable(plan: Plan) -> None:
    """Raise PlanError for a plan under which blocks cannot be compiled."""
    if plan.cp > 1:
        raise PlanError(
            f"plan {plan}: attention that goes round a ring of ranks cannot be compiled yet; leave --compile or cp out"
        )
    if (
        plan.tp > 1 and plan.recompute != "none"
    ):  # torch's compiler keeps the mesh of split weights as if it were a tensor (2.13)
        raise PlanError(
            f"plan {plan}: split weights whose blocks run again cannot be compiled yet; leave --compile, recompute or tp out"
        )
    if plan.splits_backward:
        raise PlanError(
            f"pp_schedule={plan.pp_schedule} puts off the gradients of weights, and a compiled block computes all of its gradients at once; "
            "use pp_schedule=1f1b or interleaved, or leave --compile out"
        )


def compile_units(units: list[nn.Module]) -> None:
    """Compile each unit, which is quick where they are alike. (The whole model where they are single layers of torch's own, unless it
    is cut at them.) Raises LaunchError where the compiler's cache is somebody else's."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    owner = os.stat(cache_dir()).st_uid
    if owner not in (
        os.geteuid(),
        0,
    ):  # its code would run here; torch takes whatever lies in /tmp under the name of this user
        raise LaunchError(
            f"torch's compiler keeps its code in {cache_dir()}, which is of user {owner}; set TORCHINDUCTOR_CACHE_DIR"
        )
    for module in units:
        inner = module.forward

        def forward(*args: Any, inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        # Dynamo does not look into a forward of torch's own that is called first, and counts recompilations by code object.
        forward.__code__ = forward.__code__.replace()
        module.forward = torch.compile(forward if is_torch_module(module) else inner)


def is_torch_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
