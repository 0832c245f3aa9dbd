"""Optimizers, learning-rate schedules, and the norm of the whole gradient."""

import inspect
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.distributed.dtensor import is_dtensor, is_first_replica, is_materialized, local_tensor
from paceline.errors import PlanError, SpecError, TaskError
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.spec import Optimizer, Schedule
from paceline.task import Task
from paceline.user_code import UserCode

NO_SPARSE = (
    *(
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
    ),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)


GROUPS_NAMED = 4  # in a note


@dataclass
class OptimizerReport:
    """What the user should know of the optimizer. `lr_group`: whose learning rate is shown, where parameter groups have different ones."""

    notes: list[str] = field(default_factory=list)
    lr_group: str = ""


def make_optimizer(
    task: Task, spec: Optimizer, plan: ResolvedPlan, model: nn.Module, report: OptimizerReport | None = None
) -> torch.optim.Optimizer:
    """The task's own optimizer or the one of the spec, its state cut over the data ranks under zero=1. `report` is filled in."""
    params = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and is_materialized(parameter)
    ]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError("the model has no parameter to train: all of them have requires_grad=False")
    if not params:  # in this stage of a pipeline; torch's optimizers refuse to have none
        return torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=spec.lr)
    sparse = sparse_parameters(model)
    with UserCode("optimizer()", task.optimizer):
        optimizer = task.optimizer(params)
    if optimizer is None:
        optimizer = _from_spec(spec, [parameter for _, parameter in params], dense=not sparse)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"optimizer() must return a torch optimizer or None, got {type(optimizer).__name__}")
    else:
        _check_own(optimizer, {id(parameter) for _, parameter in params})
        if report is not None:
            report.notes += _without_effect(spec, optimizer)
            _report_groups(optimizer, report)
    check_takes_sparse(optimizer, sparse)
    if plan.zero == 1 and plan.data_ranks > 1 and not plan.splits_model:
        optimizer = _cut_state(optimizer)
    _part_by_mesh(optimizer)
    if plan.zero == 1 and plan.data_ranks > 1 and plan.splits_model:
        _deal_state(optimizer)
    _start_momentum(local_optimizer(optimizer))
    return optimizer


def _without_effect(spec: Optimizer, own: torch.optim.Optimizer) -> list[str]:
    """A note of what is asked of the optimizer and not obeyed, because the task has its own."""
    default = Optimizer()
    asked = [
        f"optimizer.{key}={value}" for key, value in spec if key != "clip" and value != getattr(default, key)
    ]
    return (
        [
            f"{', '.join(asked)} has no effect, because the task's optimizer() returns its own {type(own).__name__}"
        ]
        if asked
        else []
    )


def _report_groups(optimizer: torch.optim.Optimizer, report: OptimizerReport) -> None:
    """Say of which group the learning rate is that the steps show: the first."""
    groups = optimizer.param_groups
    if len({float(group["lr"]) for group in groups}) < 2:
        return
    names = [str(group.get("name", f"group {at}")) for at, group in enumerate(groups)]
    report.lr_group = f"group {names[0]}" if "name" in groups[0] else f"{names[0]} of {len(groups)}"
    each = [f"{name} {float(group['lr']):.3g}" for name, group in zip(names, groups, strict=True)]
    more = f" and {len(each) - GROUPS_NAMED} more" if len(each) > GROUPS_NAMED else ""
    report.notes.append(
        f"the parameter groups have different learning rates: {', '.join(each[:GROUPS_NAMED])}{more}; lr is of {names[0]}"
    )


def _check_own(optimizer: torch.optim.Optimizer, params: Container[int]) -> None:
    """Raise TaskError for an optimizer of the task that cannot train the model; `params`: ids of its parameters."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__}, whose step computes the loss again through a closure, which no plan can do; "
            "use one that steps from the gradients, such as AdamW or SGD"
        )
    foreign = sum(
        id(parameter) not in params for group in optimizer.param_groups for parameter in group["params"]
    )
    if foreign:
        raise TaskError(
            f"optimizer() trains {foreign} tensors that are not parameters of the model; build it from the (name, parameter) pairs that it "
            "is called with"
        )
    if any(not isinstance(group.get("lr"), (int, float, Tensor)) for group in optimizer.param_groups):
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__} without a learning rate, which the schedule scales; give it lr="
        )


def _part_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Tensors that are cut over unlike meshes cannot go into one fused or foreach operation: they get groups of their own."""
    for group in list(optimizer.param_groups):
        parts: dict[object, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        first, *others = parts.values() or [[]]  # a group of which this stage of a pipeline holds nothing
        if others:
            group["params"] = first
            optimizer.param_groups += [{**group, "params": params} for params in others]


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Fused SGD (torch 2.13) fails on a parameter whose first gradient comes later than those of others."""
    for group in optimizer.param_groups:
        if (
            isinstance(optimizer, torch.optim.SGD)
            and group["fused"]
            and group["momentum"]
            and not group["dampening"]
        ):
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(
                    parameter, requires_grad=False
                )


def _from_spec(spec: Optimizer, params: Sequence[nn.Parameter], dense: bool) -> torch.optim.Optimizer:
    # One pass over the memory instead of several; fused SGD does not know DTensor (torch 2.13).
    fused = dense and all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
    if spec.name == "adamw":
        return torch.optim.AdamW(
            params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=fused
        )
    fused = fused and not any(map(is_dtensor, params))
    return torch.optim.SGD(
        params,
        lr=spec.lr,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay,
        fused=fused or None,
    )


def _cut_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    takes = inspect.signature(type(optimizer)).parameters
    groups = [
        {key: value for key, value in group.items() if key == "params" or key in takes}
        for group in optimizer.param_groups
    ]
    defaults = {key: value for key, value in optimizer.defaults.items() if key in takes}
    return ZeroRedundancyOptimizer(groups, optimizer_class=type(optimizer), **defaults)


def _deal_state(optimizer: torch.optim.Optimizer) -> None:
    """Leave each parameter to one of the data ranks, which updates it and sends it to the others. ZeroRedundancyOptimizer does the
    same, but broadcasts parameters as they are, which DTensors cannot be (torch 2.13)."""
    params: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ranks: dist.ProcessGroup = next(
        parameter.device_mesh for parameter in params if is_dtensor(parameter)
    ).get_group("replicate")
    owners = dict(
        zip(params, balance_by_size([parameter.numel() for parameter in params], ranks.size()), strict=True)
    )
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if owners[parameter] == ranks.rank()]
    for parameter in params:
        if owners[parameter] != ranks.rank():
            optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def send(*step: Any) -> None:
        sent = [
            dist.broadcast(local_tensor(parameter), group=ranks, group_src=owner, async_op=True)
            for parameter, owner in owners.items()
        ]
        for work in sent:
            assert work is not None
            work.wait()

    optimizer.register_step_post_hook(send)


def balance_by_size(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which of so many ranks each goes to, so that all get about as much: the largest first, to whom has least."""
    load, owners = [0] * ranks, [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        owners[at] = load.index(min(load))
        load[owners[at]] += sizes[at]
    return owners


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this rank's state."""
    return getattr(optimizer, "optim", optimizer)


def check_schedule(schedule: Schedule, total: int) -> None:
    """Raise SpecError for a warm-up that is longer than the training of `total` samples. `schedule`: in samples."""
    assert isinstance(schedule.warmup, int)
    if schedule.warmup > total:
        raise SpecError(
            f"schedule.warmup={schedule.warmup} samples is longer than the training, {total} samples"
        )


def factor(schedule: Schedule, samples: int, total: int) -> float:
    """Factor on the learning rate after so many of `total` samples. The warm-up rises in a line, not from 0 but from its first sample.

    schedule: its lengths in samples."""
    assert isinstance(schedule.warmup, int)
    if samples < schedule.warmup:
        return (samples + 1) / (schedule.warmup + 1)
    if schedule.name == "step":
        assert isinstance(schedule.every, int)
        return schedule.factor ** (samples // schedule.every)
    done = min(1.0, (samples - schedule.warmup) / max(1, total - schedule.warmup))
    if schedule.name == "cosine":
        return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * done)) / 2
    if schedule.name == "linear":
        return 1 - (1 - schedule.floor) * done
    return 1.0


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are sparse, by name."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in sparse and parameter.requires_grad
    }


def check_sparse(plan: ResolvedPlan, model: nn.Module) -> None:
    """Raise PlanError for sparse gradients under a plan that cuts or averages dense tensors."""
    names = list(sparse_parameters(model))
    if names and (plan.zero or plan.splits_model or plan.cp > 1 or plan.is_asynchronous):
        raise PlanError(
            f"plan {plan}: the gradient of {names[0]} is sparse, which single and ddp alone can do; use one of them, or sparse=False"
        )


def check_takes_sparse(optimizer: torch.optim.Optimizer, sparse: Mapping[str, nn.Parameter]) -> None:
    """Raise TaskError for one of torch's optimizers that takes no sparse gradients, or whose state would be sparse."""
    ids = {id(parameter): name for name, parameter in sparse.items()}
    for group in optimizer.param_groups:
        if found := next((ids[id(parameter)] for parameter in group["params"] if id(parameter) in ids), None):
            kind, decays = type(optimizer), bool(group.get("weight_decay"))
            refuses = kind in NO_SPARSE or (kind is torch.optim.SGD and bool(group["momentum"]))
            if refuses or (decays and kind in (torch.optim.SGD, torch.optim.Adagrad)):
                raise TaskError(
                    f"the gradient of {found} is sparse, which {kind.__name__} as it is set cannot take; use --optimizer sgd with "
                    "optimizer.momentum=0 and optimizer.weight_decay=0, Adagrad in optimizer(), or sparse=False"
                )


def coalesce_(params: Iterable[nn.Parameter]) -> None:
    """Let each row be in a sparse gradient once."""
    for parameter in params:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def local_gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """What this rank holds of each gradient that there is; of sparse ones, which are coalesced, the rows."""
    grads = [grad for parameter in params if (grad := parameter.grad) is not None]
    held = list(map(local_tensor, grads)) if any(map(is_dtensor, grads)) else grads
    return [grad._values() if grad.is_sparse else grad for grad in held]


class OptimizerStep:
    """Calls `optimizer.step()`, or computes the same to the last bit in less time.

    torch's `AdamW.step` (2.13) collects its tensors anew in each step, and looks for a profiler, hooks and its compiler on the way: for
    a small model that takes longer than the update. So the tensors of a fused AdamW are collected once. Other optimizers, hooks, and
    steps in which a parameter has no gradient go through torch's. Gradients must be off.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._is_known = type(optimizer) is torch.optim.AdamW and all(map(_is_fused, optimizer.param_groups))
        self._state: object = (
            None  # of which the tensors were collected; a state that is loaded is another object
        )
        self._collected: list[_Collected] = []

    def __call__(self) -> None:
        optimizer = self.optimizer
        if not self._is_known or optimizer.state is not self._state or _is_hooked(optimizer):
            optimizer.step()
            if self._is_known:
                self._collect()
            return
        grads = [
            [grad for parameter in tensors.params if (grad := parameter.grad) is not None]
            for tensors in self._collected
        ]
        if [len(group["params"]) for group in optimizer.param_groups] != [len(found) for found in grads]:
            optimizer.step()  # a parameter has no gradient, or was added
            return
        for tensors, found in zip(self._collected, grads, strict=True):
            group = tensors.group
            torch._foreach_add_(tensors.steps, 1)
            torch._fused_adamw_(
                tensors.params,
                found,
                tensors.exp_avgs,
                tensors.exp_avg_sqs,
                [],
                tensors.steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _collect(self) -> None:
        """After a step, in which torch makes the state of parameters that have none."""
        state = self.optimizer.state
        groups = self.optimizer.param_groups
        if not all(parameter in state for group in groups for parameter in group["params"]):
            return
        self._state = state
        self._collected = [
            _Collected(
                group,
                list(group["params"]),
                *([state[p][key] for p in group["params"]] for key in ("step", "exp_avg", "exp_avg_sq")),
            )
            for group in groups
        ]


@dataclass
class _Collected:
    """The tensors of a parameter group."""

    group: dict[str, Any]
    params: list[Tensor]
    steps: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


def _is_fused(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group of AdamW is updated by one call of its kernel, on numbers."""
    params = group["params"]
    is_plain = all(type(parameter.data) is Tensor for parameter in params)
    are_numbers = not any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
    options = any(group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
    return (
        group["fused"]
        and is_plain
        and are_numbers
        and not options
        and len({(p.device, p.dtype) for p in params}) == 1
    )


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything but the update belongs to a step; schedulers of torch replace `step`."""
    return bool(
        _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or "step" in vars(optimizer)
    )


class Norm:
    """The norm of the whole gradient. torch's own refuses gradients on unlike meshes, and takes a collective for each group.

    Each element is counted on one rank: a shard where it lies, on the first of its copies; a gradient that all ranks hold
    on a rank that is dealt to it by size.

    plan, place: of this rank, the data degree said.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], plan: ResolvedPlan, place: MeshCoordinate, device: torch.device
    ):
        self.params, self.device = params, device
        self.whole_here = plan.zero < 2 and not plan.splits_model  # on every rank
        owners = balance_by_size(
            [0 if is_dtensor(parameter) else parameter.numel() for parameter in params], plan.ranks_per_stage
        )
        self.counted_here = [
            parameter
            for parameter, owner in zip(params, owners, strict=True)
            if (
                is_first_replica(parameter, place)
                if is_dtensor(parameter)
                else owner == plan.index_in_stage(place)
            )
        ]

    def here(self) -> list[Tensor]:
        """The norms of the tensors that are counted on this rank; the squares of those of all ranks add up to that of the whole."""
        return _norms(local_gradients(self.counted_here))

    def whole(self) -> Tensor:
        """The norm, the same on all ranks; a collective only where no rank has all of it."""
        norm = combined(
            self.here() if not self.whole_here else _norms(local_gradients(self.params)), self.device
        )
        if self.whole_here:
            return norm
        squares = norm.square()
        dist.all_reduce(squares)
        return squares.sqrt()


def _norms(grads: list[Tensor]) -> list[Tensor]:
    grads = [grad for grad in grads if grad.numel()]
    return list(torch._foreach_norm(grads)) if grads else []


def combined(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the norm of tensors with these norms, in float64."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(list(norms)), dtype=torch.float64)


@torch.no_grad()
def scale_(params: Iterable[nn.Parameter], by: Tensor | float) -> None:
    grads = local_gradients(params)
    if grads:
        torch._foreach_mul_(grads, by.to(grads[0].dtype) if isinstance(by, Tensor) else by)
