"""The values that a training computes in each step, recorded as a reference or compared with it."""

import copy
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
from paceline.data.fake import is_fake
from paceline.distributed.dtensor import is_dtensor, is_materialized
from paceline.distributed.world import World, read_world
from paceline.events import Step
from paceline.plan.plan import Plan, parse
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.init.named_tensors import find_aliases
from paceline.training.train import train
from paceline.verify.compare import (
    FLOOR,
    MARGIN,
    MAX_AMPLIFIED,
    MAX_AMPLIFIED_FIRST,
    ROUNDING,
    TOLERANCES,
    Difference,
    estimate_factor,
    scalar_difference,
    tensor_difference,
)
from paceline.verify.disable_dropout import disable_dropout

Tensors = dict[str, Tensor | None]
Value = Tensor | str | None  # a string is the reason why there is no tensor to compare


class Plant(Protocol):
    """A context in which a training runs; tests use it to plant faults."""

    def __call__(self) -> AbstractContextManager[None]: ...


@dataclass
class StepTensors:
    """Whole tensors of one step."""

    gradients: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


@dataclass
class Reference:
    """The training with one process.

    `steps[0]` has the parameters before the first step, `steps[s]` all tensors of step s."""

    steps: list[StepTensors]
    losses: list[float]
    norms: list[float]
    aliases: dict[str, str]  # other names of tied parameters -> the first name
    disabled_dropout: list[str]  # names of rates
    has_batch_norm: bool
    is_random: bool  # whether the model drew random numbers without dropout
    narrowest_dtype: str  # through which gradients pass: float64, or what the model casts to
    float64_error: str | None = None  # why the model cannot compute in float64
    # For each step: "gradient NAME" -> the relative difference to which rounding may have grown.
    amplified: list[dict[str, float]] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.narrowest_dtype]

    def allowed(self, step: int, what: str, name: str) -> float:
        """Return the relative difference that counts as rounding."""
        return max(self.tolerance, self.amplified[step].get(f"{what} {name}", 0.0) if self.amplified else 0.0)

    @property
    def names(self) -> list[str]:
        return [*self.steps[0].parameters, *self.steps[-1].buffers]

    def save(self, path: Path) -> None:
        torch.save(vars(self) | {"steps": [vars(step) for step in self.steps]}, path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        content = torch.load(path, mmap=True, weights_only=True)
        return cls(**content | {"steps": [StepTensors(**step) for step in content["steps"]]})


@dataclass
class PlanObservation:
    """The training under a plan on one rank, compared with the reference."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    # For each step: kind of tensor -> the largest relative difference.
    differences: list[dict[str, float]] = field(default_factory=list)
    first: Difference | None = None
    names: set[str] = field(default_factory=set)  # of the tensors on this rank


def record_reference(
    spec: Spec, task: Task, microbatches: int, rounding_dtype: str | None = None
) -> Reference:
    """Train in this process.

    rounding_dtype: add rounding of this dtype to the weights before the first step, and to the gradients of
    each step."""
    rounding = ROUNDING[rounding_dtype] if rounding_dtype is not None else 0.0
    steps: list[StepTensors] = [StepTensors()]
    disabled: list[str] = []
    has_updates: list[bool] = []
    facts: dict[str, Any] = {"aliases": {}, "has_batch_norm": False, "is_random": False}

    def report(names: list[str]) -> None:
        disabled[:] = names

    def observe(model: nn.Module, what: str, step: int) -> None:
        if what == "update":  # of a task with several in a step
            if rounding:
                _add_rounding_(model, rounding, step)
            facts["is_random"] |= _has_drawn()
            has_updates[:] = [True]
            return
        if what == "weights":
            steps[-1].parameters = _copy_all(model.named_parameters())
            steps[-1].buffers = _copy_all(model.named_buffers())
            return
        if step == 0:
            steps[0].parameters = _copy_all(model.named_parameters())
            facts["aliases"] = find_aliases(model)
            facts["has_batch_norm"] = any(
                isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
            )
        if rounding and not has_updates:
            _add_rounding_(model, rounding, step)
        steps.append(
            StepTensors({name: _copy(p.grad) for name, p in model.named_parameters() if p.requires_grad})
        )
        facts["is_random"] |= not has_updates and _has_drawn()

    narrowest = NarrowestDtype()
    wrapped = disable_dropout(task, report, narrowest)
    if rounding_dtype is not None:
        wrapped = _with_rounded_weights(wrapped, torch.finfo(getattr(torch, rounding_dtype)).eps)
    events = train(
        spec, Plan(dp=1, microbatches=microbatches), World(), task=wrapped, device="cpu", observe=observe
    )
    step_events = [event for event in events if isinstance(event, Step)]
    return Reference(
        steps,
        losses=[event.loss for event in step_events],
        norms=[event.grad_norm or 0.0 for event in step_events],
        disabled_dropout=disabled,
        narrowest_dtype=narrowest.name,
        **facts,
    )


class NarrowestDtype(TorchFunctionMode):
    """Finds the narrowest dtype that is computed from parameters while the mode is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "float64"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_floating_point():
                name = str(tensor.dtype).removeprefix("torch.")
                if TOLERANCES.get(name, 0.0) > TOLERANCES[self.name]:
                    self.name = name
        return result


def _with_rounded_weights(task: Task, eps: float) -> Task:
    """Return a task that changes the last digit of its weights before the first forward pass."""
    wrapped, build = copy.copy(task), task.model

    def round_(module: nn.Module, *_: Any) -> None:
        parameters = list(module.parameters())
        if "_is_rounded" in vars(module) or any(is_fake(p) or p.is_meta for p in parameters):
            return
        vars(module)["_is_rounded"] = True
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.is_floating_point():
                    signs = torch.randint(2, parameter.shape, generator=generator).mul_(2).sub_(1)
                    parameter.mul_(1 + eps * signs.to(parameter.dtype))

    def model() -> nn.Module:
        built = build()
        if isinstance(built, nn.Module):
            built.register_forward_pre_hook(round_)
        return built

    object.__setattr__(wrapped, "model", model)  # tasks are frozen
    return wrapped


def _add_rounding_(model: nn.Module, rounding: float, step: int) -> None:
    """Add noise to the gradients. Elements that are exactly 0 stay 0: they have no rounding."""
    generator = torch.Generator().manual_seed(step)
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
    largest = max((gradient.abs().max().item() for gradient in gradients), default=0.0)
    for gradient in gradients:
        scale = rounding * max(gradient.abs().max().item(), FLOOR * largest)
        noise = torch.randn(gradient.shape, generator=generator, dtype=torch.float64).to(gradient.dtype)
        gradient.add_(noise.mul_(scale).mul_(gradient != 0))


def measure_amplification(reference: Reference, rounded: Reference) -> None:
    """Set `reference.amplified` to the differences from `rounded`, a training with added rounding."""
    reference.amplified = [{} for _ in reference.steps]
    for number, (step, rounded_step) in enumerate(zip(reference.steps, rounded.steps, strict=True)):
        amplified = reference.amplified[number]
        limit = (MAX_AMPLIFIED_FIRST if number == 1 else MAX_AMPLIFIED)[reference.narrowest_dtype]
        for what, expected, actual in (
            ("gradient", step.gradients, rounded_step.gradients),
            ("parameter", step.parameters, rounded_step.parameters),
            ("buffer", step.buffers, rounded_step.buffers),
        ):
            largest = find_largest(expected)
            for name, tensor in expected.items():
                other = actual[name]
                if tensor is not None and other is not None:
                    allowed = MARGIN * tensor_difference(other, tensor, largest)
                    amplified[f"{what} {name}"] = min(limit, allowed) if what == "gradient" else allowed
        if number:
            for what, values, rounded_values in (
                ("loss", reference.losses, rounded.losses),
                ("norm", reference.norms, rounded.norms),
            ):
                difference = scalar_difference(rounded_values[number - 1], values[number - 1])
                amplified[f"{what} "] = min(limit, MARGIN * difference)


def find_largest(tensors: Tensors) -> float:
    """Return the largest magnitude of the finite elements; -inf of a mask is no scale for other tensors."""
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
    """Return whether a random number was drawn since the start of this micro-batch's stream."""
    fresh = torch.Generator().manual_seed(torch.default_generator.initial_seed())
    return not torch.equal(fresh.get_state(), torch.default_generator.get_state())


def _copy_all(named: Iterator[tuple[str, Tensor]]) -> Tensors:
    return {name: _copy(tensor) for name, tensor in named}


def _copy(tensor: Tensor | None) -> Tensor | None:
    return _gather_whole(tensor).clone() if tensor is not None else None


def observe_plan(spec: Spec, plan: str, path: Path, plant: Plant = nullcontext) -> PlanObservation:
    """Train on this rank under a plan, and compare with the reference in `path`.

    All ranks of the process group call it."""
    task = disable_dropout(tasks.load_task(spec.task, spec.set))
    parsed, world = parse(plan), read_world()
    comparison = _Comparison(Reference.load(path), parsed.resolve(world.size).place(world.rank).pp)
    with plant():
        for event in train(spec, parsed, world, task=task, device="cpu", observe=comparison.observe):
            if isinstance(event, Step):
                comparison.observation.losses.append(event.loss)
                comparison.observation.norms.append(event.grad_norm or 0.0)
    return comparison.observation


class _Comparison:
    """Compares the tensors of this rank with the reference during a training."""

    def __init__(self, reference: Reference, stage: int):
        """stage: coordinate of this rank along pp."""
        self.reference, self.stage = reference, stage
        self.buffers_of_earlier_stages: set[str] | None = None
        self.position = {name: at for at, name in enumerate(reference.names)}
        self.observation = PlanObservation()

    def observe(self, model: nn.Module, what: str, step: int) -> None:
        if what == "update":  # of a task with several in a step; their gradients follow after the last
            return
        expected = self.reference.steps[step + 1]
        if what == "gradients":
            if step == 0:
                self.observation.differences.append({})
                self._compare("parameter", 0, self._parameters(model), self.reference.steps[0].parameters)
            self.observation.differences.append({})
            self._compare("gradient", step + 1, self._gradients(model), expected.gradients)
            return
        self._compare("parameter", step + 1, self._parameters(model), expected.parameters)
        self._compare("buffer", step + 1, self._buffers(model), expected.buffers)

    def _buffers(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that no earlier stage holds. Checkpoints take them from this rank.

        Later stages may hold them without running the module that changes them."""
        buffers = list(self._local(model.named_buffers(remove_duplicate=False)))
        if self.buffers_of_earlier_stages is None:
            names = {name for name, _ in buffers}
            by_rank = [(self.stage, names)]
            if dist.get_world_size() > 1:
                by_rank *= dist.get_world_size()
                dist.all_gather_object(by_rank, (self.stage, names))
            self.buffers_of_earlier_stages = set().union(
                *(held for stage, held in by_rank if stage < self.stage)
            )
        self.observation.names.update(name for name, _ in buffers)
        return (
            (name, tensor) for name, tensor in buffers if name not in (self.buffers_of_earlier_stages or ())
        )

    def _local(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of this rank under the names that they have with one process."""
        for name, tensor in named:
            if is_materialized(tensor):
                yield self.reference.aliases.get(name, name), tensor

    def _parameters(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, _gather_whole(tensor))
            for name, tensor in self._local(model.named_parameters(remove_duplicate=False))
        )

    def _gradients(self, model: nn.Module) -> Iterator[tuple[str, Value]]:
        parameters = [
            (name, p)
            for name, p in self._local(model.named_parameters(remove_duplicate=False))
            if p.requires_grad
        ]
        has_gradient = {name: parameter.grad is not None for name, parameter in parameters}
        by_rank: list[dict[str, bool]] = [has_gradient]
        if dist.get_world_size() > 1:
            by_rank *= dist.get_world_size()
            dist.all_gather_object(by_rank, has_gradient)
        for name, parameter in parameters:
            without = [str(rank) for rank, has in enumerate(by_rank) if not has.get(name, True)]
            if without and len(without) < sum(name in has for has in by_rank):
                # Gathering the gradient would hang.
                yield name, f"has a gradient on some ranks, and none on rank {', '.join(without)}"
            else:
                yield name, _gather_whole(parameter.grad) if parameter.grad is not None else None

    def _compare(self, what: str, step: int, values: Iterator[tuple[str, Value]], expected: Tensors) -> None:
        """Compare tensors; record the largest difference, and the first that exceeds the tolerance."""
        largest = find_largest(expected)
        max_difference = 0.0
        for name, value in values:
            self.observation.names.add(name)
            difference = self._difference(what, step, name, value, expected.get(name), largest)
            max_difference = max(max_difference, difference.relative)
            if difference.relative > self.reference.allowed(step, what, name) and (
                self.observation.first is None or difference.sort_key < self.observation.first.sort_key
            ):
                self.observation.first = difference
        self.observation.differences[step][what] = max_difference

    def _difference(
        self, what: str, step: int, name: str, actual: Value, expected: Tensor | None, largest: float
    ) -> Difference:
        position = self.position.get(name, len(self.position))

        def differ_in(structure: str) -> Difference:
            return Difference(step, what, name, position, float("inf"), structure=structure)

        if name not in self.position:
            return differ_in("does not exist with one process")
        if isinstance(actual, str):
            return differ_in(actual)
        if actual is None or expected is None:
            if actual is expected:
                return Difference(step, what, name, position, 0.0)
            has, expected_has = ("no gradient", "one") if actual is None else ("a gradient", "none")
            return differ_in(f"has {has}, but with one process it has {expected_has}")
        if actual.shape != expected.shape:
            return differ_in(
                f"has the shape {tuple(actual.shape)}, but with one process {tuple(expected.shape)}"
            )
        relative = tensor_difference(actual, expected, largest)
        if relative <= self.reference.allowed(step, what, name):
            return Difference(step, what, name, position, relative)
        return Difference(step, what, name, position, relative, *estimate_factor(actual, expected))


def _gather_whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if is_dtensor(tensor) else tensor.to_dense() if tensor.is_sparse else tensor
