"""What a training computes, looked at in each step on each rank: kept where it is the reference, held against it elsewhere."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline import task as tasks
from paceline.distributed.dtensor import is_dtensor, is_materialized
from paceline.distributed.world import World, read_world
from paceline.events import Step
from paceline.plan.plan import Plan, parse
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.init.named_tensors import find_aliases
from paceline.training.loop import train
from paceline.verify.compare import (
    FLOOR,
    MARGIN,
    MOST_GROWN,
    TOLERANCES,
    Difference,
    apart,
    apart_numbers,
    ratio,
)
from paceline.verify.disable_dropout import quiet

Tensors = dict[str, Tensor | None]
Found = Tensor | str | None  # a string says why there is no tensor to compare


class Plant(Protocol):
    """A context in which a training runs; the tests plant faults by it."""

    def __call__(self) -> AbstractContextManager[None]: ...


@dataclass
class StepTensors:
    """Whole tensors of one step."""

    gradients: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


@dataclass
class Reference:
    """A training under one process. `looks[0]` has the parameters before the first step, `looks[s]` all of step s."""

    looks: list[StepTensors]
    losses: list[float]
    norms: list[float]
    aliases: dict[str, str]  # other names of tied parameters -> the first
    switched_off: list[str]  # rates of dropout
    has_batch_norm: bool
    is_random: bool  # whether the model drew random numbers all the same
    computes_in: (
        str  # the narrowest type through which its gradients pass: float64, or what the model makes of it
    )
    no_float64: str | None = None  # why float64 could not be computed, where it could not
    grown: list[dict[str, float]] = field(
        default_factory=list
    )  # for each look: "gradient NAME" -> what rounding may have become by then

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.computes_in]

    def allowed(self, step: int, what: str, name: str) -> float:
        """The relative difference that is taken for rounding."""
        return max(self.tolerance, self.grown[step].get(f"{what} {name}", 0.0) if self.grown else 0.0)

    @property
    def names(self) -> list[str]:
        return [*self.looks[0].parameters, *self.looks[-1].buffers]

    def save(self, path: Path) -> None:
        torch.save(vars(self) | {"looks": [vars(look) for look in self.looks]}, path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        content = torch.load(path, mmap=True, weights_only=True)
        return cls(**content | {"looks": [StepTensors(**look) for look in content["looks"]]})


@dataclass
class PlanObservation:
    """What a rank saw of a training under a plan, beside the reference."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    apart: list[dict[str, float]] = field(
        default_factory=list
    )  # for each look: what -> the largest relative difference
    first: Difference | None = None
    names: set[str] = field(default_factory=set)  # of what is on this rank


def record(spec: Spec, task: Task, microbatches: int, rounding: float = 0.0) -> Reference:
    """Train in this process alone. `rounding`: planted in the gradients of each step, of the largest element of each."""
    looks: list[StepTensors] = [StepTensors()]
    switched_off: list[str] = []
    told: dict[str, Any] = {"aliases": {}, "has_batch_norm": False, "is_random": False}

    def say(names: list[str]) -> None:
        switched_off[:] = names

    def observe(model: nn.Module, what: str, step: int) -> None:
        if what == "weights":
            looks[-1].parameters, looks[-1].buffers = (
                _kept(model.named_parameters()),
                _kept(model.named_buffers()),
            )
            return
        if step == 0:
            looks[0].parameters = _kept(model.named_parameters())
            told["aliases"] = find_aliases(model)
            told["has_batch_norm"] = any(
                isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
            )
        if rounding:
            _round_(model, rounding, step)
        looks.append(
            StepTensors({name: _copy(p.grad) for name, p in model.named_parameters() if p.requires_grad})
        )
        told["is_random"] |= _has_drawn()

    narrowest = NarrowestDtype()
    calm = quiet(task, say, narrowest)
    events = train(
        spec, Plan(dp=1, microbatches=microbatches), World(), task=calm, device="cpu", observe=observe
    )
    steps = [event for event in events if isinstance(event, Step)]
    losses, norms = [step.loss for step in steps], [step.grad_norm or 0.0 for step in steps]
    return Reference(looks, losses, norms, switched_off=switched_off, computes_in=narrowest.found, **told)


class NarrowestDtype(TorchFunctionMode):
    """Notes the narrowest type of what is computed from parameters while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found = "float64"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_floating_point():
                name = str(tensor.dtype).removeprefix("torch.")
                if TOLERANCES.get(name, 0.0) > TOLERANCES[self.found]:
                    self.found = name
        return result


def _round_(model: nn.Module, rounding: float, step: int) -> None:
    """Elements that are exactly 0 stay so: nothing was summed up to them."""
    draw = torch.Generator().manual_seed(step)
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
    largest = max((gradient.abs().max().item() for gradient in gradients), default=0.0)
    for gradient in gradients:
        scale = rounding * max(gradient.abs().max().item(), FLOOR * largest)
        noise = torch.randn(gradient.shape, generator=draw, dtype=torch.float64).to(gradient.dtype)
        gradient.add_(noise.mul_(scale).mul_(gradient != 0))


def grow(reference: Reference, rounded: Reference) -> None:
    """Note in `reference` what became of the rounding that was planted in `rounded`."""
    reference.grown = [{} for _ in reference.looks]
    most = MOST_GROWN[reference.computes_in]
    for step, (look, other) in enumerate(zip(reference.looks, rounded.looks, strict=True)):
        for what, expected, found in (
            ("gradient", look.gradients, other.gradients),
            ("parameter", look.parameters, other.parameters),
            ("buffer", look.buffers, other.buffers),
        ):
            largest = largest_of(expected)
            for name, tensor in expected.items():
                beside = found[name]
                if tensor is not None and beside is not None:
                    may_be = MARGIN * apart(beside, tensor, largest)
                    reference.grown[step][f"{what} {name}"] = (
                        min(most, may_be) if what == "gradient" else may_be
                    )
        if step:
            for what, a, b in (
                ("loss", reference.losses, rounded.losses),
                ("norm", reference.norms, rounded.norms),
            ):
                reference.grown[step][f"{what} "] = min(
                    most, MARGIN * apart_numbers(b[step - 1], a[step - 1])
                )


def largest_of(tensors: Tensors) -> float:
    """Of the finite elements: a mask of -inf is no measure for others."""
    finite = (tensor[tensor.isfinite()] for tensor in tensors.values() if tensor is not None)
    return max(
        (
            float(tensor.abs().max() if tensor.dtype != torch.bool else tensor.any())
            for tensor in finite
            if tensor.numel()
        ),
        default=0.0,
    )


def _has_drawn() -> bool:
    """Whether anything was drawn since the stream of this micro-batch was started."""
    fresh = torch.Generator().manual_seed(torch.default_generator.initial_seed())
    return not torch.equal(fresh.get_state(), torch.default_generator.get_state())


def _kept(named: Iterator[tuple[str, Tensor]]) -> Tensors:
    return {name: _copy(tensor) for name, tensor in named}


def _copy(tensor: Tensor | None) -> Tensor | None:
    return _whole(tensor).clone() if tensor is not None else None


def compare(spec: Spec, plan: str, path: Path, plant: Plant = nullcontext) -> PlanObservation:
    """Train on this rank as `plan` says, beside the reference in `path`. All ranks of the process group call it."""
    task = quiet(tasks.load_task(spec.task, spec.set))
    asked, me = parse(plan), read_world()
    beside = _Beside(Reference.load(path), asked.resolve(me.size).place(me.rank).pp)
    with plant():
        for event in train(spec, asked, me, task=task, device="cpu", observe=beside.observe):
            if isinstance(event, Step):
                beside.seen.losses.append(event.loss)
                beside.seen.norms.append(event.grad_norm or 0.0)
    return beside.seen


class _Beside:
    def __init__(self, reference: Reference, place: int):
        """`place`: of this rank in the pipeline."""
        self.reference, self.place = reference, place
        self.written_before: set[str] | None = (
            None  # buffers that a rank before it in the pipeline holds, too
        )
        self.position = {name: at for at, name in enumerate(reference.names)}
        self.seen = PlanObservation()

    def observe(self, model: nn.Module, what: str, step: int) -> None:
        if what == "gradients":
            if step == 0:
                self.seen.apart.append({})
                self._hold("parameter", 0, self._parameters(model), self.reference.looks[0].parameters)
            self.seen.apart.append({})
            self._hold("gradient", step + 1, self._gradients(model), self.reference.looks[step + 1].gradients)
            return
        look = self.reference.looks[step + 1]
        self._hold("parameter", step + 1, self._parameters(model), look.parameters)
        self._hold("buffer", step + 1, self._buffers(model), look.buffers)

    def _buffers(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Those that this rank is the first of the pipeline to hold, and which go into checkpoints from it. Later stages may hold them
        without running the module that changes them."""
        here = list(self._named(model.named_buffers(remove_duplicate=False)))
        if self.written_before is None:
            names = {name for name, _ in here}
            everywhere = [(self.place, names)]
            if dist.get_world_size() > 1:
                everywhere *= dist.get_world_size()
                dist.all_gather_object(everywhere, (self.place, names))
            self.written_before = set().union(*(held for place, held in everywhere if place < self.place))
        self.seen.names.update(name for name, _ in here)
        return ((name, tensor) for name, tensor in here if name not in (self.written_before or ()))

    def _named(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What is here, under the names that one process has for it."""
        for name, tensor in named:
            if is_materialized(tensor):
                yield self.reference.aliases.get(name, name), tensor

    def _parameters(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, _whole(tensor))
            for name, tensor in self._named(model.named_parameters(remove_duplicate=False))
        )

    def _gradients(self, model: nn.Module) -> Iterator[tuple[str, Found]]:
        here = [
            (name, p)
            for name, p in self._named(model.named_parameters(remove_duplicate=False))
            if p.requires_grad
        ]
        has = {name: parameter.grad is not None for name, parameter in here}
        everywhere: list[dict[str, bool]] = [has]
        if dist.get_world_size() > 1:
            everywhere *= dist.get_world_size()
            dist.all_gather_object(everywhere, has)
        for name, parameter in here:
            without = [str(rank) for rank, there in enumerate(everywhere) if not there.get(name, True)]
            if without and len(without) < sum(
                name in there for there in everywhere
            ):  # to gather it would hang
                yield name, f"has a gradient on some ranks, and none on rank {', '.join(without)}"
            else:
                yield name, _whole(parameter.grad) if parameter.grad is not None else None

    def _hold(self, what: str, step: int, found: Iterator[tuple[str, Found]], expected: Tensors) -> None:
        """Compare tensors, and note how far the furthest is apart and the first that is too far."""
        largest = largest_of(expected)
        furthest = 0.0
        for name, tensor in found:
            self.seen.names.add(name)
            difference = self._difference(what, step, name, tensor, expected.get(name), largest)
            furthest = max(furthest, difference.relative)
            if difference.relative > self.reference.allowed(step, what, name) and (
                self.seen.first is None or difference.place < self.seen.first.place
            ):
                self.seen.first = difference
        self.seen.apart[step][what] = furthest

    def _difference(
        self, what: str, step: int, name: str, found: Found, expected: Tensor | None, largest: float
    ) -> Difference:
        at = self.position.get(name, len(self.position))

        def unlike(structure: str) -> Difference:
            return Difference(step, what, name, at, float("inf"), structure=structure)

        if name not in self.position:
            return unlike("is not there with one process")
        if isinstance(found, str):
            return unlike(found)
        if found is None or expected is None:
            if found is expected:
                return Difference(step, what, name, at, 0.0)
            here, there = ("no gradient", "one") if found is None else ("a gradient", "none")
            return unlike(f"has {here}, but with one process it has {there}")
        if found.shape != expected.shape:
            return unlike(f"has the shape {tuple(found.shape)}, but with one process {tuple(expected.shape)}")
        relative = apart(found, expected, largest)
        if relative <= self.reference.allowed(step, what, name):
            return Difference(step, what, name, at, relative)
        return Difference(step, what, name, at, relative, *ratio(found, expected))


def _whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if is_dtensor(tensor) else tensor.to_dense() if tensor.is_sparse else tensor
