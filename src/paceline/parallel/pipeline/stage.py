"""Which stage of a pipeline has which part of a model, and how a stage runs: the user's whole forward, of which the rest is not there."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from paceline.errors import PlanError, TaskError
from paceline.parallel.module_hooks import CallInterceptor, Run
from paceline.parallel.pipeline.buffers import BufferUse, StageBuffers
from paceline.parallel.pipeline.tracer import ForwardTrace, PartCall, PassedThrough, TensorMeta
from paceline.plan.partition import partition
from paceline.plan.plan import Plan


@dataclass(frozen=True)
class StagePartition:
    """A model divided into stages."""

    begins: tuple[int, ...]  # the call of a part that each stage begins with
    calls: tuple[str, ...]  # the parts in the order of their calls
    free: frozenset[str]  # parts that every stage has and calls
    holders: Mapping[
        str, tuple[int, ...]
    ]  # parameter or buffer -> stages that hold it; the first of them writes and counts it
    outside: frozenset[str]  # parameters that are used outside of the calls of their part, too
    changed: frozenset[str]  # buffers that change outside of the parts that only one stage has

    def ends(self, stage: int) -> int:
        return [*self.begins[1:], len(self.calls)][stage]

    def of(self, stage: int) -> list[str]:
        """The parts that this stage has and no other."""
        return [
            part
            for part in dict.fromkeys(self.calls[self.begins[stage] : self.ends(stage)])
            if part not in self.free
        ]


def ranks_of(plan: Plan) -> list[int]:
    """The pp rank of each stage."""
    assert plan.stages is not None
    looped = [stage % plan.pp for stage in range(plan.pp * plan.stages)]
    return looped if plan.pp_schedule != "zbv" else [*looped[: plan.pp], *reversed(looped[: plan.pp])]


def divide(
    plan: Plan, model: nn.Module, parts: Mapping[str, nn.Module], recording: ForwardTrace
) -> StagePartition:
    """The balanced stages of `plan`, by FLOPs of a forward pass, and by parameters where those are equal. Raises PlanError."""
    calls = recording.calls
    stages = len(ranks_of(plan))
    begins = [0, *recording.cuts]
    if stages > len(begins):
        raise PlanError(_too_few(plan, stages, len(begins), model, recording))
    ends = [*begins[1:], len(calls)]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    of_call = [
        sum(sizes[name] for name, used in recording.uses.items() if at in used) for at in range(len(calls))
    ]
    chosen = partition(
        [sum(call.flops for call in calls[begin:end]) for begin, end in zip(begins, ends, strict=True)],
        stages,
        [sum(of_call[begin:end]) for begin, end in zip(begins, ends, strict=True)],
    )
    starts = tuple(begins[at] for at in chosen)
    free = frozenset(call.part for call in calls if call.free)
    division = StagePartition(
        starts,
        tuple(call.part for call in calls),
        free,
        _holders(model, parts, recording, starts),
        frozenset(recording.outside),
        frozenset(
            name
            for name in _free_buffers(model, parts, recording)
            if name in recording.buffers and recording.buffers[name].changed
        ),
    )
    _check_whole(plan, model, division, stages)
    return division


def _holders(
    model: nn.Module, parts: Mapping[str, nn.Module], recording: ForwardTrace, begins: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """A parameter is held where it is used; buffers where their part is, or from where they change, or everywhere."""

    def stage_of(call: int) -> int:
        return sum(begin <= call for begin in begins) - 1

    of_part: dict[str, int] = {
        call.part: stage_of(at) for at, call in enumerate(recording.calls) if not call.free
    }
    inside = {
        id(tensor): of_part[name]
        for name in of_part
        for tensor in (*parts[name].parameters(), *parts[name].buffers())
    }
    holders: dict[str, tuple[int, ...]] = {
        name: (inside[id(buffer)],) for name, buffer in model.named_buffers() if id(buffer) in inside
    }
    for name in _free_buffers(model, parts, recording):
        use = recording.buffers.get(name, BufferUse())
        first = stage_of(min(use.touched)) if use.changed else 0
        holders[name] = (first,) if use.is_local else tuple(range(first, len(begins)))
    for name, parameter in model.named_parameters():
        used = sorted({stage_of(call) for call in recording.uses.get(name, ())})
        holders[name] = tuple(used) or (inside.get(id(parameter), 0),)
    return holders


def _free_buffers(model: nn.Module, parts: Mapping[str, nn.Module], recording: ForwardTrace) -> list[str]:
    """Outside of the parts that only one stage has."""
    inside = {
        id(buffer) for call in recording.calls if not call.free for buffer in parts[call.part].buffers()
    }
    return [name for name, buffer in model.named_buffers() if id(buffer) not in inside]


def _check_whole(plan: Plan, model: nn.Module, division: StagePartition, stages: int) -> None:
    """Nothing is dropped: each call belongs to one stage, and the parameters of the stages add up to those of the model."""
    lengths = [end - begin for begin, end in pairwise([*division.begins, len(division.calls)])]
    counted = [0] * stages
    for name, parameter in model.named_parameters():
        counted[division.holders[name][0]] += parameter.numel()
    whole = sum(parameter.numel() for parameter in model.parameters())
    if min(lengths) < 1 or sum(lengths) != len(division.calls) or sum(counted) != whole:
        raise PlanError(
            f"plan {plan}: the stages have {sum(counted)} of {whole} parameters, and {lengths} parts; this is a defect of Paceline"
        )


def _too_few(plan: Plan, stages: int, pieces: int, model: nn.Module, recording: ForwardTrace) -> str:
    ordered = sorted(
        recording.barred.items(), key=lambda found: (found[0] not in recording.together, found[0])
    )
    barred = [f"not before {recording.calls[cut].part}: {why}" for cut, why in ordered if cut]
    why = f" ({barred[0]})" if barred else ""
    assert plan.stages is not None
    fitting = [pp for pp in range(2, plan.pp) if pp * plan.stages <= pieces]
    here = [pp for pp in fitting if plan.copies * plan.pp % (pp * plan.cp * plan.tp) == 0]  # on as many ranks
    hint = " or ".join(f"pp={pp}" for pp in (here or fitting)[-2:]) if fitting else "a plan without pp"
    if not fitting and plan.stages > 1 and pieces >= 2:
        hint = "pp=2 with pp_schedule=1f1b"
    return f"plan {plan} has {stages} stages, and {type(model).__name__} can be cut into {pieces} at most{why}; use {hint}"


class StageExit(BaseException):
    """The forward pass of a stage is over; past the `except Exception` of a user's code."""

    def __init__(self, values: tuple[Tensor, ...]):
        self.values = values


class _Arrives(torch.autograd.Function):
    """A copy of what a stage received, into which the model may write; its gradient is contiguous, as it must be to be sent."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _leaves(value: Tensor) -> Tensor:
    """As it can be sent, and not a view: torch's engine detaches it in place."""
    return (
        value.clone(memory_format=torch.contiguous_format)
        if value._is_view() or not value.is_contiguous()
        else value
    )


class Stage(nn.Module):
    """What a rank holds of one stage. The parts keep their place in the whole model, whose forward is called."""

    model_forward: Callable[
        ["Stage", int], Any
    ]  # calls the model with a micro-batch, and returns what the last stage has of it
    calls: list[PartCall]  # how such a forward pass goes
    changing: StageBuffers
    nothing: dict[str, TensorMeta]  # in place of changing buffers that this stage does not hold

    def __init__(
        self,
        index: int,
        model: nn.Module,
        gates: CallInterceptor,
        division: StagePartition,
        device: torch.device,
    ):
        super().__init__()
        self.index, self.first, self.end = index, division.begins[index], division.ends(index)
        self.is_first, self.is_last = index == 0, self.end == len(division.calls)
        self.gates, self.device = gates, device
        self.parts = nn.ModuleDict({key_of(name): gates.parts[name] for name in division.of(index)})
        own = {id(parameter) for parameter in self.parts.parameters()}
        for name, parameter in model.named_parameters():
            if index in division.holders[name] and id(parameter) not in own:
                self.register_parameter(f"bare_{len(self._parameters)}", parameter)
        self.places = _bare_places(model, gates, division, self)
        self.lent: list[
            tuple[nn.Module, str, tuple[nn.Module, str]]
        ] = []  # a place in the model, and one of the same parameter

    def keep_buffers(self, model: nn.Module, division: StagePartition, earlier: Sequence[int]) -> None:
        """Let this stage change buffers of its own. `earlier`: the stages of the same rank before it."""
        of = {name: division.holders[name] for name in division.changed}
        held = [name for name, holders in of.items() if self.index in holders]
        self.changing = StageBuffers(
            model, of, held, [name for name, holders in of.items() if set(earlier).intersection(holders)]
        )
        buffers = dict(model.named_buffers())
        self.nothing = {
            name: TensorMeta(tuple(buffers[name].shape), buffers[name].dtype, True)
            for name in of
            if name not in held
        }

    def take_copies(self, earlier: Iterable["Stage"]) -> Iterator[tuple[str, nn.Parameter]]:
        """Hold copies of the parameters that earlier stages of the same rank hold too, since two groups of `fully_shard` cannot share
        one. Yields the own name of each, and the parameter. Until `give_back` it is missing from this stage."""
        held = {id(there): (module, key) for stage in earlier for module, key, there in _parameters(stage)}
        copies: dict[int, str] = {}
        for module, key, parameter in list(_parameters(self)):
            if id(parameter) not in held:
                continue
            if id(parameter) not in copies:
                copies[id(parameter)] = f"bare_{len(self._parameters)}"
                self.register_parameter(
                    copies[id(parameter)], nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                )
                yield copies[id(parameter)], parameter
            own = copies[id(parameter)]
            if module is self:
                self.places = [(there, name, own if of == key else of) for there, name, of in self.places]
            else:
                self.places.append((module, key, own))
            module._parameters[key] = None
            self.lent.append((module, key, held[id(parameter)]))

    def give_back(self) -> None:
        """The model has these parameters again; while it runs, this stage puts its copies in their place."""
        for module, key, place in self.lent:
            module._parameters[key] = getattr(*place)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        self.at, self.received = 0, received
        placeholders = {name: like.nothing(self.device) for name, like in self.nothing.items()}
        with _bare_parameters(self), self.changing.installed(placeholders):
            self.gates.visitor = self.called
            try:
                return self.model_forward(self, int(index))
            except StageExit as left:
                return left.values
            finally:
                self.gates.visitor, self.gates.inside, self.received = None, False, ()

    def called(self, name: str, run: Run, args: Any, kwargs: Any) -> Any:
        at, self.at = self.at, self.at + 1
        if at >= len(self.calls) or self.calls[at].part != name:
            expected = self.calls[at].part if at < len(self.calls) else "nothing more"
            raise TaskError(
                f"the model calls {name} where it called {expected} before, and a pipeline counts on their order; use a plan without pp"
            )
        call = self.calls[at]
        if at == self.end:
            leaves = tree_leaves((args, kwargs))
            raise StageExit(tuple(map(_leaves, (leaves[leaf] for leaf in call.crossing))))
        if at < self.first and not call.free:
            outputs, structure = call.output
            given = (
                tree_leaves((args, kwargs))
                if any(isinstance(leaf, PassedThrough) for leaf in outputs)
                else []
            )
            return tree_unflatten([self._stand_in(leaf, given) for leaf in outputs], structure)
        if at == self.first:
            leaves = tree_leaves((args, kwargs))
            for leaf, value in zip(call.crossing, self.received, strict=True):
                # The model's own variable becomes what was received, wherever else it is used.
                torch.utils.swap_tensors(leaves[leaf], _Arrives.apply(value))
        self.gates.inside = True
        try:
            return run(*args, **kwargs)
        finally:
            self.gates.inside = False

    def _stand_in(self, leaf: Any, given: Sequence[Any]) -> Any:
        if isinstance(leaf, PassedThrough):
            return given[leaf.index]
        return leaf.nothing(self.device) if isinstance(leaf, TensorMeta) else leaf


def key_of(part: str) -> str:
    """Under which a stage has a part; with a dot, a key may not be."""
    return "/" + part.replace(".", "/")


def name_of(path: str) -> str:
    """In the whole model, of a module that a stage has under `path`."""
    return path.removeprefix("parts./").replace("/", ".")


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each place of each parameter."""
    for inner in module.modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                yield inner, key, parameter


@contextmanager
def _bare_parameters(stage: Stage) -> Iterator[None]:
    """Parameters outside of parts: those of this stage as torch's engines have them now, the others as nothing."""
    before = [(module, key, module._parameters[key]) for module, key, _ in stage.places]
    for module, key, own in stage.places:
        there: Any = module._parameters[key]
        nothing: Any = TensorMeta(tuple(there.shape), there.dtype).nothing(stage.device)
        module._parameters[key] = getattr(stage, own) if own else nothing
    try:
        yield
    finally:
        for module, key, parameter in before:
            module._parameters[key] = parameter


def _bare_places(
    model: nn.Module, gates: CallInterceptor, division: StagePartition, stage: Stage
) -> list[tuple[nn.Module, str, str | None]]:
    """(module, key, name in the stage) of the parameters that are used outside of calls of parts; None for those that other stages have."""
    outside = {id(parameter) for name, parameter in model.named_parameters() if name in division.outside}
    here = {id(parameter) for parameter in stage.parts.parameters()}
    own = {id(parameter): name for name, parameter in stage._parameters.items()}
    called = {id(module) for name in division.calls for module in gates.parts[name].modules()}
    return [
        (module, key, own.get(id(parameter)))
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
        and (
            id(parameter) in own
            or id(module) not in called
            or (id(parameter) in outside and id(parameter) not in here)
        )
    ]
