"""The first tensor in which two checkpoints differ, whatever plans and numbers of ranks wrote them.

Tensors are read a few at a time, so that neither model is ever held whole.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.training.checkpoint.stored import StoredCheckpoint
from paceline.units import without_controls

READ_BYTES = 2**26  # of tensors that are read at once from both checkpoints; a larger tensor is read alone
BLOCK_ELEMENTS = 2**20  # that are compared at once, in float64
FLOOR = 1e-2  # minimum scale of a tensor, relative to the largest element of all tensors of its kind
GROUPS = ("weights", "averages", "optimizer", "ranks")
GROUP_OF_PREFIX = {"model": "weights", "ema": "averages", "optimizer": "optimizer"}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs.

    name      NAME of a weight, a buffer or an average, NAME/KEY of optimizer state, N/model/NAME of the state
              of rank N
    relative  the largest difference, relative to the largest element; None if the tensors do not correspond
    reason    why they do not correspond, such as "shape (3,) and (4,)"; else None
    index     position of the largest difference
    a, b      the values at that position; None if not finite
    """

    name: str
    relative: float | None
    reason: str | None = None
    index: tuple[int, ...] = ()
    a: float | None = None
    b: float | None = None


@dataclass(frozen=True)
class GroupComparison:
    """The weights, their averages, the optimizer state, or the state of single ranks of two checkpoints.

    group          "weights", "averages", "optimizer" or "ranks" (the state of each rank under local SGD)
    num_tensors    number of tensors in either checkpoint
    num_different  number of tensors that differ by more than the tolerance
    first          the first of them in the order of the model
    max_relative   the largest relative difference of all tensors that correspond
    largest        name of the tensor with that difference; None if all are exactly equal
    """

    group: str
    num_tensors: int
    num_different: int
    first: TensorDifference | None
    max_relative: float
    largest: str | None


@dataclass(frozen=True)
class CheckpointComparison:
    """Two checkpoints of the same step, compared group by group."""

    step: int
    groups: tuple[GroupComparison, ...]

    @property
    def is_equal(self) -> bool:
        return all(group.first is None for group in self.groups)


class MeasuredDifference(NamedTuple):
    """The largest difference of two tensors of one shape, before it is divided by a scale."""

    difference: float  # inf where only one is finite
    largest: float  # the largest finite element of both
    at: int  # flat position of the largest difference
    a: float
    b: float
    is_floating: bool


def compare_checkpoints(a: StoredCheckpoint, b: StoredCheckpoint, tolerance: float) -> CheckpointComparison:
    """Compare all tensors of two checkpoints of the same step.

    tolerance: largest difference of a tensor that counts as equal, relative to its largest element. The scale
    is at least FLOOR times the largest element of all tensors of its kind: a tensor that is 0 except for
    rounding has no digits to compare. With tolerance 0, elements must be equal; NaN equals NaN.

    Raises CheckpointError if a file cannot be read.
    """
    stored_a, stored_b = a.metadata.state_dict_metadata, b.metadata.state_dict_metadata
    positions = {name: at for at, name in enumerate({**a.index.shapes, **b.index.shapes})}
    names = sorted({**stored_a, **stored_b}, key=lambda name: _sort_key(name, positions))
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in names:
        groups[_group(name)].append(name)
    if not has_same_ranks(a, b):
        groups["ranks"] = []
    both = [
        name
        for members in groups.values()
        for name in members
        if name in stored_a and name in stored_b and a.shape(name) == b.shape(name)
    ]
    measured = dict(_measure_all(a, b, both))
    scales = _find_scales(measured)
    return CheckpointComparison(
        a.index.step,
        tuple(
            _compare_group(group, members, measured, scales, (a, b), tolerance)
            for group, members in groups.items()
            if members
        ),
    )


def has_same_ranks(a: StoredCheckpoint, b: StoredCheckpoint) -> bool:
    """Return whether both have the state of single ranks (local SGD), of the same number of ranks."""
    return a.index.own and b.index.own and a.index.ranks == b.index.ranks


class _EntryName(NamedTuple):
    """The name of a tensor in a checkpoint, in parts."""

    rank: int  # whose own state it is; -1: the state of the whole training
    group: str  # of GROUPS
    tensor: str
    key: str  # of the optimizer; "" for weights


def _parse(name: str) -> _EntryName:
    match = re.fullmatch(r"(?:rank/([0-9]{1,9})/)?(model|ema|optimizer)/(.+)", name, re.DOTALL)
    if match is None:
        return _EntryName(-1, "weights", name, "")
    rank = int(match[1]) if match[1] is not None else -1
    group = GROUP_OF_PREFIX[match[2]]
    if group != "optimizer":
        return _EntryName(rank, group, match[3], "")
    tensor, _, key = match[3].rpartition("/")
    return _EntryName(rank, group, tensor, key)


def _group(name: str) -> str:
    entry = _parse(name)
    return "ranks" if entry.rank >= 0 else entry.group


def _sort_key(name: str, positions: Mapping[str, int]) -> tuple[int, int, int, str, str]:
    """Return the place of a tensor: in the order of groups, and in each in the order of the model."""
    entry = _parse(name)
    position = positions.get(entry.tensor, len(positions))
    return entry.rank, GROUPS.index(entry.group), position, entry.tensor, entry.key


def _kind(name: str) -> str:
    """Return the key of optimizer state, and "" for weights: tensors of a kind have a common scale."""
    return _parse(name).key


def _find_scales(measured: Mapping[str, MeasuredDifference]) -> dict[str, float]:
    """Return the largest element of the floating-point tensors of each kind."""
    scales: dict[str, float] = {}
    for name, entry in measured.items():
        if entry.is_floating:
            scales[_kind(name)] = max(scales.get(_kind(name), 0.0), entry.largest)
    return scales


def _measure_all(
    a: StoredCheckpoint, b: StoredCheckpoint, names: list[str]
) -> Iterator[tuple[str, MeasuredDifference]]:
    batch: list[str] = []
    for name in names:
        sizes = [a.num_bytes(entry) + b.num_bytes(entry) for entry in [*batch, name]]
        if batch and sum(sizes) > READ_BYTES:
            yield from _measure_batch(a, b, batch)
            batch = []
        batch.append(name)
    if batch:
        yield from _measure_batch(a, b, batch)


def _measure_batch(
    a: StoredCheckpoint, b: StoredCheckpoint, names: list[str]
) -> Iterator[tuple[str, MeasuredDifference]]:
    tensors_a, tensors_b = a.read(names), b.read(names)
    for name in names:
        yield name, measure_difference(tensors_a.pop(name), tensors_b.pop(name))


def measure_difference(a: Tensor, b: Tensor) -> MeasuredDifference:
    """Return the largest difference of two tensors of one shape, and their largest element.

    The tensors are converted to float64 block by block. Infinities of one sign are equal, and so are two NaN.
    """
    is_floating = a.is_floating_point() or a.is_complex()
    is_complex = a.is_complex() or b.is_complex()
    if is_complex:
        a, b = (torch.view_as_real(tensor.to(torch.complex128)) for tensor in (a, b))
    a, b = a.reshape(-1), b.reshape(-1)
    found = MeasuredDifference(0.0, 0.0, 0, math.nan, math.nan, is_floating)
    for begin in range(0, a.numel(), BLOCK_ELEMENTS):
        raw_a, raw_b = a[begin : begin + BLOCK_ELEMENTS], b[begin : begin + BLOCK_ELEMENTS]
        x, y = raw_a.double(), raw_b.double()
        largest = max(found.largest, _largest_finite(x), _largest_finite(y))
        # Integers above 2^53 may be equal only in float64.
        is_equal = raw_a == raw_b if not is_floating and raw_a.dtype == raw_b.dtype else x == y
        is_equal |= x.isnan() & y.isnan()
        found = found._replace(largest=largest)
        if is_equal.all():
            continue
        difference = (x - y).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
        difference[is_equal] = 0.0
        if not is_floating:
            difference[~is_equal] = difference[~is_equal].clamp(min=1.0)
        at = int(difference.argmax())
        if float(difference[at]) > found.difference:
            found = found._replace(
                difference=float(difference[at]),
                at=(begin + at) // (1 + is_complex),
                a=float(x[at]),
                b=float(y[at]),
            )
    return found


def _largest_finite(block: Tensor) -> float:
    return float(torch.where(block.isfinite(), block, 0.0).abs().max())


def _compare_group(
    group: str,
    names: list[str],
    measured: Mapping[str, MeasuredDifference],
    scales: Mapping[str, float],
    checkpoints: tuple[StoredCheckpoint, StoredCheckpoint],
    tolerance: float,
) -> GroupComparison:
    first: TensorDifference | None = None
    num_different, max_relative, largest = 0, 0.0, None
    for name in names:
        if name in measured:
            relative = _relative(measured[name], scales.get(_kind(name), 0.0))
            if relative > max_relative:
                max_relative, largest = relative, _display(name)
            if relative <= tolerance:
                continue
        num_different += 1
        if first is None:
            first = _describe(name, measured.get(name), scales.get(_kind(name), 0.0), checkpoints)
    return GroupComparison(group, len(names), num_different, first, max_relative, largest)


def _relative(entry: MeasuredDifference, scale: float) -> float:
    if not entry.difference:
        return 0.0
    floor = FLOOR * scale if entry.is_floating else 0.0
    size = max(entry.largest, floor)
    return entry.difference / size if size else math.inf


def _describe(
    name: str,
    entry: MeasuredDifference | None,
    scale: float,
    checkpoints: tuple[StoredCheckpoint, StoredCheckpoint],
) -> TensorDifference:
    if entry is None:
        a, b = checkpoints
        stored = [name in checkpoint.metadata.state_dict_metadata for checkpoint in checkpoints]
        reason = f"shape {a.shape(name)} and {b.shape(name)}" if all(stored) else "only in "
        return TensorDifference(
            _display(name), None, reason if all(stored) else reason + ("a" if stored[0] else "b")
        )
    shape = checkpoints[0].shape(name)
    index = tuple(int(at) for at in torch.unravel_index(torch.tensor(entry.at), shape)) if shape else ()
    return TensorDifference(_display(name), _relative(entry, scale), None, index, entry.a, entry.b)


def _display(name: str) -> str:
    """Return the name of a tensor for people: without its group, and without control characters."""
    return without_controls(name.partition("/")[2])
