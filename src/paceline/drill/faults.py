"""The faults of a drill as a table, and their moments and ranks as a pure function of the seed."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.errors import SpecError
from paceline.launch.signals import STOPPED
from paceline.spec import suggest

KILLED = -9  # exit status
MIN_STEPS = 8  # so that there are steps before and after a fault


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    action: str
    expected: str
    starts: int = 2  # expected starts of the ranks, including the first
    status: int = 0  # expected exit status of the command; the drill resumes the run if it is not 0
    ranks: int = 1  # required
    checkpoints: int = 0  # complete ones required before the fault
    flips: Literal["weight", "gradient", "activation", "data"] | None = None  # a bit of a tensor


FAULTS = (
    Fault(name="kill", action="SIGKILL to a rank", expected="all ranks start again from the last checkpoint"),
    Fault(
        name="stop",
        action="SIGSTOP to a rank",
        expected="the others give up after the timeout; all ranks start again",
        ranks=2,
    ),
    Fault(
        name="delay",
        action="SIGSTOP to a rank, SIGCONT before the timeout",
        expected="the training continues",
        starts=1,
    ),
    Fault(
        name="cut",
        action="closes the connections of a rank to the others",
        expected="all ranks start again",
        ranks=2,
    ),
    Fault(
        name="launcher",
        action="SIGKILL to the launcher",
        expected="the ranks save and end; resume continues",
        status=KILLED,
    ),
    Fault(
        name="preempt",
        action="SIGUSR1 or SIGTERM to the launcher",
        expected="the ranks save; exit 75; resume continues",
        status=STOPPED,
    ),
    Fault(
        name="disk",
        action="fills the disk; after some more steps SIGKILL to all",
        expected="no torn checkpoint counts as complete; resume continues from the last good one",
        status=KILLED,
        checkpoints=1,
    ),
    Fault(
        name="damage",
        action="SIGKILL to all, then flips bits in a file of the last checkpoint",
        expected="resume reports the damage, and continues from the checkpoint before",
        status=KILLED,
        checkpoints=2,
    ),
    Fault(
        name="clock",
        action="sets the clock of a rank, or of all, an hour forward or back",
        expected="the training continues",
        starts=1,
    ),
    Fault(
        name="clock-stop",
        action="sets a clock like clock, then SIGSTOP to a rank",
        expected="as for stop",
        ranks=2,
    ),
    Fault(
        name="flip-weight",
        action="flips a bit of a weight of a rank",
        expected="guard finds the rank; all ranks start again from the last checkpoint",
        flips="weight",
    ),
    Fault(
        name="flip-gradient",
        action="flips a bit of a gradient of a rank, after the all-reduce",
        expected="as for flip-weight, if the plan has replicas",
        flips="gradient",
    ),
    Fault(
        name="flip-activation",
        action="flips a bit of the output of the model on a rank",
        expected="as for flip-weight, if the loss changes and guard computes it twice",
        flips="activation",
    ),
    Fault(
        name="flip-data",
        action="flips a bit of a batch of a rank",
        expected="as for flip-activation",
        flips="data",
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, kw_only=True)
class FaultMoment:
    """When a fault happens, and to which rank."""

    fault: Fault
    step: int  # the fault happens after this number of steps
    share: float  # of a step, that the fault happens later
    rank: int
    seed: int  # of the fault's other random choices

    @property
    def rng(self) -> random.Random:
        return random.Random(self.seed)


def select_faults(names: str | None) -> list[Fault]:
    """Return the faults of a comma-separated list; None: all. Raises SpecError for an unknown name."""
    selected = [name.strip() for name in names.split(",")] if names is not None else list(BY_NAME)
    if unknown := [name for name in selected if name not in BY_NAME]:
        raise SpecError(f"unknown fault {unknown[0]!r}{suggest(unknown[0], BY_NAME)}")
    return [fault for fault in FAULTS if fault.name in selected]


def choose_save_every(steps: int) -> int:
    """Return the steps between checkpoints, so that some are before and after each fault.

    Raises SpecError if there are too few steps."""
    if steps < MIN_STEPS:
        raise SpecError(
            f"a drill disturbs a training in its middle and requires at least {MIN_STEPS} steps, "
            f"got --steps {steps}"
        )
    return min(3, (steps - 2) // 5)


def schedule_faults(
    faults: Iterable[Fault], seed: int, rounds: int, steps: int, ranks: int
) -> list[FaultMoment]:
    """Return a moment for each fault and round. It does not depend on which other faults are selected."""
    return [
        _draw_moment(fault, f"{seed} {number} {fault.name}", steps, ranks)
        for number in range(rounds)
        for fault in faults
    ]


def _draw_moment(fault: Fault, seed: str, steps: int, ranks: int) -> FaultMoment:
    """Return a moment with two checkpoints begun before it and room for two after it.

    Until two steps are done, ranks wait long for one another."""
    rng, every = random.Random(seed), choose_save_every(steps)
    return FaultMoment(
        fault=fault,
        step=rng.randint(2 * every + 1, steps - 2 * every - 1),
        share=rng.random(),
        rank=rng.randrange(ranks),
        seed=rng.getrandbits(32),
    )
