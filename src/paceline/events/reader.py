"""Read a file of events from a position onwards, also while it grows."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import RunError
from paceline.events.kinds import Event, Started, Step
from paceline.events.lines import BLOCK_BYTES, MAX_LINE_BYTES, Skipped, is_all_steps, is_step, split_at_others

MAX_PARSED_BYTES = 2**23  # if only a sample of the steps is needed, files up to this size are parsed whole
# after each start: these steps are slower than others, so they represent only themselves
NUM_SINGLE_STEPS = 8


class EventReader:
    """An incremental reader of a file of events, in bounded memory.

    Each call of `new` or `sampled` reads what was appended since the last call.
    An incomplete last line is left for the next call. `skipped` counts unusable lines. A file that has become
    shorter was replaced: it is then read from its beginning, and `restarts` counts these cases.
    """

    def __init__(self, path: Path, position: int = 0):
        self.path, self.position = path, position
        self.skipped = Skipped()
        self.restarts = 0
        self._in_long_line = False

    def new(self, *kinds: type[Event]) -> Iterator[Event]:
        """Yield the events since the last call, of these kinds or of all. Unwanted steps are not parsed."""
        wants_steps = not kinds or Step in kinds
        for block in self.blocks():
            if not wants_steps and is_all_steps(block):
                continue
            for line in block.split(b"\n")[:-1]:
                if not wants_steps and is_step(line):
                    continue
                event = self.skipped.parse(line)
                if event is not None and (not kinds or isinstance(event, kinds)):
                    yield event

    def sampled(self) -> Iterator[tuple[Event, int]]:
        """Yield the events since the last call, each with the number of steps that it represents.

        That number is 0 for an event that is not a step.
        Up to MAX_PARSED_BYTES, every event is parsed. Of a longer file, evenly spaced steps of about that
        size are parsed. The first steps of each start, the last step and all other events are always parsed.
        """
        every = max(1, -(-self._size() // MAX_PARSED_BYTES))
        due = 0  # number of following steps that are parsed in any case
        pending, last = 0, b""  # steps since the last parsed step, and the line of the latest of them

        def flush() -> Iterator[tuple[Event, int]]:
            nonlocal pending
            event = self.skipped.parse(last) if pending else None
            if event is not None:
                yield event, pending
            pending = 0 if event is not None else max(0, pending - 1)  # the next event represents the rest

        for block in self.stretches():
            if every > 1 and not due and (count := is_all_steps(block)):
                picks = (pending + count) // every
                begin = 0
                for pick in range(picks):
                    end = block.rfind(b"\n", 0, (pick + 1) * len(block) // picks) + 1
                    if end > begin:
                        pending += block.count(b"\n", begin, end)
                        last = block[block.rfind(b"\n", 0, end - 1) + 1 : end - 1]
                        yield from flush()
                        begin = end
                if begin < len(block):
                    pending += block.count(b"\n", begin)
                    last = block[block.rfind(b"\n", 0, len(block) - 1) + 1 : -1]
                continue
            for line in block.split(b"\n")[:-1]:
                if is_step(line):
                    pending, last = pending + 1, line
                    if pending >= every or due:
                        due = max(0, due - 1)
                        yield from flush()
                    continue
                event = self.skipped.parse(line)
                if isinstance(event, Step):  # in the format of another program
                    yield from flush()
                    yield event, 1
                elif event is not None:
                    if isinstance(event, Started):
                        yield from flush()
                        pending, due = 0, NUM_SINGLE_STEPS
                    yield event, 0
        yield from flush()

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return max(0, self.path.stat().st_size - self.position)
        return 0

    def has_incomplete_line(self) -> bool:
        """Return whether the file continues after the lines that were read: with a part of a line."""
        return self._size() > 0

    def stretches(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, each either of steps only or, mostly, a line that is not a step."""
        for block in self.blocks():
            yield from split_at_others(block)

    def blocks(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, of about BLOCK_BYTES each; `position` is then the end of the block.

        A line longer than MAX_LINE_BYTES counts as damaged and is never held in memory.
        """
        try:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.position:
                self.position, self._in_long_line, self.skipped = 0, False, Skipped()
                self.restarts += 1
            file.seek(self.position)
            rest = b""
            while piece := file.read(BLOCK_BYTES):
                if self._in_long_line:
                    newline = piece.find(b"\n")
                    self.position += len(piece) if newline < 0 else newline + 1
                    piece = piece[newline + 1 :] if newline >= 0 else b""
                    self._in_long_line = newline < 0
                end = piece.rfind(b"\n") + 1
                if not end:
                    rest += piece
                    if len(rest) > MAX_LINE_BYTES:
                        self.skipped.damaged += 1
                        self.position += len(rest)
                        rest, self._in_long_line = b"", True
                    continue
                block = rest + piece[:end] if rest else piece[:end]
                rest = piece[end:]
                self.position += len(block)
                yield block


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise RunError if the file exists and the code in the context cannot read it."""
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"cannot read {path}: it is not a regular file; move it away")
        yield
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error


def read(path: Path, position: int = 0) -> Iterator[Event]:
    """Yield the events so far, from a position in bytes. Unusable lines are skipped."""
    return EventReader(path, position).new()


def follow(path: Path, done: Callable[[], bool], position: int = 0, poll_s: float = 0.1) -> Iterator[Event]:
    """Yield events as they are written, from a position in bytes, until `done()` is true and all is read."""
    reader = EventReader(path, position)
    while True:
        is_last = done()
        yield from reader.new()
        if is_last:
            return
        time.sleep(poll_s)
