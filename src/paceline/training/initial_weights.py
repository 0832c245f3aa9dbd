"""Compares the initial weights of a model with those of a plain construction, which shares nothing with the recording of `weights`."""

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
from paceline.training.model_analysis import pretrained_path
from paceline.units import format_bytes, format_count
from paceline.user_code import UserCode
from paceline.version import __version__

VALUES = 256  # from so many on, mean and standard deviation of random tensors are compared
ERRORS = 6.0  # standard errors by which they may differ
AGAIN = 16  # models of each kind that are built where they differ by more
ERRORS_AGAIN = 8.0  # standard errors, estimated from so few
AT_START = 2**31  # values of the largest model that a training compares
CHUNK = 2**22  # elements that are added up at once
UNCOMPARED = "initial weights were not compared with those of a plain construction"
LIBRARIES = ("torch", "transformers", "timm", "torchvision", "numpy")


@dataclass(frozen=True)
class Moments:
    """Of a sample: what is compared, each with its standard error. Errors hold for independent values of any distribution."""

    mean: float
    std: float
    mean_error: float
    std_error: float
    infinite: float  # share of values that are not finite


def moments(tensors: list[Tensor]) -> Moments:
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
    """Tensors of one kind in which a first comparison found a difference. `fixed`: the values that all plain constructions share."""

    names: tuple[str, ...]
    fixed: Tensor | None = None  # where


Recorded = Callable[[int], tuple[nn.Module, Weights, bool]]  # from a seed, as by weights.record


def compare(
    build: Callable[[], nn.Module],
    recorded: Recorded,
    model: nn.Module,
    weights: Weights,
    seed: int,
    skip: frozenset[str] = frozenset(),
) -> None:
    """Raise TaskError where the initial tensors of `model` are not those that `build` makes without a recorder on the CPU.

    What two plain constructions from different seeds share must be equal. Mean and standard deviation of what they do not share must
    agree within 6 standard errors; small tensors are taken together with those of repeated layers. `recorded`: makes a model and its
    weights from other seeds, for a second look. `skip`: names that are not compared.
    """
    plain, other = (_plain(build, seed, at) for at in range(2))
    _same_structure(plain, model)
    again = named_tensors(other)
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
        differs = unequal(expected, again[name].detach())
        fixed = _fixed_rows(differs) if differs.any() else ~differs
        if (unequal(expected, drawn) & fixed).any():
            suspects.append(SuspectTensors((name,), fixed))
        if differs.any() and expected.numel() >= VALUES:
            suspects += _apart([name], [expected], [drawn])
        elif differs.any():
            names, of_plain, of_drawn = small.setdefault(
                (re.sub(r"\d+", "*", name), expected.shape, expected.dtype), ([], [], [])
            )
            names.append(name)
            of_plain.append(expected)
            of_drawn.append(drawn)
    for group in small.values():
        suspects += _apart(*group)
    del plain, other, again, small
    for suspect in suspects:
        _confirm(build, recorded, seed, suspect)


def _plain(build: Callable[[], nn.Module], seed: int, at: int) -> nn.Module:
    with seeded_rngs(derive_seed(seed, "plain", at)):
        return build()


def _same_structure(plain: nn.Module, model: nn.Module) -> None:
    here, there = named_tensors(model), named_tensors(plain)
    buffers = {
        name
        for name, _ in (
            *model.named_buffers(remove_duplicate=False),
            *plain.named_buffers(remove_duplicate=False),
        )
    }
    if names := sorted(
        (here.keys() | find_aliases(model).keys()) ^ (there.keys() | find_aliases(plain).keys())
    ):
        raise TaskError(_message(names[0], "it is there only in one of both constructions"))
    # torch makes two buffers of one with two names where it converts a module.
    if names := sorted(
        name
        for name in dict(find_aliases(plain).items() ^ find_aliases(model).items())
        if name not in buffers
    ):
        raise TaskError(
            _message(names[0], "it is tied to another parameter in only one of both constructions")
        )
    for name, tensor in there.items():
        for what in ("shape", "requires_grad"):
            if getattr(tensor, what) != getattr(here[name], what):
                raise TaskError(
                    _message(
                        name, f"{what} is {getattr(here[name], what)} here and {getattr(tensor, what)} there"
                    )
                )


def _fixed_rows(differs: Tensor) -> Tensor:
    """Where whole rows are the same in two constructions, and that cannot be by chance: the zeros of a padding index."""
    nothing = torch.zeros_like(differs)
    if differs.dim() < 2:
        return nothing
    rows = ~differs.flatten(1).any(1)
    others = differs[~rows]
    by_chance = (float((~others).sum()) + 1) / (others.numel() + 1)  # that values agree
    if len(rows) * by_chance ** (differs.numel() / len(rows)) > 1e-12:
        return nothing
    nothing[rows] = True
    return nothing


def _apart(names: list[str], plain: list[Tensor], drawn: list[Tensor]) -> list[SuspectTensors]:
    """Whether random tensors are of other mean, standard deviation or finiteness than those of a plain construction."""
    if sum(tensor.numel() for tensor in plain) < VALUES:
        return []
    expected, found = moments(plain), moments(drawn)
    rounding = 1e-9 * (abs(expected.mean) + expected.std)
    of_mean = (
        abs(expected.mean - found.mean)
        > ERRORS * (expected.mean_error**2 + found.mean_error**2) ** 0.5 + rounding
    )
    of_std = (
        abs(expected.std - found.std)
        > ERRORS * (expected.std_error**2 + found.std_error**2) ** 0.5 + rounding
    )
    return [SuspectTensors(tuple(names))] if of_mean or of_std or expected.infinite != found.infinite else []


def _confirm(build: Callable[[], nn.Module], recorded: Recorded, seed: int, suspect: SuspectTensors) -> None:
    """Raise TaskError if a difference is also one between many constructions of each kind: values of a tensor may depend on one another."""
    plain, drawn = [], []
    for at in range(AGAIN):
        of_plain = named_tensors(_plain(build, seed, 2 + at))
        plain.append([of_plain[name].detach() for name in suspect.names])
        _, weights, _ = recorded(derive_seed(seed, "plain", "recorded", at))
        drawn.append([weights.draw(name) for name in suspect.names])
    name = suspect.names[0]
    if suspect.fixed is not None:
        expected = plain[0][0]
        if any((unequal(expected, each[0]) & suspect.fixed).any() for each in plain):
            return  # it was by chance that they were the same
        wrong = [each[0] for each in drawn if (unequal(expected, each[0]) & suspect.fixed).any()]
        if len(wrong) > AGAIN // 2:
            where = (unequal(expected, wrong[0]) & suspect.fixed).reshape(-1)
            here, there = (tensor.reshape(-1)[where][0].item() for tensor in (wrong[0], expected))
            raise TaskError(
                _message(
                    name,
                    f"{int(where.sum()):,} constant values differ, the first is {here} here and {there} there",
                )
            )
        return
    for what in ("mean", "std", "infinite"):
        expected_all, found_all = (
            torch.tensor([getattr(moments(each), what) for each in of]).double() for of in (plain, drawn)
        )
        error = float(((expected_all.var() + found_all.var()) / AGAIN).sqrt())
        expected_mean, found_mean = float(expected_all.mean()), float(found_all.mean())
        if abs(expected_mean - found_mean) > ERRORS_AGAIN * error + 1e-6 * float(expected_all.abs().mean()):
            word = {
                "mean": "mean",
                "std": "standard deviation",
                "infinite": "share of values that are not finite",
            }[what]
            raise TaskError(
                _message(name, f"its {word} is {found_mean:.6g} here and {expected_mean:.6g} there")
            )


def _message(name: str, what: str) -> str:
    return (
        f"the initial values of the model's {name} are not those of a plain construction: {what}; this is a defect of Paceline, please "
        "report it; until then, call torch.manual_seed(0) first in model(), so that each rank builds the model without recording it"
    )


def check(spec: Spec, task: Task, model: nn.Module, weights: Weights) -> tuple[str, ...]:
    """Compare as above, unless the memory does not suffice, which is a note. `model`: on the meta device. Raises TaskError."""
    needed = 3 * sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(model).values())
    limit = memory_limit()
    free = min(psutil.virtual_memory().available, limit if limit is not None else sys.maxsize)
    if needed > free:
        return (
            f"{UNCOMPARED}: this takes {format_bytes(needed)} of memory, and {format_bytes(free)} are free",
        )
    with UserCode("model()", task.model):
        compare(
            task.model,
            partial(record, task.model),
            model,
            weights,
            spec.seed,
            find_pretrained_names(pretrained_path(task), model),
        )
    return ()


def check_once(spec: Spec, task: Task, model: nn.Module, weights: Weights, world: World) -> tuple[str, ...]:
    """The same on rank 0 for all ranks, unless this user has checked this model before. A collective."""
    answers: list[tuple[str, ...] | TaskError] = [()]
    if world.rank == 0:
        mark = _mark(task, model)
        if mark is None or not mark.exists():
            try:
                answers[0] = _check_in_time(spec, task, model, weights)
            except TaskError as error:
                answers[0] = error
            if mark is not None and answers[0] == ():
                mark.touch(mode=0o600)
    if world.size > 1:
        dist.broadcast_object_list(answers, src=0)
    answer = answers[0]
    if isinstance(answer, TaskError):
        raise answer
    return answer


def _check_in_time(spec: Spec, task: Task, model: nn.Module, weights: Weights) -> tuple[str, ...]:
    """The other ranks wait."""
    values = sum(tensor.numel() for tensor in named_tensors(model).values())
    if values > AT_START:
        return (
            f"{UNCOMPARED}: the model has {format_count(values)} values; paceline preflight compares them",
        )
    return check(spec, task, model, weights)


def _mark(task: Task, model: nn.Module) -> Path | None:
    """The file that says that this user has checked this model with this software. None where no file of theirs alone can be."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "paceline" / "weights"
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or found.st_mode & 0o077
        or not os.access(folder, os.W_OK)
    ):
        return None
    return folder / _digest(task, model)


def _digest(task: Task, model: nn.Module) -> str:
    """Of all that the initial weights of a model follow from: the task's fields, the code of its modules, libraries."""
    digest = hashlib.sha256()
    versions = [sys.version, __version__, *map(_version, LIBRARIES)]
    digest.update(repr((tasks.reference_to(task), tasks.field_values(task), versions)).encode())
    kinds = {type(module) for module in model.modules()} | {*type(task).__mro__}
    for file in sorted(
        {
            file
            for kind in kinds
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
