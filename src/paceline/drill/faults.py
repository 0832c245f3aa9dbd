"""The faults of a drill as a table, and whom they hit when: a pure function of the seed."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.launch.signals import STOPPED
from paceline.spec import nearest

KILLED = -9  # exit status
LEAST = 8  # steps, so that there is a middle


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    does: str
    follows: str  # what must
    starts: int = 2  # of the ranks, that the training takes in all
    status: int = 0  # of the command that is disturbed; another one than 0 is resumed by hand
    ranks: int = 1  # that it takes
    checkpoints: int = 0  # complete ones that there must be before


FAULTS = (
    Fault(name="kill", does="SIGKILL to a rank", follows="all ranks start again from the last checkpoint"),
    Fault(
        name="stop",
        does="SIGSTOP to a rank",
        follows="the others give up after the timeout; all ranks start again",
        ranks=2,
    ),
    Fault(
        name="delay",
        does="SIGSTOP to a rank, SIGCONT before the timeout",
        follows="the training goes on",
        starts=1,
    ),
    Fault(
        name="cut",
        does="closes the connections of a rank to the others",
        follows="all ranks start again",
        ranks=2,
    ),
    Fault(
        name="launcher",
        does="SIGKILL to the launcher",
        follows="the ranks save and end; resume goes on",
        status=KILLED,
    ),
    Fault(
        name="preempt",
        does="SIGUSR1 or SIGTERM to the launcher",
        follows="the ranks save; exit 75; resume goes on",
        status=STOPPED,
    ),
    Fault(
        name="disk",
        does="fills the disk; after some more steps SIGKILL to all",
        follows="no torn checkpoint is believed; with room again, resume goes on from the last good one",
        status=KILLED,
        checkpoints=1,
    ),
    Fault(
        name="damage",
        does="SIGKILL to all, then flips bits of a file of the last checkpoint",
        follows="resume says that it is damaged, and goes on from the one before",
        status=KILLED,
        checkpoints=2,
    ),
    Fault(
        name="clock",
        does="sets the clock of a rank, or of all, an hour forward or back",
        follows="the training goes on",
        starts=1,
    ),
    Fault(name="clock-stop", does="sets a clock so, then SIGSTOP to a rank", follows="as for stop", ranks=2),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, kw_only=True)
class FaultMoment:
    """When a fault hits, and whom."""

    fault: Fault
    step: int  # after so many are done
    share: float  # of a step, later
    rank: int
    seed: int  # of what else is drawn

    @property
    def draws(self) -> random.Random:
        return random.Random(self.seed)


def chosen(names: str | None) -> list[Fault]:
    """Of a list with commas; None: all. Raises SpecError."""
    asked = [name.strip() for name in names.split(",")] if names is not None else list(BY_NAME)
    if unknown := [name for name in asked if name not in BY_NAME]:
        raise SpecError(f"there is no fault {unknown[0]!r}{nearest(unknown[0], BY_NAME)}")
    return [fault for fault in FAULTS if fault.name in asked]


def save_every(steps: int) -> int:
    """Steps between checkpoints, so that there are some before each moment and after it. Raises SpecError."""
    if steps < LEAST:
        raise SpecError(
            f"a drill hits a training in its middle and takes {LEAST} steps at least, got --steps {steps}"
        )
    return min(3, (steps - 2) // 5)


def schedule(faults: Iterable[Fault], seed: int, rounds: int, steps: int, ranks: int) -> list[FaultMoment]:
    """Each fault once a round. What hits when does not depend on which other faults there are."""
    return [
        _moment(fault, f"{seed} {at} {fault.name}", steps, ranks) for at in range(rounds) for fault in faults
    ]


def _moment(fault: Fault, seed: str, steps: int, ranks: int) -> FaultMoment:
    """With two checkpoints begun before it, and room for two after it. (Until two steps are done, ranks wait long for one another.)"""
    draws, every = random.Random(seed), save_every(steps)
    return FaultMoment(
        fault=fault,
        step=draws.randint(2 * every + 1, steps - 2 * every - 1),
        share=draws.random(),
        rank=draws.randrange(ranks),
        seed=draws.getrandbits(32),
    )
