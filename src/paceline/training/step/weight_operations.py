"""Applies the operations of `Task.after_step` to weights that a plan has sharded, split or copied."""

import contextlib
import fnmatch
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.after_step import Clamp, CopyTo, Ema, Normalize, Polyak, StepOperation, Swa
from paceline.distributed.dtensor import is_dtensor, is_materialized, local_tensor
from paceline.errors import PlanError, SpecError, TaskError
from paceline.parallel.data_parallel.fsdp import drop_gathered
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer, abbreviate
from paceline.task import Task
from paceline.training.checkpoint.state import AVERAGES
from paceline.training.init.named_tensors import named_tensors
from paceline.user_code import UserCode


def read_operations(
    task: Task, plan: ResolvedPlan, optimizer: Optimizer | None = None
) -> tuple[StepOperation, ...]:
    """Return the operations that the task declares, and the average that the request has.

    Raises TaskError, SpecError for two averages, and PlanError for a plan that makes other updates than one
    process.
    """
    with UserCode("after_step()", task.after_step):
        returned = task.after_step()
    operations = (returned,) if isinstance(returned, StepOperation) else returned
    if not isinstance(operations, Sequence) or isinstance(operations, str):
        raise TaskError(
            f"after_step() must return a list of operations, such as [Ema()], got {type(returned).__name__}"
        )
    for operation in operations:
        if not isinstance(operation, StepOperation):
            raise TaskError(
                "after_step() must return operations of paceline.after_step, such as Ema, got "
                f"{type(operation).__name__}"
            )
    averages = [operation for operation in operations if isinstance(operation, AVERAGED)]
    if len(averages) > 1:
        raise TaskError(
            f"after_step() returned two {type(averages[1]).__name__}; return one, whose pattern matches all "
            "averaged names"
        )
    requested = _read_average(optimizer) if optimizer is not None else None
    if requested is not None:
        if averages:
            raise SpecError(
                f"optimizer.{type(requested).__name__.lower()} requests an average of the weights, but "
                f"after_step() of {type(task).__name__} returns one; leave one out"
            )
        operations = (*operations, requested)
    if operations and plan.is_asynchronous:
        raise PlanError(
            f"plan {plan}: after_step() needs the weights of one process after each step; use single, ddp or "
            "zero1 to zero3"
        )
    return tuple(operations)


def check_average_start(optimizer: Optimizer, steps: int) -> list[str]:
    """Return a note if the mean of the weights starts after the last step of a training."""
    if optimizer.swa is None or optimizer.swa <= steps:
        return []
    return [
        f"optimizer.swa={optimizer.swa} is after the last step, {steps}: evaluations use the weights of each "
        "step"
    ]


def _read_average(optimizer: Optimizer) -> Ema | Swa | None:
    """Return the average that the request has."""
    if optimizer.ema is not None:
        return Ema(optimizer.ema)
    return Swa(optimizer.swa, every=optimizer.swa_every or 1) if optimizer.swa is not None else None


AVERAGED = (Ema, Swa)


class WeightOperations:
    """The operations of a task on the weights of this rank. Call it after each step, on all ranks.

    model: as the plan distributed it. Raises TaskError for names that the model does not have, and PlanError
    if the plan cannot apply an operation as one process does.
    """

    def __init__(self, operations: Sequence[StepOperation], model: nn.Module, plan: ResolvedPlan):
        self.model, self.operations = model, operations
        self.averages: dict[str, Tensor] = {}
        self._ema = _find_ema(operations)
        self._pairs: dict[StepOperation, list[tuple[Tensor, Tensor]]] = {}
        self._params: dict[StepOperation, list[nn.Parameter]] = {}
        for operation in operations:
            if isinstance(operation, (Polyak, CopyTo)):
                if plan.pp > 1:
                    raise PlanError(
                        f"plan {plan}: {type(operation).__name__} of after_step() reads {operation.source} "
                        f"and writes {operation.target}, which may be on different stages; use a plan "
                        "without pp"
                    )
                self._pairs[operation] = _find_pairs(model, operation)
            else:
                found = _find_params(model, operation)
                self._params[operation] = list(found.values())
                if isinstance(operation, Normalize):
                    _check_dim(operation, found)
        if self._ema is not None:
            averaged = _find_params(model, self._ema)
            self.averages = {name: parameter.detach().clone() for name, parameter in averaged.items()}

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """Apply the operations that are due. `step`: steps done."""
        for operation in self.operations:
            since = step - getattr(operation, "start", 0)
            if since > 0 and since % getattr(operation, "every", 1):
                continue
            match operation:
                case Ema():
                    self._update_average(operation, step // operation.every - 1)
                case Swa():
                    taken = max(0, step - operation.start) // operation.every
                    self._move_average(1 - taken / (taken + 1) if step > operation.start else 1.0)
                case Polyak() | CopyTo():
                    tau = operation.tau if isinstance(operation, Polyak) else 1.0
                    for source, target in self._pairs[operation]:
                        _follow_(target, source, tau)
                case Clamp():
                    for parameter in self._params[operation]:
                        local_tensor(parameter.detach()).clamp_(operation.low, operation.high)
                case Normalize():
                    for parameter in self._params[operation]:
                        _normalize_(parameter, operation)

    def _update_average(self, ema: Ema, updates: int) -> None:
        decay = min(ema.decay, (1 + updates) / (10 + updates)) if ema.warmup else ema.decay
        self._move_average(1 - decay)

    def _move_average(self, share: float) -> None:
        """Move the averages by a share towards the weights."""
        assert self._ema is not None
        averages = [local_tensor(average) for average in self.averages.values()]
        weights = [local_tensor(parameter.detach()) for parameter in self._params[self._ema]]
        torch._foreach_lerp_(averages, weights, share)

    def state(self, elsewhere: Container[str] = ()) -> dict[str, Tensor]:
        """Return the averages by names in a checkpoint. elsewhere: names that another stage writes."""
        return {AVERAGES + name: tensor for name, tensor in self.averages.items() if name not in elsewhere}

    def restart_averages(self) -> None:
        """Let the averages start from the weights of now."""
        if self._ema is not None:
            pairs = zip(self.averages.values(), self._params[self._ema], strict=True)
            for average, parameter in pairs:
                average.copy_(parameter.detach())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the averaged weights in this context, if evaluations use them."""
        if self._ema is None or not self._ema.evaluates:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange weights and averages, one tensor at a time, so that memory grows by one tensor only."""
        assert self._ema is not None
        drop_gathered(self.model)
        for average, parameter in zip(self.averages.values(), self._params[self._ema], strict=True):
            ours, theirs = local_tensor(average), local_tensor(parameter.detach())
            weights = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(weights)


def find_averaged_share(operations: Sequence[StepOperation], model: nn.Module) -> float:
    """Return the share of the parameters that an Ema averages. model: may be on the meta device."""
    ema = _find_ema(operations)
    if ema is None:
        return 0.0
    averaged = _match_params(model, ema).values()
    return sum(param.numel() for param in averaged) / sum(param.numel() for param in model.parameters())


def _find_ema(operations: Sequence[StepOperation]) -> Ema | Swa | None:
    return next((operation for operation in operations if isinstance(operation, AVERAGED)), None)


def _find_params(model: nn.Module, operation: Any) -> dict[str, nn.Parameter]:
    """Return the parameters on this rank whose names match the pattern. Raises TaskError if none does."""
    found = _match_params(model, operation)
    return {name: parameter for name, parameter in found.items() if is_materialized(parameter)}


def _match_params(model: nn.Module, operation: Any) -> dict[str, nn.Parameter]:
    """Return the parameters whose names match the pattern. Raises TaskError if none does."""
    kind, pattern = type(operation).__name__, operation.params
    if not isinstance(pattern, str):
        raise TaskError(f"{kind}: params must be a pattern of names, such as '*', got {pattern!r}")
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if fnmatch.fnmatchcase(name, pattern) and parameter.is_floating_point()
    }
    if not found:
        names = [name for name, _ in model.named_parameters()]
        raise TaskError(
            f"{kind}: no parameter of the model matches {pattern!r}; its parameters are "
            f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
        )
    return found


def _find_pairs(model: nn.Module, operation: Polyak | CopyTo) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of the source and of the target with equal names. Raises TaskError."""
    kind = type(operation).__name__
    modules = []
    for name in (operation.source, operation.target):
        try:
            modules.append(model.get_submodule(name))
        except (AttributeError, TypeError):
            children = ", ".join(child for child, _ in model.named_children())
            raise TaskError(
                f"{kind}: the model has no module {abbreviate(name)}; its modules are {children}"
            ) from None
    source, target = map(named_tensors, modules)
    for name in [*source, *target]:
        shapes = [
            f"shape {tuple(tensors[name].shape)}" if name in tensors else "no such tensor"
            for tensors in (source, target)
        ]
        if shapes[0] != shapes[1]:
            raise TaskError(
                f"{kind}: {operation.source} and {operation.target} differ: {name} has {shapes[0]} and "
                f"{shapes[1]}; use modules of the same structure"
            )
    trained = [name for name, tensor in target.items() if tensor.requires_grad]
    if trained:
        raise TaskError(
            f"{kind}: {operation.target}.{trained[0]} is trained; in model(), call "
            f"{operation.target}.requires_grad_(False)"
        )
    shared = [name for name, tensor in target.items() if tensor is source[name]]
    if shared:
        raise TaskError(
            f"{kind}: {operation.target}.{shared[0]} is the same tensor as that of {operation.source}; copy "
            "the module with copy.deepcopy"
        )
    return [(source[name].detach(), target[name].detach()) for name in source]


def _follow_(target: Tensor, source: Tensor, tau: float) -> None:
    """Move `target` by the share `tau` towards `source`.

    A collective if they are sharded in different ways.
    """
    ours, theirs = local_tensor(target), _local_part(source, target)
    if tau == 1.0 or not target.is_floating_point():
        ours.copy_(theirs)
    else:
        ours.lerp_(theirs, tau)


def _local_part(source: Any, like: Any) -> Tensor:
    """Return the part of `source` that this rank has of `like`."""
    if is_dtensor(source) and is_dtensor(like) and source.device_mesh == like.device_mesh:
        if source.placements != like.placements:
            source = source.redistribute(placements=like.placements)
        return local_tensor(source)
    whole: Tensor = source.full_tensor() if is_dtensor(source) else source
    if not is_dtensor(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return local_tensor(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None))


def _check_dim(operation: Normalize, params: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in params.items():
        if operation.dim is not None and not -parameter.dim() <= operation.dim < parameter.dim():
            raise TaskError(
                f"Normalize: {name} has shape {tuple(parameter.shape)}, so no dim {operation.dim}; use a "
                "pattern that does not match it"
            )


def _normalize_(parameter: Any, operation: Normalize) -> None:
    """Scale a parameter to the norm. A collective if the norm spans shards."""
    local = local_tensor(parameter.detach())
    dim = None if operation.dim is None else operation.dim % parameter.dim()
    squares = local.double().square()
    squares = squares.sum() if dim is None else squares.sum(dim, keepdim=True)
    if is_dtensor(parameter):
        for axis, placement in enumerate(parameter.placements):
            # (A _StridedShard, of tp with zero, is no Shard.)
            if (sharded := getattr(placement, "dim", None)) is not None and dim in (None, sharded):
                dist.all_reduce(squares, group=parameter.device_mesh.get_group(axis))
    scale = torch.where(squares > 0, operation.norm / squares.sqrt(), 1.0)
    local.mul_(scale.to(local.dtype))
