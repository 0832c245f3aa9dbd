"""Comparison of recorded initial weights with those of a plain construction, without shared code."""

import hashlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import task as tasks
from paceline.cluster.limits import memory_limit
from paceline.distributed.rng import derive_seed, seeded_rngs
from paceline.distributed.world import World
from paceline.errors import TaskError
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.init.deferred_init import Weights, record
from paceline.training.init.named_tensors import find_aliases, named_tensors
from paceline.training.init.operation_tape import unequal
from paceline.training.init.pretrained import find_pretrained_names
from paceline.training.model_facts.model_analysis import find_pretrained
from paceline.units import format_bytes, format_count
from paceline.user_code import UserCode
from paceline.version import __version__

MIN_VALUES = 256  # of random tensors, for a comparison of mean and standard deviation
MAX_ERRORS = 6.0  # standard errors by which they may differ
REPEATS = 16  # models of each kind that are built if they differ by more
MAX_ERRORS_OF_REPEATS = 8.0  # standard errors, estimated from these few models
MAX_VALUES_AT_START = 2**31  # of a model that a training compares
CHUNK = 2**22  # elements that are summed at once
UNCOMPARED = "initial weights were not compared with those of a plain construction"
LIBRARIES = ("torch", "transformers", "timm", "torchvision", "numpy")


@dataclass(frozen=True)
class Moments:
    """Moments of values, with standard errors that hold for independent values of any distribution."""

    mean: float
    std: float
    mean_error: float
    std_error: float
    infinite: float  # fraction of values that are not finite


def compute_moments(tensors: list[Tensor]) -> Moments:
    """Return the moments of all values of these tensors."""
    count, total, size = 0, 0.0, 0
    for values in _chunks(tensors):
        finite = values[values.isfinite()]
        count, size, total = count + finite.numel(), size + values.numel(), total + float(finite.sum())
    mean = total / max(count, 1)
    second = fourth = 0.0
    for values in _chunks(tensors):
        squares = (values[values.isfinite()] - mean).square()
        second, fourth = second + float(squares.sum()), fourth + float(squares.square().sum())
    second, fourth = second / max(count, 1), fourth / max(count, 1)
    std = second**0.5
    std_error = (max(fourth - second**2, 0.0) / max(count, 1)) ** 0.5 / (2 * std) if std else 0.0
    return Moments(mean, std, std / max(count, 1) ** 0.5, std_error, 1 - count / max(size, 1))


def _chunks(tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        yield from (chunk.double() for chunk in flat.split(CHUNK))


@dataclass(frozen=True)
class SuspectTensors:
    """Tensors of one kind in which a first comparison found a difference."""

    names: tuple[str, ...]
    fixed: Tensor | None = None  # mask of the values that all plain constructions share


Recorder = Callable[[int], tuple[nn.Module, Weights, bool]]  # from a seed, as by deferred_init.record


def compare_with_plain(
    build: Callable[[], nn.Module],
    recorder: Recorder,
    model: nn.Module,
    weights: Weights,
    seed: int,
    skip: frozenset[str] = frozenset(),
) -> None:
    """Raise TaskError if the recorded initial tensors are not those of a plain construction on the CPU.

    Values that two plain constructions with different seeds share must be equal. Of the other values, mean
    and standard deviation must agree within 6 standard errors; small tensors are combined with those of
    repeated layers.

    model, weights: recorded with `seed`. `recorder`: records the model with other seeds, to confirm a
    difference. `skip`: names that are not compared.
    """
    plain, other = (_build_plain(build, seed, index) for index in range(2))
    _check_structure(plain, model)
    other_tensors = named_tensors(other)
    suspects: list[SuspectTensors] = []
    small: dict[Any, tuple[list[str], list[Tensor], list[Tensor]]] = {}
    for name, tensor in named_tensors(plain).items():
        expected = tensor.detach()
        if (
            name in skip
            or expected.layout is not torch.strided
            or expected.is_quantized
            or not expected.numel()
        ):
            continue
        drawn = weights.draw(name)
        differs = unequal(expected, other_tensors[name].detach())
        fixed = _find_fixed_rows(differs) if differs.any() else ~differs
        if (unequal(expected, drawn) & fixed).any():
            suspects.append(SuspectTensors((name,), fixed))
        if differs.any() and expected.numel() >= MIN_VALUES:
            suspects += _compare_moments([name], [expected], [drawn])
        elif differs.any():
            names, plain_tensors, drawn_tensors = small.setdefault(
                (re.sub(r"\d+", "*", name), expected.shape, expected.dtype), ([], [], [])
            )
            names.append(name)
            plain_tensors.append(expected)
            drawn_tensors.append(drawn)
    for group in small.values():
        suspects += _compare_moments(*group)
    del plain, other, other_tensors, small
    for suspect in suspects:
        _confirm(build, recorder, seed, suspect)


def _build_plain(build: Callable[[], nn.Module], seed: int, index: int) -> nn.Module:
    with seeded_rngs(derive_seed(seed, "plain", index)):
        return build()


def _check_structure(plain: nn.Module, model: nn.Module) -> None:
    """Raise TaskError if names, ties, shapes or requires_grad of the tensors differ."""
    tensors, expected = named_tensors(model), named_tensors(plain)
    buffers = {
        name
        for name, _ in (
            *model.named_buffers(remove_duplicate=False),
            *plain.named_buffers(remove_duplicate=False),
        )
    }
    if names := sorted(
        (tensors.keys() | find_aliases(model).keys()) ^ (expected.keys() | find_aliases(plain).keys())
    ):
        raise TaskError(_message(names[0], "it exists in only one of the two constructions"))
    # torch splits a buffer with two names into two when it converts a module.
    if names := sorted(
        name
        for name in dict(find_aliases(plain).items() ^ find_aliases(model).items())
        if name not in buffers
    ):
        raise TaskError(
            _message(names[0], "it is tied to another parameter in only one of the two constructions")
        )
    for name, tensor in expected.items():
        for attribute in ("shape", "requires_grad"):
            if getattr(tensor, attribute) != getattr(tensors[name], attribute):
                raise TaskError(
                    _message(
                        name,
                        f"{attribute} is {getattr(tensors[name], attribute)}, expected "
                        f"{getattr(tensor, attribute)}",
                    )
                )


def _find_fixed_rows(differs: Tensor) -> Tensor:
    """Return a mask of rows that are equal in two constructions, but not by chance: those of a padding index.

    differs: mask of the values that differ.
    """
    fixed = torch.zeros_like(differs)
    if differs.dim() < 2:
        return fixed
    rows = ~differs.flatten(1).any(1)
    others = differs[~rows]
    by_chance = (float((~others).sum()) + 1) / (
        others.numel() + 1
    )  # upper bound of the probability that two values are equal
    if len(rows) * by_chance ** (differs.numel() / len(rows)) > 1e-12:
        return fixed
    fixed[rows] = True
    return fixed


def _compare_moments(names: list[str], plain: list[Tensor], drawn: list[Tensor]) -> list[SuspectTensors]:
    """Return the tensors as suspect if their mean, standard deviation or finiteness differs."""
    if sum(tensor.numel() for tensor in plain) < MIN_VALUES:
        return []
    expected, actual = compute_moments(plain), compute_moments(drawn)
    rounding = 1e-9 * (abs(expected.mean) + expected.std)
    of_mean = (
        abs(expected.mean - actual.mean)
        > MAX_ERRORS * (expected.mean_error**2 + actual.mean_error**2) ** 0.5 + rounding
    )
    of_std = (
        abs(expected.std - actual.std)
        > MAX_ERRORS * (expected.std_error**2 + actual.std_error**2) ** 0.5 + rounding
    )
    return [SuspectTensors(tuple(names))] if of_mean or of_std or expected.infinite != actual.infinite else []


def _confirm(build: Callable[[], nn.Module], recorder: Recorder, seed: int, suspect: SuspectTensors) -> None:
    """Raise TaskError if the difference is also one between many constructions of each kind.

    The standard errors of one construction are too small if the values of a tensor depend on each other.
    """
    plain, drawn = [], []
    for index in range(REPEATS):
        tensors = named_tensors(_build_plain(build, seed, 2 + index))
        plain.append([tensors[name].detach() for name in suspect.names])
        _, weights, _ = recorder(derive_seed(seed, "plain", "recorded", index))
        drawn.append([weights.draw(name) for name in suspect.names])
    name = suspect.names[0]
    if suspect.fixed is not None:
        expected = plain[0][0]
        if any((unequal(expected, tensors[0]) & suspect.fixed).any() for tensors in plain):
            return  # the values were equal by chance
        wrong = [tensors[0] for tensors in drawn if (unequal(expected, tensors[0]) & suspect.fixed).any()]
        if len(wrong) > REPEATS // 2:
            where = (unequal(expected, wrong[0]) & suspect.fixed).reshape(-1)
            actual_value, expected_value = (
                tensor.reshape(-1)[where][0].item() for tensor in (wrong[0], expected)
            )
            raise TaskError(
                _message(
                    name,
                    f"{int(where.sum()):,} constant values differ, the first is {actual_value}, "
                    f"expected {expected_value}",
                )
            )
        return
    for moment in ("mean", "std", "infinite"):
        expected_all, actual_all = (
            torch.tensor([getattr(compute_moments(tensors), moment) for tensors in models]).double()
            for models in (plain, drawn)
        )
        error = float(((expected_all.var() + actual_all.var()) / REPEATS).sqrt())
        expected_mean, actual_mean = float(expected_all.mean()), float(actual_all.mean())
        if abs(expected_mean - actual_mean) > MAX_ERRORS_OF_REPEATS * error + 1e-6 * float(
            expected_all.abs().mean()
        ):
            words = {
                "mean": "mean",
                "std": "standard deviation",
                "infinite": "share of values that are not finite",
            }[moment]
            raise TaskError(_message(name, f"its {words} is {actual_mean:.6g}, expected {expected_mean:.6g}"))


def _message(name: str, what: str) -> str:
    return (
        f"the initial values of the model's {name} are not those of a plain construction: {what}; this is a "
        "defect of Paceline, please report it; until then, call torch.manual_seed(0) first in model(), so "
        "that each rank builds the model without recording it"
    )


def check_initial_weights(spec: Spec, task: Task, model: nn.Module, weights: Weights) -> tuple[str, ...]:
    """Compare recorded initial weights with a plain construction.

    Returns a note instead if the free memory does not suffice.

    model: on the meta device. `weights`: recorded. Raises TaskError if they differ.
    """
    needed = 3 * sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(model).values())
    limit = memory_limit()
    free = min(psutil.virtual_memory().available, limit if limit is not None else sys.maxsize)
    if needed > free:
        return (
            f"{UNCOMPARED}: this takes {format_bytes(needed)} of memory, and {format_bytes(free)} are free",
        )
    with UserCode("model()", task.model):
        compare_with_plain(
            task.model,
            partial(record, task.model),
            model,
            weights,
            spec.seed,
            find_pretrained_names(find_pretrained(task), model),
        )
    return ()


def check_initial_weights_once(
    spec: Spec, task: Task, model: nn.Module, weights: Weights, world: World
) -> tuple[str, ...]:
    """Check on rank 0 for all ranks, unless this user has checked this model before. A collective.

    Returns notes. Raises TaskError on all ranks.
    """
    answers: list[tuple[str, ...] | TaskError] = [()]
    if world.rank == 0:
        marker = _find_marker(task, model)
        if marker is None or not marker.exists():
            try:
                answers[0] = _check_if_small(spec, task, model, weights)
            except TaskError as error:
                answers[0] = error
            if marker is not None and answers[0] == ():
                marker.touch(mode=0o600)
    if world.size > 1:
        dist.broadcast_object_list(answers, src=0)
    answer = answers[0]
    if isinstance(answer, TaskError):
        raise answer
    return answer


def _check_if_small(spec: Spec, task: Task, model: nn.Module, weights: Weights) -> tuple[str, ...]:
    """Check, or return a note if the model is so large that the other ranks would wait too long."""
    values = sum(tensor.numel() for tensor in named_tensors(model).values())
    if values > MAX_VALUES_AT_START:
        return (
            f"{UNCOMPARED}: the model has {format_count(values)} values; paceline preflight compares them",
        )
    return check_initial_weights(spec, task, model, weights)


def _find_marker(task: Task, model: nn.Module) -> Path | None:
    """Return the file that exists if this user has checked this model with this software.

    None if there is no cache folder that only this user can write to, or if code is from a notebook or was
    sent by another process, so that there is no file to recognize it by.
    """
    if any(kind.__module__ == "__main__" for kind in _classes(task, model)):
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "paceline" / "weights"
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or status.st_mode & 0o077
        or not os.access(folder, os.W_OK)
    ):
        return None
    return folder / _digest(task, model)


def _classes(task: Task, model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()} | {*type(task).__mro__}


def _digest(task: Task, model: nn.Module) -> str:
    """Return a digest of what determines initial weights: task fields, code of its modules, libraries."""
    digest = hashlib.sha256()
    versions = [sys.version, __version__, *map(_version, LIBRARIES)]
    digest.update(repr((tasks.reference_to(task), tasks.field_values(task), versions)).encode())
    for file in sorted(
        {
            file
            for kind in _classes(task, model)
            if (file := getattr(sys.modules.get(kind.__module__), "__file__", None)) is not None
        }
    ):
        digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
    for name, tensor in named_tensors(model).items():
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)).encode())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
