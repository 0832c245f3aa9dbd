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

REFUSE_SPARSE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

MAX_NAMED_GROUPS = 4  # in a note


@dataclass
class OptimizerReport:
    """What to report of an optimizer."""

    notes: list[str] = field(default_factory=list)
    lr_group: str = ""  # whose learning rate is shown, if the parameter groups have different ones


def make_optimizer(
    task: Task,
    spec: Optimizer,
    plan: ResolvedPlan,
    model: nn.Module,
    report: OptimizerReport | None = None,
    names: Container[str] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer that the task defines, else the one that the spec names.

    Under zero=1 its state is sharded over the data ranks. `report`: is filled in. names: of its parameters;
    None: all that are trained. Raises TaskError if the task's optimizer cannot train the model.
    """
    params = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and is_materialized(parameter) and (names is None or name in names)
    ]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError("the model has no parameter to train: all of them have requires_grad=False")
    if not params:  # this stage of a pipeline has none, and torch's optimizers need at least one
        return torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=spec.lr)
    sparse = find_sparse_parameters(model)
    with UserCode("optimizer()", task.optimizer):
        optimizer = task.optimizer(params)
    if optimizer is None:
        optimizer = _from_spec(spec, [parameter for _, parameter in params], dense=not sparse)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"optimizer() must return a torch optimizer or None, got {type(optimizer).__name__}")
    else:
        _check_task_optimizer(optimizer, {id(parameter) for _, parameter in params})
        if report is not None:
            report.notes += _ineffective_options(spec, optimizer)
            _report_groups(optimizer, report)
    check_sparse_support(optimizer, sparse)
    return shard_state(optimizer, plan)


def shard_state(optimizer: torch.optim.Optimizer, plan: ResolvedPlan) -> torch.optim.Optimizer:
    """Return an optimizer like this one, whose state is sharded over the data ranks under zero=1."""
    if plan.zero == 1 and plan.data_ranks > 1 and not plan.splits_model:
        optimizer = _shard_with_torch(optimizer)
    _split_groups_by_mesh(optimizer)
    if plan.zero == 1 and plan.data_ranks > 1 and plan.splits_model:
        _shard_by_parameter(optimizer)
    _start_momentum(local_optimizer(optimizer))
    return optimizer


def _ineffective_options(spec: Optimizer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a note on options of `spec` that have no effect, because the task defines `optimizer`."""
    default = Optimizer()
    options = [
        f"optimizer.{key}={value}" for key, value in spec if key != "clip" and value != getattr(default, key)
    ]
    if not options:
        return []
    kind = type(optimizer).__name__
    return [f"{', '.join(options)} has no effect, because the task's optimizer() returns its own {kind}"]


def _report_groups(optimizer: torch.optim.Optimizer, report: OptimizerReport) -> None:
    """Report whose learning rate the steps show, if groups have different ones: that of the first group."""
    groups = optimizer.param_groups
    if len({float(group["lr"]) for group in groups}) < 2:
        return
    names = [str(group.get("name", f"group {at}")) for at, group in enumerate(groups)]
    report.lr_group = f"group {names[0]}" if "name" in groups[0] else f"{names[0]} of {len(groups)}"
    rates = [f"{name} {float(group['lr']):.3g}" for name, group in zip(names, groups, strict=True)]
    more = f" and {len(rates) - MAX_NAMED_GROUPS} more" if len(rates) > MAX_NAMED_GROUPS else ""
    report.notes.append(
        f"the parameter groups have different learning rates: {', '.join(rates[:MAX_NAMED_GROUPS])}{more}; "
        f"lr is of {names[0]}"
    )


def _check_task_optimizer(optimizer: torch.optim.Optimizer, params: Container[int]) -> None:
    """Raise TaskError if an optimizer of the task cannot train the model.

    params: ids of the model's parameters.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__}, whose step computes the loss again through a "
            "closure, which no plan supports; use an optimizer that steps from the gradients, such as AdamW "
            "or SGD"
        )
    foreign = sum(
        id(parameter) not in params for group in optimizer.param_groups for parameter in group["params"]
    )
    if foreign:
        raise TaskError(
            f"optimizer() trains {foreign} tensors that are not parameters of the model; "
            "build it from the (name, parameter) pairs that it is called with"
        )
    if any(not isinstance(group.get("lr"), (int, float, Tensor)) for group in optimizer.param_groups):
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__} without a learning rate, which the schedule "
            "scales; give it lr="
        )


def _split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Split parameter groups by device mesh, as fused and foreach operations require."""
    for group in list(optimizer.param_groups):
        parts: dict[object, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        first, *others = parts.values() or [[]]  # this stage of a pipeline may have none of a group
        if others:
            group["params"] = first
            optimizer.param_groups += [{**group, "params": params} for params in others]


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Create the momentum of fused SGD.

    torch 2.13: fused SGD fails on a parameter whose first gradient comes later than those of others.
    """
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
    # A fused optimizer passes over the memory once instead of several times.
    fused = dense and all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
    if spec.name == "adamw":
        return torch.optim.AdamW(
            params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=fused
        )
    fused = fused and not any(map(is_dtensor, params))  # torch 2.13: fused SGD does not support DTensor
    return torch.optim.SGD(
        params,
        lr=spec.lr,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay,
        fused=fused or None,
    )


def _shard_with_torch(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's ZeroRedundancyOptimizer with the groups of `optimizer`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    takes = inspect.signature(type(optimizer)).parameters
    groups = [
        {key: value for key, value in group.items() if key == "params" or key in takes}
        for group in optimizer.param_groups
    ]
    defaults = {key: value for key, value in optimizer.defaults.items() if key in takes}
    return ZeroRedundancyOptimizer(groups, optimizer_class=type(optimizer), **defaults)


def _shard_by_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Assign each parameter to one data rank, which updates it and broadcasts it to the others.

    torch 2.13: ZeroRedundancyOptimizer does the same, but it broadcasts DTensors, which is not possible.
    """
    params: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    process_group: dist.ProcessGroup = next(
        parameter.device_mesh for parameter in params if is_dtensor(parameter)
    ).get_group("replicate")
    owners = dict(
        zip(
            params,
            balance_by_size([parameter.numel() for parameter in params], process_group.size()),
            strict=True,
        )
    )
    for group in optimizer.param_groups:
        group["params"] = [
            parameter for parameter in group["params"] if owners[parameter] == process_group.rank()
        ]
    for parameter in params:
        if owners[parameter] != process_group.rank():
            optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def broadcast_parameters(*step: Any) -> None:
        broadcasts = [
            dist.broadcast(local_tensor(parameter), group=process_group, group_src=owner, async_op=True)
            for parameter, owner in owners.items()
        ]
        for work in broadcasts:
            assert work is not None
            work.wait()

    optimizer.register_step_post_hook(broadcast_parameters)


def balance_by_size(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that each size is assigned to: the largest first, to the rank with the least so far."""
    load, owners = [0] * ranks, [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        owners[at] = load.index(min(load))
        load[owners[at]] += sizes[at]
    return owners


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the state of this rank: the inner one of a ZeroRedundancyOptimizer."""
    return getattr(optimizer, "optim", optimizer)


def check_schedule(schedule: Schedule, total: int) -> None:
    """Raise SpecError if the warm-up is longer than the training.

    schedule: with lengths in samples. `total`: samples of the training.
    """
    assert isinstance(schedule.warmup, int)
    if schedule.warmup > total:
        raise SpecError(
            f"schedule.warmup={schedule.warmup} samples is longer than the training, {total} samples"
        )


def compute_lr_factor(schedule: Schedule, samples: int, total: int) -> float:
    """Return the factor on the learning rate after `samples` of `total` samples.

    The warm-up is linear and starts at 1 / (warmup + 1), not at 0. `schedule`: with lengths in samples.
    """
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


def find_sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are sparse, by name."""
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
    """Raise PlanError if the model has sparse gradients and the plan shards or averages dense tensors."""
    names = list(find_sparse_parameters(model))
    if names and (plan.zero or plan.splits_model or plan.cp > 1 or plan.is_asynchronous):
        raise PlanError(
            f"plan {plan}: the gradient of {names[0]} is sparse, which only single and ddp support; "
            "use one of these plans, or sparse=False"
        )


def check_sparse_support(optimizer: torch.optim.Optimizer, sparse: Mapping[str, nn.Parameter]) -> None:
    """Raise TaskError if one of torch's optimizers refuses sparse gradients, or would have sparse state.

    sparse: the parameters with sparse gradients, by name.
    """
    ids = {id(parameter): name for name, parameter in sparse.items()}
    for group in optimizer.param_groups:
        if name := next((ids[id(parameter)] for parameter in group["params"] if id(parameter) in ids), None):
            kind, decays = type(optimizer), bool(group.get("weight_decay"))
            refuses = kind in REFUSE_SPARSE or (kind is torch.optim.SGD and bool(group["momentum"]))
            if refuses or (decays and kind in (torch.optim.SGD, torch.optim.Adagrad)):
                raise TaskError(
                    f"the gradient of {name} is sparse, which {kind.__name__} does not support with its "
                    "settings; use --optimizer sgd with optimizer.momentum=0 and optimizer.weight_decay=0, "
                    "Adagrad in optimizer(), or sparse=False"
                )


def coalesce_(params: Iterable[nn.Parameter]) -> None:
    """Sum the duplicate rows of sparse gradients."""
    for parameter in params:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def local_gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the part of each gradient that this rank holds, without parameters that have no gradient.

    Of a sparse gradient, which must be coalesced, these are its rows.
    """
    grads = [grad for parameter in params if (grad := parameter.grad) is not None]
    shards = list(map(local_tensor, grads)) if any(map(is_dtensor, grads)) else grads
    return [grad._values() if grad.is_sparse else grad for grad in shards]


class OptimizerStep:
    """Calls `optimizer.step()`, or computes the same bits in less time.

    torch 2.13: `AdamW.step` collects its tensors in each step, and looks for a profiler, hooks and its
    compiler. For a small model that takes longer than the update. So this class collects the tensors of a
    fused AdamW once. It calls torch's `step` for other optimizers, if there are hooks, and in steps in which
    a parameter has no gradient. Call it without grad mode.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._is_fused_adamw = type(optimizer) is torch.optim.AdamW and all(
            map(_is_fused, optimizer.param_groups)
        )
        # The state whose tensors were collected. A state that is loaded is another object.
        self._state: object = None
        self._groups: list[_GroupTensors] = []

    def __call__(self) -> None:
        optimizer = self.optimizer
        if not self._is_fused_adamw or optimizer.state is not self._state or _is_hooked(optimizer):
            optimizer.step()
            if self._is_fused_adamw:
                self._collect()
            return
        grads = [
            [grad for parameter in tensors.params if (grad := parameter.grad) is not None]
            for tensors in self._groups
        ]
        if [len(group["params"]) for group in optimizer.param_groups] != [
            len(group_grads) for group_grads in grads
        ]:
            optimizer.step()  # a parameter has no gradient, or was added
            return
        for tensors, group_grads in zip(self._groups, grads, strict=True):
            group = tensors.group
            torch._foreach_add_(tensors.steps, 1)
            torch._fused_adamw_(
                tensors.params,
                group_grads,
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
        """Collect the tensors of all groups. Call after a step of torch, which creates missing state."""
        state = self.optimizer.state
        groups = self.optimizer.param_groups
        if not all(parameter in state for group in groups for parameter in group["params"]):
            return
        self._state = state
        self._groups = [
            _GroupTensors(
                group,
                list(group["params"]),
                *([state[p][key] for p in group["params"]] for key in ("step", "exp_avg", "exp_avg_sq")),
            )
            for group in groups
        ]


@dataclass
class _GroupTensors:
    """The tensors of a parameter group."""

    group: dict[str, Any]
    params: list[Tensor]
    steps: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


def _is_fused(group: Mapping[str, Any]) -> bool:
    """Return whether one kernel call with plain numbers updates this parameter group of AdamW."""
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
    """Return whether a step has hooks, or `step` is replaced, as torch's schedulers do."""
    return bool(
        _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or "step" in vars(optimizer)
    )


class GradientNorm:
    """The norm of the whole gradient, with each element counted on one rank.

    A shard is counted on the first rank that has a copy of it. A gradient that all ranks hold is counted on
    one rank, so that all ranks count about as many elements.

    torch's own function refuses gradients on different meshes, and runs a collective for each group.

    place: of this rank in the mesh.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], plan: ResolvedPlan, place: MeshCoordinate, device: torch.device
    ):
        self.params, self.device = params, device
        self.has_whole_gradient = plan.zero < 2 and not plan.splits_model  # on every rank
        owners = balance_by_size(
            [0 if is_dtensor(parameter) else parameter.numel() for parameter in params], plan.ranks_per_stage
        )
        self.counted = [
            parameter
            for parameter, owner in zip(params, owners, strict=True)
            if (
                is_first_replica(parameter, place)
                if is_dtensor(parameter)
                else owner == plan.index_in_stage(place)
            )
        ]

    def local_norms(self) -> list[Tensor]:
        """Return the norms of the tensors that this rank counts.

        Over all ranks, the sum of their squares is that of the whole norm.
        """
        return _tensor_norms(local_gradients(self.counted))

    def global_norm(self) -> Tensor:
        """Return the norm, the same on all ranks. A collective, unless every rank has the whole gradient."""
        if self.has_whole_gradient:
            return combine_norms(_tensor_norms(local_gradients(self.params)), self.device)
        squares = combine_norms(self.local_norms(), self.device).square()
        dist.all_reduce(squares)
        return squares.sqrt()


def _tensor_norms(grads: list[Tensor]) -> list[Tensor]:
    grads = [grad for grad in grads if grad.numel()]
    return list(torch._foreach_norm(grads)) if grads else []


def combine_norms(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the norm of tensors with these norms, in float64."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(list(norms)), dtype=torch.float64)


@torch.no_grad()
def scale_(params: Iterable[nn.Parameter], by: Tensor | float) -> None:
    """Multiply the gradients of `params` by a number."""
    grads = local_gradients(params)
    if grads:
        torch._foreach_mul_(grads, by.to(grads[0].dtype) if isinstance(by, Tensor) else by)
