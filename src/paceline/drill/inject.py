"""The actions of each fault on a training, and the repairs before the run resumes."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.drill import clock
from paceline.drill.connections import cut_connections
from paceline.drill.disk import SmallDisk
from paceline.drill.faults import FaultMoment, choose_save_every
from paceline.drill.training import SLOW_STEP_S, STEP_S, Training, UnexpectedCourse
from paceline.units import several

HOUR_S = 3600.0
DELAY_SHARE, CLOCK_SHARE = 0.3, 1.5  # of the timeout
HEARTBEAT_S = 1.5  # in which each rank has reported its new time
FLIPPED_BYTES = 8


class UntriedFault(Exception):
    """The fault cannot be caused on this machine or in this training."""


@dataclass
class FaultContext:
    """A training at the moment of its fault, and what the fault needs."""

    training: Training
    moment: FaultMoment
    steps: int
    timeout_s: float
    clock: Path | None = None  # folder of clock.install_clock
    disk: SmallDisk | None = None

    @property
    def rank(self) -> psutil.Process:
        ranks = self.training.find_ranks()
        if self.moment.rank not in ranks:
            raise UnexpectedCourse(
                f"rank {self.moment.rank} ended before its fault; last output: {self.training.last_line()}"
            )
        return ranks[self.moment.rank]


def kill_rank(context: FaultContext) -> str:
    context.rank.kill()
    return "SIGKILL"


def stop_rank(context: FaultContext) -> str:
    context.rank.suspend()
    return "SIGSTOP"


def delay_rank(context: FaultContext) -> str:
    rank, seconds = context.rank, DELAY_SHARE * context.timeout_s
    rank.suspend()
    context.training.wait(seconds)
    rank.resume()
    return f"for {seconds:.1f} s"


def isolate_rank(context: FaultContext) -> str:
    rank = context.rank
    others = [process for process in context.training.find_ranks().values() if process != rank]
    try:
        count = cut_connections(rank, others)
    except OSError as error:
        raise UntriedFault(
            f"the connections of another process cannot be shut down here: {error.strerror}"
        ) from error
    if not count:
        raise UntriedFault("the ranks have no TCP connections to each other")
    return several(count, "connection")


def kill_launcher(context: FaultContext) -> str:
    context.training.process.kill()
    return "SIGKILL"


def preempt(context: FaultContext) -> str:
    number = context.moment.rng.choice([signal.SIGUSR1, signal.SIGTERM])
    context.training.process.send_signal(number)
    return number.name


def fill_disk(context: FaultContext) -> str:
    """Fill the disk, let the training attempt two more checkpoints, and kill all processes."""
    assert context.disk is not None
    context.disk.fill()
    context.training.set_pace(STEP_S)
    context.training.wait_for_step(context.moment.step + 2 * choose_save_every(context.steps), checkpoints=0)
    context.training.kill_all()
    return "full"


def empty_disk(context: FaultContext) -> None:
    """Make room. Raises UnexpectedCourse if a checkpoint that counts as complete is torn."""
    from paceline.training.checkpoint.index import read_index
    from paceline.training.checkpoint.integrity import verify_files

    assert context.disk is not None
    run = context.training.run
    for path in map(run.checkpoint, run.checkpoints()):
        if damage := verify_files(path, read_index(path)):
            raise UnexpectedCourse(f"{path} counts as complete but is torn: {damage}")
    context.disk.empty()


def kill_all(context: FaultContext) -> str:
    context.training.kill_all()
    return "SIGKILL to all"


def flip_bits(context: FaultContext) -> str:
    """Flip a bit in some bytes of one file of the last checkpoint."""
    rng, run = context.moment.rng, context.training.run
    last = run.checkpoint(run.checkpoints()[-1])
    path = rng.choice(sorted(last.iterdir()))
    content = bytearray(path.read_bytes())
    for position in rng.sample(range(len(content)), min(FLIPPED_BYTES, len(content))):
        content[position] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{last.name}/{path.name}"


def shift_clock(context: FaultContext) -> str:
    """Shift a clock, and train until everything that reads a clock has read it."""
    seconds = CLOCK_SHARE * context.timeout_s
    context.training.set_pace(seconds / (context.steps - context.moment.step - 1))
    done = _shift_random_clock(context)
    context.training.wait(seconds)
    return done


def shift_clock_and_stop(context: FaultContext) -> str:
    # On a busy machine this process may be late, and the training must not end before it stops the rank.
    pace = 2 * HEARTBEAT_S / (context.steps - context.moment.step - 1)
    context.training.set_pace(max(pace, SLOW_STEP_S))
    done = _shift_random_clock(context)
    context.training.wait(HEARTBEAT_S)
    context.rank.suspend()
    return done


def _shift_random_clock(context: FaultContext) -> str:
    assert context.clock is not None
    rng = context.moment.rng
    target = rng.choice([*map(str, context.training.find_ranks()), clock.ALL])
    by_s = rng.choice([HOUR_S, -HOUR_S])
    clock.set_clock(context.clock, target, by_s)
    return f"{'+' if by_s > 0 else '−'}1 h, {'all' if target == clock.ALL else f'rank {target}'}"


# By name of the fault. Each function returns what exactly it did, for people.
INJECT: dict[str, Callable[[FaultContext], str]] = {
    "kill": kill_rank,
    "stop": stop_rank,
    "delay": delay_rank,
    "cut": isolate_rank,
    "launcher": kill_launcher,
    "preempt": preempt,
    "disk": fill_disk,
    "damage": kill_all,
    "clock": shift_clock,
    "clock-stop": shift_clock_and_stop,
}
REPAIR: dict[str, Callable[[FaultContext], str | None]] = {"damage": flip_bits, "disk": empty_disk}
