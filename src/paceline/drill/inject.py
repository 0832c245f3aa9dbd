"""What each fault does to a training, and what is to be done before it can go on."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.drill import clock
from paceline.drill.connections import cut
from paceline.drill.disk import SmallDisk
from paceline.drill.faults import FaultMoment, save_every
from paceline.drill.training import STEP_S, Training, UnexpectedCourse
from paceline.units import several

HOUR_S = 3600.0
DELAY, CLOCK = 0.3, 1.5  # of the timeout
BEATS_S = 1.5  # in which each rank has told its new time
FLIPPED = 8  # bytes


class UntriedFault(Exception):
    """A fault that cannot be made here."""


@dataclass
class FaultContext:
    """A training at its moment, and what its fault needs besides."""

    training: Training
    moment: FaultMoment
    steps: int
    timeout_s: float
    clock: Path | None = None  # folder of clock.settable
    disk: SmallDisk | None = None

    @property
    def rank(self) -> psutil.Process:
        ranks = self.training.ranks()
        if self.moment.rank not in ranks:
            raise UnexpectedCourse(
                f"rank {self.moment.rank} was gone before its fault; it said: {self.training.said()}"
            )
        return ranks[self.moment.rank]


def kill(scene: FaultContext) -> str:
    scene.rank.kill()
    return "SIGKILL"


def stop(scene: FaultContext) -> str:
    scene.rank.suspend()
    return "SIGSTOP"


def delay(scene: FaultContext) -> str:
    rank, seconds = scene.rank, DELAY * scene.timeout_s
    rank.suspend()
    scene.training.until_late(seconds)
    rank.resume()
    return f"for {seconds:.1f} s"


def cut_off(scene: FaultContext) -> str:
    one = scene.rank
    others = [process for process in scene.training.ranks().values() if process != one]
    try:
        count = cut(one, others)
    except OSError as error:
        raise UntriedFault(
            f"the connections of another process cannot be shut down here: {error.strerror}"
        ) from error
    if not count:
        raise UntriedFault("the ranks have no TCP connections to each other")
    return several(count, "connection")


def kill_launcher(scene: FaultContext) -> str:
    scene.training.process.kill()
    return "SIGKILL"


def preempt(scene: FaultContext) -> str:
    number = scene.moment.draws.choice([signal.SIGUSR1, signal.SIGTERM])
    scene.training.process.send_signal(number)
    return number.name


def fill_disk(scene: FaultContext) -> str:
    """So many steps longer that two checkpoints are tried to be written."""
    assert scene.disk is not None
    scene.disk.fill()
    scene.training.pace(STEP_S)
    scene.training.until_step(scene.moment.step + 2 * save_every(scene.steps), checkpoints=0)
    scene.training.kill_all()
    return "full"


def make_room(scene: FaultContext) -> None:
    """No checkpoint that counts as complete may be torn."""
    from paceline.training.checkpoint.save import read_index, verify

    assert scene.disk is not None
    run = scene.training.run
    for path in map(run.checkpoint, run.checkpoints()):
        if torn := verify(path, read_index(path)):
            raise UnexpectedCourse(f"{path} counts as complete, and is torn: {torn}")
    scene.disk.empty()


def kill_all(scene: FaultContext) -> str:
    scene.training.kill_all()
    return "SIGKILL to all"


def flip_bits(scene: FaultContext) -> str:
    """Some bytes of one file of the last checkpoint."""
    draws, run = scene.moment.draws, scene.training.run
    last = run.checkpoint(run.checkpoints()[-1])
    path = draws.choice(sorted(last.iterdir()))
    content = bytearray(path.read_bytes())
    for at in draws.sample(range(len(content)), min(FLIPPED, len(content))):
        content[at] ^= 1 << draws.randrange(8)
    path.write_bytes(content)
    return f"{last.name}/{path.name}"


def skew(scene: FaultContext) -> str:
    """And let it go on for so long that whatever looks at a clock has looked."""
    seconds = CLOCK * scene.timeout_s
    scene.training.pace(seconds / (scene.steps - scene.moment.step - 1))
    done = _set_a_clock(scene)
    scene.training.until_late(seconds)
    return done


def skew_and_stop(scene: FaultContext) -> str:
    scene.training.pace(2 * BEATS_S / (scene.steps - scene.moment.step - 1))
    done = _set_a_clock(scene)
    scene.training.until_late(BEATS_S)
    scene.rank.suspend()
    return done


def _set_a_clock(scene: FaultContext) -> str:
    assert scene.clock is not None
    draws = scene.moment.draws
    whose, by_s = (
        draws.choice([*map(str, scene.training.ranks()), clock.ALL]),
        draws.choice([HOUR_S, -HOUR_S]),
    )
    clock.set_clock(scene.clock, whose, by_s)
    return f"{'+' if by_s > 0 else '−'}1 h, {'all' if whose == clock.ALL else f'rank {whose}'}"


DISTURB: dict[str, Callable[[FaultContext], str]] = {  # what exactly was done, for people
    "kill": kill,
    "stop": stop,
    "delay": delay,
    "cut": cut_off,
    "launcher": kill_launcher,
    "preempt": preempt,
    "disk": fill_disk,
    "damage": kill_all,
    "clock": skew,
    "clock-stop": skew_and_stop,
}
REPAIR: dict[str, Callable[[FaultContext], str | None]] = {"damage": flip_bits, "disk": make_room}
