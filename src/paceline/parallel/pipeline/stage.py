"""Division of a model into pipeline stages, and the forward pass of a stage.

A stage calls the user's whole forward. Calls of parts that belong to other stages return placeholders.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_unflatten

from paceline.errors import PlanError, TaskError
from paceline.parallel.module_hooks import CallInterceptor, Run
from paceline.parallel.pipeline.buffers import BufferUse, StageBuffers
from paceline.parallel.pipeline.capturing_hooks import replay_hooks
from paceline.parallel.pipeline.forward_trace import (
    ForwardTrace,
    PartCall,
    PassedThrough,
    Returned,
    TensorMeta,
)
from paceline.plan.partition import partition as balance
from paceline.plan.plan import MeshCoordinate, ResolvedPlan


@dataclass(frozen=True)
class StagePartition:
    """A model divided into stages."""

    begins: tuple[int, ...]  # index of the call that each stage begins with
    calls: tuple[str, ...]  # the parts in the order of their calls
    replicated: frozenset[str]  # parts that every stage holds and calls
    # Parameter or buffer -> stages that hold it; the first of them saves it and counts it in norms.
    holders: Mapping[str, tuple[int, ...]]
    used_outside: frozenset[str]  # parameters also used outside of the calls of their part
    changed_buffers: frozenset[str]  # that change outside of the parts that belong to a single stage

    def end_of(self, stage: int) -> int:
        return [*self.begins[1:], len(self.calls)][stage]

    def calls_of(self, stage: int) -> tuple[str, ...]:
        return self.calls[self.begins[stage] : self.end_of(stage)]

    def parts_of(self, stage: int) -> list[str]:
        """Return the parts that only this stage holds."""
        return [part for part in dict.fromkeys(self.calls_of(stage)) if part not in self.replicated]


def stage_ranks(plan: ResolvedPlan) -> list[int]:
    """Return the pp rank of each stage."""
    looped = [stage % plan.pp for stage in range(plan.pp * plan.stages_per_rank)]
    return looped if not plan.schedule.folded else [*looped[: plan.pp], *reversed(looped[: plan.pp])]


@dataclass(frozen=True)
class PipelineRank:
    """A rank of a pipeline: its place in the mesh, and the ranks of the other stages."""

    plan: ResolvedPlan
    mesh: DeviceMesh
    place: MeshCoordinate
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of all stages that have the same part of the batch."""
        return self.mesh["pp"].get_group()

    @property
    def own_stages(self) -> list[int]:
        return [stage for stage in range(len(stage_ranks(self.plan))) if self.has(stage)]

    def has(self, stage: int) -> bool:
        return stage_ranks(self.plan)[stage] == self.place.pp

    def peer(self, stage: int) -> int:
        """Return the global rank that has `stage` and the same part of the batch."""
        return stage_ranks(self.plan)[stage] * self.plan.ranks_per_stage + self.plan.index_in_stage(
            self.place
        )


def divide(
    plan: ResolvedPlan, model: nn.Module, parts: Mapping[str, nn.Module], trace: ForwardTrace
) -> StagePartition:
    """Return the stages of `plan`, balanced by FLOPs of a forward pass, then by parameters.

    Raises PlanError if the model has fewer possible stages than the plan.
    """
    calls = trace.calls
    stages = len(stage_ranks(plan))
    begins = [0, *trace.cuts]
    if stages > len(begins):
        raise PlanError(_too_few_message(plan, stages, len(begins), model, trace))
    ends = [*begins[1:], len(calls)]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parameters_of_call = [
        sum(sizes[name] for name, used in trace.uses.items() if at in used) for at in range(len(calls))
    ]
    chosen = balance(
        [sum(call.flops for call in calls[begin:end]) for begin, end in zip(begins, ends, strict=True)],
        stages,
        [sum(parameters_of_call[begin:end]) for begin, end in zip(begins, ends, strict=True)],
    )
    starts = tuple(begins[at] for at in chosen)
    partition = StagePartition(
        begins=starts,
        calls=tuple(call.part for call in calls),
        replicated=frozenset(call.part for call in calls if call.is_replicated),
        holders=_find_holders(model, parts, trace, starts),
        used_outside=frozenset(trace.used_outside),
        changed_buffers=frozenset(
            name
            for name in _find_shared_buffers(model, parts, trace)
            if name in trace.buffers and trace.buffers[name].changed
        ),
    )
    _check_complete(plan, model, partition, stages)
    return partition


def _find_holders(
    model: nn.Module, parts: Mapping[str, nn.Module], trace: ForwardTrace, begins: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter and buffer.

    A stage holds the parameters that it uses. Buffers of parts belong to the stage of the part. Other buffers
    are held from the stage that first touches them if they change, else everywhere.
    """

    def stage_of(call: int) -> int:
        return sum(begin <= call for begin in begins) - 1

    stage_of_part: dict[str, int] = {
        call.part: stage_of(at) for at, call in enumerate(trace.calls) if not call.is_replicated
    }
    stage_of_tensor = {
        id(tensor): stage
        for name, stage in stage_of_part.items()
        for tensor in (*parts[name].parameters(), *parts[name].buffers())
    }
    holders: dict[str, tuple[int, ...]] = {
        name: (stage_of_tensor[id(buffer)],)
        for name, buffer in model.named_buffers()
        if id(buffer) in stage_of_tensor
    }
    for name in _find_shared_buffers(model, parts, trace):
        use = trace.buffers.get(name, BufferUse())
        first = stage_of(min(use.touched)) if use.changed else 0
        holders[name] = (first,) if use.is_local else tuple(range(first, len(begins)))
    for name, parameter in model.named_parameters():
        used = sorted({stage_of(call) for call in trace.uses.get(name, ())})
        holders[name] = tuple(used) or (stage_of_tensor.get(id(parameter), 0),)
    return holders


def _find_shared_buffers(model: nn.Module, parts: Mapping[str, nn.Module], trace: ForwardTrace) -> list[str]:
    """Return the buffers outside of the parts that belong to a single stage."""
    inside = {
        id(buffer) for call in trace.calls if not call.is_replicated for buffer in parts[call.part].buffers()
    }
    return [name for name, buffer in model.named_buffers() if id(buffer) not in inside]


def _check_complete(plan: ResolvedPlan, model: nn.Module, partition: StagePartition, stages: int) -> None:
    """Check that each call belongs to exactly one stage, and that the stages hold all parameters."""
    lengths = [end - begin for begin, end in pairwise([*partition.begins, len(partition.calls)])]
    counted = [0] * stages
    for name, parameter in model.named_parameters():
        counted[partition.holders[name][0]] += parameter.numel()
    expected = sum(parameter.numel() for parameter in model.parameters())
    if min(lengths) < 1 or sum(lengths) != len(partition.calls) or sum(counted) != expected:
        raise PlanError(
            f"plan {plan}: the stages have {sum(counted)} of {expected} parameters, and {lengths} parts; "
            "this is a defect of Paceline"
        )


def _too_few_message(
    plan: ResolvedPlan, stages: int, max_stages: int, model: nn.Module, trace: ForwardTrace
) -> str:
    ordered = sorted(
        trace.barred.items(), key=lambda barred: (barred[0] not in trace.barred_by_buffers, barred[0])
    )
    reasons = [f"not before {trace.calls[cut].part}: {why}" for cut, why in ordered if cut]
    reason = f" ({reasons[0]})" if reasons else ""
    fitting = [pp for pp in range(2, plan.pp) if pp * plan.stages_per_rank <= max_stages]
    same_ranks = [pp for pp in fitting if plan.ranks_per_stage * plan.pp % (pp * plan.cp * plan.tp) == 0]
    hint = " or ".join(f"pp={pp}" for pp in (same_ranks or fitting)[-2:]) if fitting else "a plan without pp"
    if not fitting and plan.stages_per_rank > 1 and max_stages >= 2:
        hint = "pp=2 with pp_schedule=1f1b"
    return (
        f"plan {plan} has {stages} stages, and {type(model).__name__} can be cut into {max_stages} at most"
        f"{reason}; use {hint}"
    )


class StageExit(BaseException):
    """Ends the forward pass of a stage.

    A BaseException, so that `except Exception` in user code lets it pass.
    """

    def __init__(self, values: tuple[Tensor, ...]):
        self.values = values


class _ReceiveInput(torch.autograd.Function):
    """Copy a received tensor, so that the model may write into it.

    Its gradient is contiguous, as sending requires.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _make_sendable(value: Tensor) -> Tensor:
    """Return `value` contiguous and not as a view: torch's engine detaches it in place."""
    return (
        value.clone(memory_format=torch.contiguous_format)
        if value._is_view() or not value.is_contiguous()
        else value
    )


class Stage(nn.Module):
    """The parts of one stage that a rank holds.

    They keep their place in the whole model, whose forward is called.
    """

    # Calls the model with micro-batch i, and returns what the last stage computes of it.
    model_forward: Callable[["Stage", int], Any]
    calls: list[PartCall]  # the traced calls of this forward pass
    buffers_: StageBuffers
    missing_buffers: dict[str, TensorMeta]  # changing buffers that this stage does not hold

    def __init__(
        self,
        index: int,
        model: nn.Module,
        interceptor: CallInterceptor,
        partition: StagePartition,
        device: torch.device,
    ):
        super().__init__()
        self.index, self.first, self.end = index, partition.begins[index], partition.end_of(index)
        self.is_first, self.is_last = index == 0, self.end == len(partition.calls)
        self.interceptor, self.device = interceptor, device
        self.parts = nn.ModuleDict(
            {key_of(name): interceptor.parts[name] for name in partition.parts_of(index)}
        )
        own = {id(parameter) for parameter in self.parts.parameters()}
        for name, parameter in model.named_parameters():
            if index in partition.holders[name] and id(parameter) not in own:
                self.register_parameter(f"bare_{len(self._parameters)}", parameter)
        self.places = _find_bare_places(model, interceptor, partition, self)
        # A place in the model, and the place of the same parameter in an earlier stage.
        self.removed: list[tuple[nn.Module, str, tuple[nn.Module, str]]] = []

    def keep_buffers(self, model: nn.Module, partition: StagePartition, earlier: Sequence[int]) -> None:
        """Give this stage copies of the buffers that change. `earlier`: the stages of this rank before it."""
        holders = {name: partition.holders[name] for name in partition.changed_buffers}
        held = [name for name, stages in holders.items() if self.index in stages]
        self.buffers_ = StageBuffers(
            model,
            holders,
            held,
            [name for name, stages in holders.items() if set(earlier).intersection(stages)],
        )
        buffers = dict(model.named_buffers())
        self.missing_buffers = {
            name: TensorMeta(tuple(buffers[name].shape), buffers[name].dtype, True)
            for name in holders
            if name not in held
        }

    def take_copies(self, earlier: Iterable["Stage"]) -> Iterator[tuple[str, nn.Parameter]]:
        """Copy the parameters that earlier stages of this rank hold too.

        Two groups of `fully_shard` cannot share a parameter. Yields the name of each copy in this stage, and
        the parameter. Until `restore_shared`, the parameter is missing from the model.
        """
        held = {
            id(parameter): (module, key) for stage in earlier for module, key, parameter in _places(stage)
        }
        copies: dict[int, str] = {}
        for module, key, parameter in list(_places(self)):
            if id(parameter) not in held:
                continue
            if id(parameter) not in copies:
                copies[id(parameter)] = f"bare_{len(self._parameters)}"
                self.register_parameter(
                    copies[id(parameter)], nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                )
                yield copies[id(parameter)], parameter
            own_name = copies[id(parameter)]
            if module is self:
                self.places = [
                    (place, name, own_name if bare_name == key else bare_name)
                    for place, name, bare_name in self.places
                ]
            else:
                self.places.append((module, key, own_name))
            module._parameters[key] = None
            self.removed.append((module, key, held[id(parameter)]))

    def restore_shared(self) -> None:
        """Put the shared parameters back into the model; while this stage runs, its copies replace them."""
        for module, key, place in self.removed:
            module._parameters[key] = getattr(*place)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        self.at, self.received = 0, received
        placeholders = {name: meta.placeholder(self.device) for name, meta in self.missing_buffers.items()}
        with _bare_parameters(self), self.buffers_.installed(placeholders):
            self.interceptor.visitor = self.visit_call
            try:
                return self.model_forward(self, int(index))
            except StageExit as stage_exit:
                return stage_exit.values
            finally:
                self.interceptor.visitor, self.interceptor.inside, self.received = None, False, ()

    def visit_call(self, name: str, run: Run, args: Any, kwargs: Any) -> Any:
        """Run the call of a part if it belongs to this stage, else return placeholders or leave the stage."""
        at, self.at = self.at, self.at + 1
        if at >= len(self.calls) or self.calls[at].part != name:
            expected = self.calls[at].part if at < len(self.calls) else "nothing more"
            raise TaskError(
                f"the model calls {name} where an earlier pass called {expected}, and a pipeline requires "
                "the same order of calls; use a plan without pp"
            )
        call = self.calls[at]
        if at == self.end:
            leaves = tree_leaves((args, kwargs))
            raise StageExit(tuple(map(_make_sendable, (leaves[leaf] for leaf in call.crossing))))
        if at < self.first and not call.is_replicated:
            return self._answer(call, args, kwargs)
        if at == self.first:
            leaves = tree_leaves((args, kwargs))
            for leaf, value in zip(call.crossing, self.received, strict=True):
                # The model's own variable becomes the received tensor, wherever else it is used.
                torch.utils.swap_tensors(leaves[leaf], _ReceiveInput.apply(value))
        self.interceptor.inside = True
        try:
            return run(*args, **kwargs)
        finally:
            self.interceptor.inside = False

    def _answer(self, call: PartCall, args: Any, kwargs: Any) -> Any:
        """Return placeholders for the output of a part of another stage, and let its hooks keep them."""
        outputs, structure = call.output
        uses_given = call.hooks or any(isinstance(leaf, PassedThrough) for leaf in outputs)
        given = tree_leaves((args, kwargs)) if uses_given else []
        returned = [self._stand_in(leaf, given) for leaf in outputs]
        replay_hooks(
            self.interceptor.parts[call.part],
            call.hooks,
            lambda leaf: self._stand_in(leaf, given, returned),
        )
        return tree_unflatten(returned, structure)

    def _stand_in(self, leaf: Any, given: Sequence[Any], returned: Sequence[Any] = ()) -> Any:
        if isinstance(leaf, PassedThrough):
            return given[leaf.index]
        if isinstance(leaf, Returned):
            return returned[leaf.index]
        return leaf.placeholder(self.device) if isinstance(leaf, TensorMeta) else leaf


def key_of(part: str) -> str:
    """Return the key of a part in `Stage.parts`; a key may not contain a dot."""
    return "/" + part.replace(".", "/")


def name_of(path: str) -> str:
    """Return the name in the whole model of the module at `path` of a stage."""
    return path.removeprefix("parts./").replace("/", ".")


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (module, key, parameter) for each place of each parameter."""
    for inner in module.modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                yield inner, key, parameter


@contextmanager
def _bare_parameters(stage: Stage) -> Iterator[None]:
    """Install the parameters outside of parts in the model.

    Those of this stage are as torch's engines have them now; the others are placeholders.
    """
    before = [(module, key, module._parameters[key]) for module, key, _ in stage.places]
    for module, key, own_name in stage.places:
        parameter: Any = module._parameters[key]
        placeholder: Any = TensorMeta(tuple(parameter.shape), parameter.dtype).placeholder(stage.device)
        module._parameters[key] = getattr(stage, own_name) if own_name else placeholder
    try:
        yield
    finally:
        for module, key, parameter in before:
            module._parameters[key] = parameter


def _find_bare_places(
    model: nn.Module, interceptor: CallInterceptor, partition: StagePartition, stage: Stage
) -> list[tuple[nn.Module, str, str | None]]:
    """Return (module, key, name in the stage) of the parameters that are used outside of calls of parts.

    The name is None if only other stages hold the parameter.
    """
    outside = {
        id(parameter) for name, parameter in model.named_parameters() if name in partition.used_outside
    }
    in_stage = {id(parameter) for parameter in stage.parts.parameters()}
    own = {id(parameter): name for name, parameter in stage._parameters.items()}
    called = {id(module) for name in partition.calls for module in interceptor.parts[name].modules()}
    return [
        (module, key, own.get(id(parameter)))
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
        and (
            id(parameter) in own
            or id(module) not in called
            or (id(parameter) in outside and id(parameter) not in in_stage)
        )
    ]
