"""Named ranges of time on a thread: steps, micro-batches, phases, blocks."""

import re
from collections.abc import Callable
from typing import Any

import torch

from paceline.doctor.heartbeat import BACKWARD, FORWARD
from paceline.parallel.pipeline.actions import StageAction

# Kinds of ranges, the outer ones first. Each closes open ranges of its own kind and of the kinds inside it.
KINDS = STEP, MICROBATCH, PHASE = "step", "micro-batch", "phase"
BLOCK, ACTION = "block", "action"  # these are opened and closed by calls
PREFIX = "paceline/"  # of the names in torch's profiler

ACTION_NAME = re.compile(r"(.+) of micro-batch (\d+) on stage (\d+)")

# (kind, name) -> what closes the range
OpenRange = Callable[[str, str], Callable[[], None]]


def open_profiler_range(kind: str, name: str) -> Callable[[], None]:
    """Open a range in torch's profiler, and return what closes it. `parse_range` reads its name."""
    opened: Any = torch.autograd.profiler.record_function(f"{PREFIX}{kind}/{name}")
    opened.__enter__()
    return lambda: opened.__exit__(None, None, None)


def parse_range(text: str) -> tuple[str, str] | None:
    """Return kind and name of a range in torch's profiler; None for other operations."""
    if not text.startswith(PREFIX):
        return None
    kind, _, name = text.removeprefix(PREFIX).partition("/")
    return kind, name


def name_action(action: StageAction) -> str:
    """Return the name of the range of an action of a pipeline; `parse_action` reads it."""
    return f"{action.what} of micro-batch {action.microbatch} on stage {action.stage}"


def parse_action(name: str) -> StageAction:
    """Return the action of a pipeline of a range of kind ACTION."""
    match = ACTION_NAME.fullmatch(name)
    assert match is not None
    return StageAction(match[1], int(match[2]), int(match[3]))


class RangeStack:
    """The open ranges of the training thread: a step, a micro-batch in it, a phase in that."""

    def __init__(self, open_range: OpenRange):
        self._open_range = open_range
        self._open: list[tuple[str, Callable[[], None]]] = []  # kind, and what closes it

    def begin_step(self, step: int) -> None:
        self._begin(STEP, f"step {step}")

    def begin_microbatch(self, index: int) -> None:
        self._begin(MICROBATCH, f"micro-batch {index}")

    def begin_phase(self, phase: str) -> None:
        if phase not in (FORWARD, BACKWARD):
            self._close(MICROBATCH)
        self._begin(PHASE, phase)

    def close(self) -> None:
        """Close all ranges."""
        self._close(STEP)

    def _begin(self, kind: str, name: str) -> None:
        self._close(kind)
        self._open.append((kind, self._open_range(kind, name)))

    def _close(self, kind: str) -> None:
        inner = KINDS[KINDS.index(kind) :]
        while self._open and self._open[-1][0] in inner:
            self._open.pop()[1]()
