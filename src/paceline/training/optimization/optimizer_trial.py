"""A trial of an optimizer on small tensors: what it updates independently, elements or tensors."""

import copy
import enum
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from paceline.errors import PlanError
from paceline.plan.plan import ResolvedPlan
from paceline.training.optimizers.whole_tensor import WholeTensorOptimizer

TRIAL_STEPS = 3
MAX_SIZE = 5  # of a dimension of a small tensor; not divisible by 2
RTOL = 1e-9
MAX_TENSORS = 8  # of each parameter group that the trial has


class Independence(enum.Enum):
    """What an optimizer updates independently of everything else."""

    ELEMENTS = "elements"
    TENSORS = "tensors"
    NOTHING = "nothing"


def try_optimizer(optimizer: torch.optim.Optimizer) -> Independence:
    """Return what an optimizer updates independently, from a few steps on small tensors in float64.

    Modes such as that of a dry run, in which tensors have no values, do not apply.

    A copy of the optimizer, with the same options, trains whole tensors, shards of them, and each tensor
    alone. An optimizer that cannot be copied or fails on small tensors counts as one that updates nothing
    independently. Random numbers are restored afterwards.
    """
    groups = [
        [_small_shape(parameter) for parameter in group["params"][:MAX_TENSORS]]
        for group in optimizer.param_groups
    ]
    state = random.getstate(), torch.get_rng_state()
    try:
        with _disable_current_modes():
            return _compare_trainings(optimizer, groups)
    finally:
        random.setstate(state[0])
        torch.set_rng_state(state[1])


def _compare_trainings(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[tuple[int, ...]]]
) -> Independence:
    whole = _try_training(optimizer, groups)
    shards = [_try_training(optimizer, groups, partial(_shard, rank=rank)) for rank in (0, 1)]
    joined = [_join(first, second) for first, second in zip(shards[0] or (), shards[1] or (), strict=False)]
    if _are_equal(whole, joined):
        return Independence.ELEMENTS
    alone = _try_training(optimizer, groups, alternate=True)
    return Independence.TENSORS if _are_equal(whole, alone) else Independence.NOTHING


def _small_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(max(1, min(size, MAX_SIZE)) for size in parameter.shape)


def _shard(tensor: Tensor, rank: int) -> Tensor:
    """Return one of two shards of unequal length; a scalar is whole on both."""
    if not tensor.dim():
        return tensor
    cut = (len(tensor) + 1) // 2
    return tensor[cut:] if rank else tensor[:cut]


def _join(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second]) if first.dim() else first


def _are_equal(expected: Sequence[Tensor] | None, found: Sequence[Tensor] | None) -> bool:
    """Return whether two trainings ended with the same tensors; a failed training equals none."""
    if not expected or not found or len(expected) != len(found):
        return False
    return all(
        torch.allclose(one, other, rtol=RTOL, atol=RTOL) for one, other in zip(expected, found, strict=True)
    )


def _try_training(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[tuple[int, ...]]],
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    alternate: bool = False,
) -> list[Tensor] | None:
    """Return what `_train` does; None if the optimizer fails on such tensors."""
    try:
        return _train(optimizer, groups, part, alternate)
    except Exception:  # user code, which may need more than small tensors
        return None


def _train(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[tuple[int, ...]]],
    part: Callable[[Tensor], Tensor],
    alternate: bool,
) -> list[Tensor]:
    """Return small tensors after steps of a copy of the optimizer.

    part: of the whole tensors, which the copy trains. alternate: train each tensor by a copy of its own.
    """
    generator = torch.Generator().manual_seed(0)
    wholes, grads = [], []
    for of_group in groups:
        for shape in of_group:
            wholes.append(torch.randn(shape, generator=generator, dtype=torch.float64))
            grads.append(
                [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(TRIAL_STEPS)]
            )
    params = [nn.Parameter(part(whole).clone()) for whole in wholes]
    for chosen in [[at] for at in range(len(params))] if alternate else [range(len(params))]:
        torch.manual_seed(0)
        random.seed(0)
        twin = _copy_with(optimizer, groups, params, set(chosen))
        for step in range(TRIAL_STEPS):
            for at in chosen:
                params[at].grad = part(grads[at][step]).clone()
            twin.step()
        for at in chosen:
            params[at].grad = None
    return [parameter.detach() for parameter in params]


def _copy_with(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[tuple[int, ...]]],
    params: Sequence[nn.Parameter],
    chosen: set[int],
) -> torch.optim.Optimizer:
    """Return a copy of the optimizer that trains the chosen ones of `params`."""
    taken = iter(range(len(params)))
    memo: dict[int, Any] = {}
    kept = []
    for group, of_group in zip(optimizer.param_groups, groups, strict=True):
        indices = [next(taken) for _ in of_group]
        memo |= {id(p): params[at] for p, at in zip(group["params"], indices, strict=False)}
        memo |= {id(p): nn.Parameter(torch.zeros(0)) for p in group["params"][len(of_group) :]}
        kept.append([params[at] for at in indices if at in chosen])
    hooks = {key for key in vars(optimizer) if key.endswith("_hooks")}
    attributes = {key: value for key, value in vars(optimizer).items() if key not in hooks}
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))  # deepcopy drops attributes of subclasses
    vars(twin).update(copy.deepcopy(attributes, memo) | {key: OrderedDict() for key in hooks})
    for group, own in zip(twin.param_groups, kept, strict=True):
        group["params"] = own
        for key in ("fused", "foreach"):
            if key in group:
                group[key] = False
    return twin


def check_independence(optimizer: torch.optim.Optimizer, plan: ResolvedPlan) -> None:
    """Raise PlanError if a rank of this plan would compute another update than one process.

    Built-in optimizers are exact under every plan; others are tried.
    """
    kind = type(optimizer)
    if isinstance(optimizer, WholeTensorOptimizer) or kind in ELEMENTWISE:
        return
    shards = plan.zero >= 2 and plan.data_ranks > 1
    divides = plan.pp > 1 or (plan.zero == 1 and plan.data_ranks > 1) or plan.num_servers > 0
    if not shards and not divides:
        return
    found = try_optimizer(optimizer)
    if shards and found is not Independence.ELEMENTS:
        plans = "ddp" if found is Independence.NOTHING else "ddp, zero1 or pp"
        raise PlanError(
            f"plan {plan} shards the weights, but trial steps on small shards showed that {kind.__name__} "
            f"does not update each element independently; use {plans}, or a built-in --optimizer"
        )
    if divides and found is Independence.NOTHING:
        raise PlanError(
            f"plan {plan} divides the parameters over ranks, but trial steps on small tensors showed that "
            f"{kind.__name__} does not update each tensor independently; use ddp, or a built-in --optimizer"
        )


def updates_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer, of torch or of the task, updates each element independently."""
    return type(optimizer) in ELEMENTWISE or try_optimizer(optimizer) is Independence.ELEMENTS


ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
    }
)
