"""The optimizer of a training, and how its state is sharded."""

import inspect
from collections.abc import Container
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.balance import balance_by_size
from paceline.distributed.dtensor import is_dtensor, is_materialized, local_tensor
from paceline.errors import TaskError
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer
from paceline.task import Task
from paceline.training.optimization.optimizer_trial import ELEMENTWISE, check_independence
from paceline.training.optimization.optimizer_values import remember_start
from paceline.training.optimization.sparse_gradients import check_sparse_support, find_sparse_parameters
from paceline.training.optimizers.build import build_optimizer
from paceline.training.optimizers.compiled import COMPILED_ELEMENTS
from paceline.training.optimizers.whole_tensor import WholeTensorOptimizer, as_real
from paceline.user_code import UserCode

MAX_NAMED_GROUPS = 4  # in a note
# Options of the request that apply to an optimizer of the task, too.
FOR_ANY_OPTIMIZER = {"clip", "clip_value", "agc", "no_agc", "on_nan", "ema", "swa", "swa_every"}


@dataclass
class OptimizerReport:
    """What to report of an optimizer. requested: its options before the batch scaled them."""

    requested: Optimizer
    notes: list[str] = field(default_factory=list)
    lr_group: str = ""  # whose learning rate is shown, if the parameter groups have different ones
    is_own: bool = False  # whether the task defines the optimizer


def make_optimizer(
    task: Task,
    spec: Optimizer,
    plan: ResolvedPlan,
    model: nn.Module,
    report: OptimizerReport | None = None,
    names: Container[str] | None = None,
    lr_factor: float = 1.0,
) -> torch.optim.Optimizer:
    """Return the optimizer that the task defines, else the one that the spec names.

    Under zero=1 its state is sharded over the data ranks. `report`: is filled in. names: of its parameters;
    None: all that are trained. lr_factor: on the learning rates of the task's optimizer. Raises TaskError if
    the task's optimizer cannot train the model.
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
        notes = report.notes if report is not None else []
        trained = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (names is None or name in names)
        ]
        optimizer = build_optimizer(spec, model, trained, dict(params), dense=not sparse, notes=notes)
        if report is not None:
            _report_groups(optimizer, report)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"optimizer() must return a torch optimizer or None, got {type(optimizer).__name__}")
    else:
        _check_task_optimizer(optimizer, {id(parameter) for _, parameter in params})
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * lr_factor
        if report is not None:
            report.is_own = True
            report.notes += _ineffective_options(report.requested, optimizer)
            _report_groups(optimizer, report)
    check_sparse_support(optimizer, sparse)
    return shard_state(optimizer, plan)


def shard_state(optimizer: torch.optim.Optimizer, plan: ResolvedPlan) -> torch.optim.Optimizer:
    """Return an optimizer like this one, whose state is sharded over the data ranks under zero=1.

    Raises PlanError if the optimizer computes another update under this plan.
    """
    check_independence(optimizer, plan)
    shards_state = plan.zero == 1 and plan.data_ranks > 1
    uses_torch = (
        shards_state
        and not plan.splits_model
        and _has_one_dtype(optimizer)  # torch 2.13: ZeroRedundancyOptimizer raises, such as for complex ones
        and _can_be_rebuilt(optimizer)
    )
    if uses_torch:
        optimizer = _shard_with_torch(optimizer)
    _split_groups_by_mesh(optimizer)
    if shards_state and not uses_torch:
        _shard_by_parameter(optimizer)
    _start_momentum(local_optimizer(optimizer))
    remember_start(local_optimizer(optimizer))
    return optimizer


def _can_be_rebuilt(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class with the options of its groups makes an equal optimizer.

    Optimizers of user code may have options in attributes, or take them by other names.
    """
    is_known = type(optimizer) in ELEMENTWISE or isinstance(optimizer, WholeTensorOptimizer)
    return is_known and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _has_one_dtype(optimizer: torch.optim.Optimizer) -> bool:
    return len({parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}) == 1


def _ineffective_options(spec: Optimizer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a note on options of `spec` that have no effect, because the task defines `optimizer`."""
    default = Optimizer()
    options = [
        f"optimizer.{key}={value}"
        for key, value in spec
        if key not in FOR_ANY_OPTIMIZER and value != getattr(default, key)
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

    torch 2.13: ZeroRedundancyOptimizer does the same, but it broadcasts DTensors, which is not possible, and
    makes another optimizer of the same class.
    """
    params: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    meshes = [parameter.device_mesh for parameter in params if is_dtensor(parameter)]
    process_group = meshes[0].get_group("replicate") if meshes else dist.group.WORLD
    assert process_group is not None
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
        tensors = [as_real(local_tensor(parameter.detach())) for parameter in owners]
        sent = [tensor.contiguous() for tensor in tensors]
        broadcasts = [
            dist.broadcast(tensor, group=process_group, group_src=owner, async_op=True)
            for tensor, owner in zip(sent, owners.values(), strict=True)
        ]
        for work, tensor, received in zip(broadcasts, tensors, sent, strict=True):
            assert work is not None
            work.wait()
            if received is not tensor:
                tensor.copy_(received)

    if getattr(type(optimizer).step, "hooked", False):
        optimizer.register_step_post_hook(broadcast_parameters)
        return
    # A class that does not call the constructor of torch's base class has no hooks.
    step = optimizer.step

    def step_and_broadcast(self: torch.optim.Optimizer, closure: Any = None) -> None:
        step()
        broadcast_parameters()

    vars(optimizer)["step"] = MethodType(step_and_broadcast, optimizer)


def compile_updates(optimizer: torch.optim.Optimizer) -> None:
    """Let compiled code update the large tensors of an optimizer, if it has such code."""
    own = local_optimizer(optimizer)
    if isinstance(own, WholeTensorOptimizer):
        own.whole_from = COMPILED_ELEMENTS


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the state of this rank: the inner one of a ZeroRedundancyOptimizer."""
    return getattr(optimizer, "optim", optimizer)
