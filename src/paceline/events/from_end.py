"""Read the last events of a file without reading all of it."""

import os
from collections.abc import Container, Iterator
from pathlib import Path

from paceline.events.kinds import Event, Step
from paceline.events.lines import BLOCK_BYTES, MAX_LINE_BYTES, Skipped, is_all_steps, is_step
from paceline.files import end_of_lines

MAX_TAIL_STEPS = 64  # steps that `tail` parses


def last(
    path: Path,
    *kinds: type[Event],
    until: Container[type[Event]] = (),
    begin: int = 0,
    before: int | None = None,
) -> list[Event]:
    """Return the last event of each of these kinds, in the order of the file, which is read from its end.

    until: a subset of `kinds`; the search ends at the first event of them that it finds.
    begin, before: positions in bytes at which lines begin; only the lines between them are searched.
    """
    skipped = Skipped()
    wanted = {f'"{kind.__name__.lower()}"'.encode(): kind for kind in kinds}
    events: list[Event] = []
    for _, block in _blocks_back(path, begin, before, skipped):
        if Step not in kinds and is_all_steps(block):
            continue
        position = len(block)
        while wanted and (position := max(block.rfind(mark, 0, position) for mark in wanted)) >= 0:
            line = block.rfind(b"\n", 0, position) + 1
            event = skipped.parse(block[line : block.find(b"\n", position)])
            if event is not None and type(event) in wanted.values():
                events.append(event)
                wanted = {mark: kind for mark, kind in wanted.items() if kind is not type(event)}
                if type(event) in until:
                    wanted = {}
            position = line
        if not wanted:
            break
    return events[::-1]


def _blocks_back(path: Path, first: int, before: int | None, skipped: Skipped) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the lines of blocks of about BLOCK_BYTES, from the end of a file to `first`.

    Lines longer than MAX_LINE_BYTES are counted as damaged.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        begin, rest, is_too_long = end_of_lines(file) if before is None else before, b"", False
        size = min(2**16, BLOCK_BYTES)
        while begin > first:
            end, begin, size = begin, max(first, begin - size), BLOCK_BYTES
            piece = os.pread(file, end - begin, begin)
            cut = (
                piece.find(b"\n", 0, len(piece) - (not rest and not is_too_long)) + 1 if begin > first else 0
            )
            if begin > first and not cut:
                rest = piece + rest
                if is_too_long or len(rest) > MAX_LINE_BYTES:
                    rest, is_too_long = b"", True
                continue
            block = piece[cut:] + rest
            if is_too_long:
                block, is_too_long = block[: block.rfind(b"\n") + 1], False
                skipped.damaged += 1
            rest = piece[:cut]
            if block:
                yield begin + cut, block
    finally:
        os.close(file)


def tail(path: Path, skipped: Skipped, size: int = 2**16) -> tuple[int, list[Event]]:
    """Return the last events of about `size` bytes, and the position in bytes of the first of them.

    At most MAX_TAIL_STEPS steps are returned. `skipped` counts unusable lines. At most 4 MiB are read.
    """
    events: list[Event] = []
    steps = 0
    position = last_line = end(path)
    for at, block in _blocks_back(path, 0, position, skipped):
        position = at + len(block)
        for line in reversed(block.split(b"\n")[:-1]):
            position -= len(line) + 1
            is_one_step = is_step(line)
            steps += is_one_step
            if is_one_step and steps > MAX_TAIL_STEPS:
                size -= len(line)
            elif (event := skipped.parse(line)) is not None:
                events.append(event)
                size -= len(line)
            if size <= 0 or last_line - position > 2**22:
                return position, events[::-1]
    return position, events[::-1]


def end(path: Path) -> int:
    """Return the position in bytes after the last whole line."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return end_of_lines(file)
    finally:
        os.close(file)
