"""A comparison of two runs as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from paceline.debug.diff import RunDiff
from paceline.debug.settings import SettingDifference
from paceline.debug.steps import StepsComparison
from paceline.spec import abbreviate
from paceline.units import several, without_controls

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.debug.tensors import CheckpointComparison, GroupComparison, TensorDifference

GROUPS = {
    "weights": "weights",
    "averages": "averages of weights",
    "optimizer": "optimizer state",
    "ranks": "state of single ranks",
}
DIGITS = 9  # of a number that differs


def format_diff(diff: RunDiff) -> "Iterator[RenderableType]":
    """Yield the sentences and tables of a comparison, the verdict last."""
    yield f"a: {diff.a}"
    yield f"b: {diff.b}"
    yield from _format_settings(diff.settings)
    yield f"tolerance {_format_relative(diff.tolerance)} ({diff.reason})"
    if diff.steps is not None:
        yield from _format_steps(diff.steps)
    for checkpoint in diff.checkpoints:
        yield from _format_checkpoint(checkpoint)
    yield from diff.notes
    yield _format_verdict(diff)


def _format_settings(settings: tuple[SettingDifference, ...]) -> "Iterator[RenderableType]":
    if not settings:
        yield "all settings are equal"
        return
    table = _table("settings that differ", "a", "b")
    for entry in settings:
        is_code = entry.source == "code"
        values = ("", "") if is_code else (_format_value(entry.a), _format_value(entry.b))
        table.add_row(*(Text(text) for text in (without_controls(entry.key), *values)))
    yield table


def _format_value(value: Any) -> str:
    return "not set" if value is None else without_controls(abbreviate(value, str))


def _format_steps(steps: StepsComparison) -> "Iterator[RenderableType]":
    compared = f"{several(steps.count, 'step')} compared, {steps.begin} to {steps.end}"
    if steps.first_unequal is None:
        yield f"{compared}: all are equal to the last digit"
        return
    if steps.first_different is None:
        yield (
            f"{compared}: equal within the tolerance; largest difference "
            f"{_format_relative(steps.max_relative)}, first in step {steps.first_unequal}"
        )
        return
    yield f"{compared}: step {steps.first_different} is the first that differs"
    table = _table(f"step {steps.first_different}", "a", "b", "relative difference")
    for entry in steps.differences:
        table.add_row(
            entry.quantity, _format_number(entry.a), _format_number(entry.b), _format_relative(entry.relative)
        )
    yield table
    if steps.first_unequal < steps.first_different:
        yield (
            f"rounding or a small difference from step {steps.first_unequal} on, "
            f"at most {_format_relative(steps.max_relative)} before step {steps.first_different}"
        )
    yield _explain_step(steps)


def _explain_step(steps: StepsComparison) -> str:
    """Return where to look: an earlier part of a step explains differences in later parts."""
    assert steps.first_different is not None
    quantities = {entry.quantity for entry in steps.differences}
    if "lr" in quantities:
        return "the learning rate differs: compare the optimizer and the schedule"
    if "loss" not in quantities:
        return "the loss is equal and the gradient norm differs: compare the backward pass"
    if steps.first_different == 1:
        return "the first loss differs: compare the initial weights, the samples and the forward pass"
    return (
        f"the loss differs: compare the update of step {steps.first_different - 1}, "
        f"and the samples and random draws of step {steps.first_different}"
    )


def _format_checkpoint(checkpoint: "CheckpointComparison") -> Iterator[str]:
    for group in checkpoint.groups:
        yield f"checkpoint of step {checkpoint.step}, {GROUPS[group.group]}: {_format_group(group)}"


def _format_group(group: "GroupComparison") -> str:
    tensors = several(group.num_tensors, "tensor")
    if group.first is None:
        if group.largest is None:
            return f"{tensors}, all equal"
        return (
            f"{tensors}, equal within the tolerance; largest difference "
            f"{_format_relative(group.max_relative)} in {group.largest}"
        )
    others = f"{group.num_different} of {tensors} differ"
    if group.largest is not None and group.largest != group.first.name:
        others += f", {group.largest} most ({_format_relative(group.max_relative)})"
    return f"the first that differs is {_format_tensor(group.first)}; {others}"


def _format_tensor(tensor: "TensorDifference") -> str:
    if tensor.relative is None:
        return f"{tensor.name} ({tensor.reason})"
    where = f"at {list(tensor.index)} " if tensor.index else ""
    values = f"{_format_number(tensor.a)} and {_format_number(tensor.b)}"
    return f"{tensor.name}, by {_format_relative(tensor.relative)} of its largest element: {where}{values}"


def _format_verdict(diff: RunDiff) -> str:
    if diff.is_equal:
        return "the runs are equal" + (" within the tolerance" if diff.tolerance else "")
    places = []
    if diff.steps is not None and diff.steps.first_different is not None:
        places.append(f"step {diff.steps.first_different} ({diff.steps.differences[0].quantity})")
    for checkpoint in diff.checkpoints:
        names = [
            f"{group.first.name} in the {GROUPS[group.group]}"
            for group in checkpoint.groups
            if group.first is not None
        ]
        places += [f"{names[0]} of the checkpoint of step {checkpoint.step}"] if names else []
    return f"the runs differ: first in {', and in '.join(places)}"


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name)
    return table


def _format_number(value: float | None) -> str:
    return "none" if value is None else f"{value:.{DIGITS}g}"


def _format_relative(relative: float) -> str:
    return f"{relative:.1e}" if relative else "0"
