"""Contenders in processes of their own that take turns: each waits at its gate before a block of steps."""

import contextlib
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RANKS = 2
START_TIMEOUT_S = 300


class Gate:
    """The gate at which a process waits for its turn, once per step; the variable GATE names its socket."""

    def __init__(self) -> None:
        self.remaining, self.start = 0, (0.0, 0.0)
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(os.environ["GATE"])

    def __call__(self) -> None:
        if not self.remaining:
            wall_s, cpu_s = (now - start for now, start in zip(self.now(), self.start, strict=True))
            self.line.sendall(f"{wall_s} {cpu_s}\n".encode())
            count = self.line.recv(64)
            if not count:  # the benchmark has ended
                os._exit(0)
            self.remaining = int(count)
            self.start = self.now()
        self.remaining -= 1

    def now(self) -> tuple[float, float]:
        """Return wall time and CPU time, in seconds."""
        return time.perf_counter(), time.process_time()


gate = cache(Gate)


class NotStartedError(Exception):
    """A contender ended before its first step, or did not reach it in time."""


@dataclass(frozen=True)
class Block:
    """Times per step of a block."""

    step_s: float
    cpu_s: float  # over both ranks
    other_share: float  # share of the machine that other programs used


class Contender:
    """The processes of one contender, each waiting at its gate.

    command: arguments of Python. block: steps of a turn.
    """

    def __init__(self, name: str, command: Sequence[str], block: int, folder: Path):
        self.name, self.block = name, block
        path, self.errors = folder / "gate", folder / "stderr"
        with socket.socket(socket.AF_UNIX) as gate, open(self.errors, "wb") as errors:
            gate.bind(str(path))
            gate.listen()
            gate.settimeout(1)
            # torchrun sets the same number of threads, with a warning.
            environ = os.environ | {"GATE": str(path), "OMP_NUM_THREADS": "1"}
            self.launcher = subprocess.Popen(
                [sys.executable, *command], env=environ, stdout=subprocess.DEVNULL, stderr=errors
            )
            try:
                self.lines = [self._accept(gate).makefile("rw") for _ in range(RANKS)]
                for line in self.lines:
                    if not line.readline():  # a line reports that the first step was reached
                        raise NotStartedError
            except NotStartedError:
                self.end()
                raise NotStartedError(
                    find_reason(self.errors.read_text(errors="replace"))
                    or f"no first step within {START_TIMEOUT_S} s"
                ) from None

    def _accept(self, gate: socket.socket) -> socket.socket:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.launcher.poll() is None:
            with contextlib.suppress(TimeoutError):
                return gate.accept()[0]
        raise NotStartedError

    def run_block(self) -> Block:
        from machine import LoadMeter

        load = LoadMeter()
        try:
            for line in self.lines:
                line.write(str(self.block))
                line.flush()
            times = [[float(word) for word in line.readline().split()] for line in self.lines]
        except OSError:
            times = [[]]
        if not all(times):
            sys.exit(f"{self.name} has ended: {find_reason(self.errors.read_text(errors='replace'))}")
        wall_s, cpu_s = max(wall for wall, _ in times), sum(cpu for _, cpu in times)
        return Block(wall_s / self.block, cpu_s / self.block, load.other_share(cpu_s))

    def end(self) -> None:
        import psutil

        for process in [self.launcher, *psutil.Process(self.launcher.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait()


def find_reason(errors: str) -> str:
    """Return the first line of standard error that names an exception, or else the last lines."""
    text = errors.strip()
    exceptions = [
        line for line in text.splitlines() if re.match(r"(\[\w+\]:)?(\w+\.)*\w*(Error|Exception)\b", line)
    ]
    return exceptions[0] if exceptions else text[-500:]


@contextlib.contextmanager
def start_contender(name: str, command: Sequence[str], block: int) -> Iterator[Contender]:
    """Start a contender. `FOLDER` in its command becomes a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("FOLDER", folder) for word in command]
        contender = Contender(name, words, block, Path(folder))
        try:
            yield contender
        finally:
            contender.end()


def measure(
    commands: Mapping[str, Sequence[str]], required: Sequence[str], block: int, rounds: int, tries: int
) -> dict[str, list[Block]]:
    """Return the blocks of each contender, round by round. Each round has another random order.

    commands: of each contender, as for `start_contender`. A contender that does not start is left out, unless
    it is required. tries: attempts for a block that other programs disturb.
    """
    from machine import MAX_OTHER_SHARE

    with contextlib.ExitStack() as running:
        contenders: dict[str, Contender] = {}
        for name, command in commands.items():
            try:
                contenders[name] = running.enter_context(start_contender(name, command, block))
            except NotStartedError as error:
                if name in required:
                    sys.exit(f"{name} did not start: {error}")
                print(f"{name} is left out because it does not start: {error}")
        blocks: dict[str, list[Block]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.run_block()  # warm-up
        for round_index in range(rounds):
            for name in random.Random(round_index).sample(list(contenders), len(contenders)):
                for attempt in range(tries):
                    found = contenders[name].run_block()
                    if found.other_share < MAX_OTHER_SHARE:
                        break
                    if attempt + 1 < tries:
                        time.sleep(1)
                blocks[name].append(found)
    return blocks


def count_disturbed(blocks: Mapping[str, Sequence[Block]]) -> tuple[int, int]:
    """Return the number of blocks that other programs disturbed, and of all blocks."""
    from machine import MAX_OTHER_SHARE

    all_blocks = [block for of_contender in blocks.values() for block in of_contender]
    return sum(block.other_share >= MAX_OTHER_SHARE for block in all_blocks), len(all_blocks)


def describe_ratio(other: Sequence[Block], own: Sequence[Block]) -> str:
    """Return the median and the quartiles of the ratios of the rounds: above 1, `own` is faster."""
    ratios = [a.step_s / b.step_s for a, b in zip(other, own, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} ({low:.3f}–{high:.3f})"
