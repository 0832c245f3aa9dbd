"""paceline diff: compare two runs from their files."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.debug.settings import SettingDifference, compare_code, compare_settings
from paceline.debug.steps import StepsComparison, StepTable, compare_steps, read_steps
from paceline.errors import RunError
from paceline.events import Started
from paceline.run import RunFolder
from paceline.units import numbered

if TYPE_CHECKING:
    from paceline.debug.tensors import CheckpointComparison

# The relative difference that rounding explains in some hundred steps, by precision. `verify` allows 1e-4 for
# a few steps in float32, and Adam amplified rounding to 8e-5 in ten steps of the digits task.
ROUNDING = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 2e-2, "bf16": 5e-2}
# Settings that change in which order numbers are added, but not the training.
ARITHMETIC = ("plan", "ranks", "device", "threads", "precision")
VERSIONS = ("version of torch", "processor")  # of the origin, which do the same


@dataclass(frozen=True)
class RunDiff:
    """Where two runs differ.

    a, b         their folders
    is_equal     whether all compared steps and tensors are equal within the tolerance
    tolerance    relative difference up to which numbers count as equal
    reason       why it is this tolerance
    settings     settings that differ; they alone make no difference
    steps        the steps that both have, compared; None if there are none
    checkpoints  the checkpoints of equal steps, in ascending order, up to the first that differs
    notes        sentences about what was not compared
    """

    a: str
    b: str
    is_equal: bool
    tolerance: float
    reason: str
    settings: "tuple[SettingDifference, ...]"
    steps: "StepsComparison | None"
    checkpoints: "tuple[CheckpointComparison, ...]"
    notes: tuple[str, ...]


def diff_runs(a: RunFolder, b: RunFolder, tolerance: float | None = None) -> RunDiff:
    """Compare the settings, the steps and the checkpoints of two runs.

    tolerance: largest relative difference that counts as equal [default: 0 if both runs compute in the same
    way, else what rounding explains in their precision].

    Raises SpecError for a damaged request, CheckpointError for a damaged checkpoint, and RunError if the runs
    have neither a step nor a checkpoint in common.
    """
    steps_a, steps_b = read_steps(a), read_steps(b)
    settings = compare_settings(a, b, steps_a.starts, steps_b.starts)
    reason = "by --tolerance"
    if tolerance is None:
        tolerance, reason = choose_tolerance(steps_a.starts, steps_b.starts, settings)
    steps = compare_steps(steps_a, steps_b, tolerance)
    shared = sorted({*a.checkpoints()} & {*b.checkpoints()})
    if steps is None and not shared:
        raise RunError(
            f"{a.path} and {b.path} have neither a step nor a checkpoint in common: "
            f"{_describe_content(a, steps_a)}; {_describe_content(b, steps_b)}; train one of them further"
        )
    notes = _describe_unmatched(a, b, steps_a, steps_b, shared)
    checkpoints: list[CheckpointComparison] = []
    if shared:
        from paceline.debug.tensors import compare_checkpoints, has_same_ranks
        from paceline.training.checkpoint.identity import CODE, MODULES
        from paceline.training.checkpoint.stored import open_checkpoint

        for step in shared:
            stored = [open_checkpoint(run.checkpoint(step)) for run in (a, b)]
            if not checkpoints:
                identities = [checkpoint.index.identity for checkpoint in stored]
                settings += compare_code(identities[0], identities[1], CODE)
                settings += compare_code(identities[0], identities[1], MODULES)
            if any(checkpoint.index.own for checkpoint in stored) and not has_same_ranks(*stored):
                notes.append(f"the state of single ranks in checkpoint {step} is not compared")
            checkpoints.append(compare_checkpoints(stored[0], stored[1], tolerance))
            if not checkpoints[-1].is_equal:
                break
    is_equal = (steps is None or steps.first_different is None) and all(
        checkpoint.is_equal for checkpoint in checkpoints
    )
    return RunDiff(
        str(a.path),
        str(b.path),
        is_equal,
        tolerance,
        reason,
        tuple(settings),
        steps,
        tuple(checkpoints),
        tuple(notes),
    )


def choose_tolerance(
    starts_a: list[Started], starts_b: list[Started], settings: list[SettingDifference]
) -> tuple[float, str]:
    """Return the default tolerance, and why.

    It is 0 if all starts of both runs compute in the same way, so that even rounding is the same.
    """
    starts = [*starts_a, *starts_b]
    differing = [key for key in ARITHMETIC if len({getattr(event, key) for event in starts}) > 1]
    differing += [entry.key for entry in settings if entry.source == "origin" and entry.key in VERSIONS]
    if not differing:
        return 0.0, "both runs round in the same way"
    precisions = [event.precision for event in starts if event.precision in ROUNDING]
    coarsest = max(precisions, key=ROUNDING.__getitem__, default="fp32")
    verb = "differs" if len(differing) == 1 else "differ"
    return ROUNDING[coarsest], f"rounding of {coarsest}, because {', '.join(differing)} {verb}"


def _describe_content(run: RunFolder, table: StepTable) -> str:
    steps = f"steps {table.steps[0]}–{table.steps[-1]}" if table.steps else "no steps"
    kept = run.checkpoints()
    return f"{run.path} has {steps} and {numbered('checkpoint', kept) if kept else 'no checkpoint'}"


def _describe_unmatched(
    a: RunFolder, b: RunFolder, steps_a: StepTable, steps_b: StepTable, shared: list[int]
) -> list[str]:
    """Return sentences about damaged lines, and about steps and checkpoints that only one run has."""
    notes = [f"{run.path}: {table.skipped}" for run, table in ((a, steps_a), (b, steps_b)) if table.skipped]
    for run, table, other in ((a, steps_a, steps_b), (b, steps_b, steps_a)):
        rest = len({*table.steps} - {*other.steps}) if table.steps != other.steps else 0
        if rest:
            notes.append(f"{rest:,} of {len(table.steps):,} steps are only in {run.path}")
    for run in (a, b):
        if rest_of := [step for step in run.checkpoints() if step not in shared]:
            notes.append(f"{numbered('checkpoint', rest_of)} only in {run.path}")
    return notes
