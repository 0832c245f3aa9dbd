"""A trial of an optimizer on small tensors: what it updates independently, elements or tensors."""

import copy
import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from paceline.distributed.rng import seed_cpu_rngs, seeded_rngs
from paceline.errors import PlanError
from paceline.plan.plan import ResolvedPlan
from paceline.training.optimizers.whole_tensor import WholeTensorOptimizer

# More than the steps after which optimizers first use whole tensors: 10 of SOAP, 25 of Shampoo.
TRIAL_STEPS = 30
MAX_SIZE = 5  # of a dimension of a small tensor; not divisible by 2
# Of the largest tensor of each number of dimensions: optimizers treat large tensors in other ways, such as
# matrices with at least 128 rows and columns in Adafactor, or 4,096 elements in 8-bit optimizers.
LARGE_SIZES = {1: (4099,), 2: (261, 261)}
LARGE_SIZES_OF_OTHERS = (131, 131, 3)
GRADIENTS = 10  # of each tensor, which follow each other
RTOL = 1e-9
MAX_TENSORS = 8  # of each parameter group that the trial has

# The parameters of each group that a trial has, with the shapes of tensors in their place.
TrialGroups = Sequence[Sequence[tuple[nn.Parameter, tuple[int, ...]]]]


class Independence(enum.Enum):
    """What an optimizer updates independently of everything else."""

    ELEMENTS = "elements"
    TENSORS = "tensors"
    NOTHING = "nothing"
    RANDOM = "random"  # nothing, because it draws random numbers


def try_optimizer(optimizer: torch.optim.Optimizer) -> Independence:
    """Return what an optimizer updates independently, from a few steps on small tensors in float64.

    Modes such as that of a dry run, in which tensors have no values, do not apply.

    A copy of the optimizer, with the same options, trains whole tensors, shards of them, and each tensor
    alone. An optimizer that cannot be copied or fails on small tensors counts as one that updates nothing
    independently. Random numbers are restored afterwards.
    """
    groups = _choose_tensors(optimizer)
    with seeded_rngs(0), _disable_current_modes():
        return _compare_trainings(optimizer, groups)


def _compare_trainings(optimizer: torch.optim.Optimizer, groups: TrialGroups) -> Independence:
    first, second = (_try_training(optimizer, groups, seed=seed, in_float64=False) for seed in (0, 1))
    if first is not None and second is not None and not all(map(_are_same, first, second)):
        return Independence.RANDOM
    whole = _try_training(optimizer, groups)
    shards = [_try_training(optimizer, groups, partial(_shard, rank=rank)) for rank in (0, 1)]
    joined = [_join(first, second) for first, second in zip(shards[0] or (), shards[1] or (), strict=False)]
    if _are_equal(whole, joined):
        return Independence.ELEMENTS
    alone = _try_training(optimizer, groups, alternate=True)
    return Independence.TENSORS if _are_equal(whole, alone) else Independence.NOTHING


def _choose_tensors(optimizer: torch.optim.Optimizer) -> TrialGroups:
    """Return some parameters of each group, with small shapes, and large ones for one of each kind."""
    largest: dict[int, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            best = largest.setdefault(parameter.dim(), parameter)
            if parameter.numel() > best.numel():
                largest[parameter.dim()] = parameter
    large = {id(parameter) for parameter in largest.values()}
    return [
        [
            (parameter, _trial_shape(parameter, id(parameter) in large))
            for at, parameter in enumerate(group["params"])
            if at < MAX_TENSORS or id(parameter) in large
        ]
        for group in optimizer.param_groups
    ]


def _trial_shape(parameter: Tensor, is_large: bool) -> tuple[int, ...]:
    limits = LARGE_SIZES.get(parameter.dim(), LARGE_SIZES_OF_OTHERS) if is_large else (MAX_SIZE,)
    return tuple(
        max(1, min(size, limits[min(dim, len(limits) - 1)])) for dim, size in enumerate(parameter.shape)
    )


def _shard(tensor: Tensor, rank: int) -> Tensor:
    """Return one of two shards of unequal length; a scalar is whole on both."""
    if not tensor.dim():
        return tensor
    cut = (len(tensor) + 1) // 2
    return tensor[cut:] if rank else tensor[:cut]


def _join(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second]) if first.dim() else first


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, or both not finite."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _are_equal(expected: Sequence[Tensor] | None, found: Sequence[Tensor] | None) -> bool:
    """Return whether two trainings ended with the same tensors; a failed training equals none."""
    if not expected or not found or len(expected) != len(found):
        return False
    return all(
        torch.allclose(one, other, rtol=RTOL, atol=RTOL) for one, other in zip(expected, found, strict=True)
    )


def _try_training(
    optimizer: torch.optim.Optimizer,
    groups: TrialGroups,
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    alternate: bool = False,
    seed: int = 0,
    in_float64: bool = True,
) -> list[Tensor] | None:
    """Return what `_train` does; None if the optimizer fails on such tensors."""
    try:
        return _train(optimizer, groups, part, alternate, seed, in_float64)
    except Exception:  # user code, which may need more than small tensors
        return None


def _train(
    optimizer: torch.optim.Optimizer,
    groups: TrialGroups,
    part: Callable[[Tensor], Tensor],
    alternate: bool,
    seed: int,
    in_float64: bool,
) -> list[Tensor]:
    """Return small tensors after steps of a copy of the optimizer.

    part: of the whole tensors, which the copy trains. alternate: train each tensor by a copy of its own.
    seed: of random numbers that the optimizer draws. in_float64: else in the data types of the parameters.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(parameter: nn.Parameter, shape: tuple[int, ...], are_rows_unequal: bool = False) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if are_rows_unequal:  # so that a step scales shards in other ways than the step before
            values *= torch.randn(
                shape[:1] + (1,) * (len(shape) - 1), generator=generator, dtype=torch.float64
            ).exp()
        return values if in_float64 else values.to(parameter.dtype)

    wholes, grads = [], []
    for of_group in groups:
        for parameter, shape in of_group:
            wholes.append(draw(parameter, shape))
            grads.append([draw(parameter, shape, are_rows_unequal=True) for _ in range(GRADIENTS)])
    params = [nn.Parameter(part(whole).clone()) for whole in wholes]
    for chosen in [[at] for at in range(len(params))] if alternate else [range(len(params))]:
        seed_cpu_rngs(seed)
        twin = _copy_with(optimizer, groups, params, set(chosen))
        for step in range(TRIAL_STEPS):
            for at in chosen:
                params[at].grad = part(grads[at][step % GRADIENTS]).clone()
            twin.step()
        for at in chosen:
            params[at].grad = None
    return [parameter.detach() for parameter in params]


def _copy_with(
    optimizer: torch.optim.Optimizer, groups: TrialGroups, params: Sequence[nn.Parameter], chosen: set[int]
) -> torch.optim.Optimizer:
    """Return a copy of the optimizer that trains the chosen ones of `params`."""
    taken = iter(range(len(params)))
    others = {
        id(parameter): nn.Parameter(torch.zeros(0))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    kept = []
    for of_group in groups:
        indices = [next(taken) for _ in of_group]
        others |= {id(parameter): params[at] for (parameter, _), at in zip(of_group, indices, strict=True)}
        kept.append([params[at] for at in indices if at in chosen])
    return copy_optimizer(optimizer, kept, others)


def copy_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    replaced: Mapping[int, nn.Parameter],
) -> torch.optim.Optimizer:
    """Return an unfused copy of an optimizer with its options and attributes, but without its hooks.

    groups: the parameters of each of its groups. replaced: what takes the place of its parameters, by id.
    """
    hooks = {key for key in vars(optimizer) if key.endswith("_hooks")}
    attributes = {key: value for key, value in vars(optimizer).items() if key not in hooks}
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))  # deepcopy drops attributes of subclasses
    vars(twin).update(copy.deepcopy(attributes, dict(replaced)) | {key: OrderedDict() for key in hooks})
    for group, params in zip(twin.param_groups, groups, strict=True):
        group["params"] = list(params)
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
    if not shards and not divides and plan.tp == 1:
        return
    found = try_optimizer(optimizer)
    if found is Independence.RANDOM:
        raise PlanError(
            f"plan {plan}: trial steps showed that {kind.__name__} draws random numbers, which would be "
            "others than those of one process; use single or ddp, or a built-in --optimizer"
        )
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
