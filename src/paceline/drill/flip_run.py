"""Trainings in which a rank flips a bit of a tensor: their request, their course, and what must be found."""

from pathlib import Path
from typing import NamedTuple

from paceline import events
from paceline.drill.bit_flip import BitFlip, read_flipped, write_flip
from paceline.drill.faults import Fault, FaultMoment, choose_save_every
from paceline.drill.inject import FaultContext, UntriedFault
from paceline.drill.training import UnexpectedCourse
from paceline.events import Failed
from paceline.plan.plan import ResolvedPlan
from paceline.spec import WeightGuard
from paceline.training.guard.check import has_equal_state

REFUSED = ("guard.every=", "guard.recompute=")  # begin messages about what the plan or the task excludes


class FlippedTraining(NamedTuple):
    """What a rank flipped, the report of the run if it found it, and the number of starts."""

    done: str
    found: str | None
    starts: int


def choose_guard(fault: Fault, plan: ResolvedPlan, steps: int) -> WeightGuard | None:
    """Return the comparisons with which a training finds a flipped bit, where its plan allows that."""
    if fault.flips is None:
        return None
    if fault.flips in ("activation", "data") and can_recompute(plan):
        return WeightGuard(every=1, recompute=True)
    return WeightGuard(every=choose_save_every(steps), locate=True)


def can_recompute(plan: ResolvedPlan) -> bool:
    """Return whether a second data rank can compute the loss of a rank."""
    return plan.dp > 1 and plan.model_degree == 1


def is_found_for_certain(fault: Fault, plan: ResolvedPlan) -> bool:
    """Return whether the run must find a flipped bit.

    A gradient has a replica only if another rank updates the same weights. A flipped activation may round to
    the same loss.
    """
    if fault.flips == "gradient":
        return has_equal_state(plan)
    return fault.flips == "weight"


def prepare_flip(folder: Path, moment: FaultMoment) -> None:
    """Write which bit a rank flips, if the fault is a flipped bit."""
    if moment.fault.flips is not None:
        flip = BitFlip(target=moment.fault.flips, rank=moment.rank, step=moment.step + 1, seed=moment.seed)
        write_flip(folder, flip)


def train_with_flip(context: FaultContext) -> FlippedTraining:
    """Wait for the end of a training that has started, and return what happened.

    Raises UnexpectedCourse if it did not end well, and UntriedFault if no bit could be flipped."""
    training = context.training
    status = training.wait_for_end()
    flipped = read_flipped(training.folder)
    if status and flipped is None and any(word in training.last_line() for word in REFUSED):
        raise UntriedFault(training.last_line().removeprefix("paceline: "))
    if status:
        raise UnexpectedCourse(f"exit status must be 0, got {status}; last output: {training.last_line()}")
    if flipped is None:
        target = context.moment.fault.flips
        raise UntriedFault(f"rank {context.moment.rank} computes with no floating-point {target} of its own")
    reports = [
        event.message
        for event in events.read(training.run.events)
        if isinstance(event, Failed) and event.what == "rank"
    ]
    return FlippedTraining(flipped, reports[0] if reports else None, training.count_starts())
