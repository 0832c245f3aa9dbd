"""Collect the rows and notes of a bench into a Result, also when Ctrl-C ends the bench early."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from paceline.bench.result import Result, Row

BUSY_SHARE = 0.1  # share of the machine that other programs may use before a note reports it
INTERRUPTED_NOTE = "interrupted: the rows show what was measured until then"


@dataclass(frozen=True)
class CollectedResult:
    """A result, and whether Ctrl-C ended its bench early."""

    result: Result
    interrupted: bool = False


def collect(
    kind: str,
    keys: tuple[str, ...],
    settings: Mapping[str, Any],
    source: Iterable[Row | str],
    watch: Callable[[Row], object] = lambda row: None,
    summarize: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: (),
) -> CollectedResult:
    """Return the result of a bench.

    source: yields rows, and strings that report what was left out and why.
    watch: called with each row as soon as it is measured.
    summarize: makes the summary of the result from all rows.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    interrupted = False
    others = OtherPrograms()
    try:
        for item in source:
            if isinstance(item, str):
                notes.append(item)
            else:
                rows.append(dict(item))
                watch(item)
    except KeyboardInterrupt:
        interrupted = True
        notes.append(INTERRUPTED_NOTE)
    notes += others.notes()
    summary = tuple(dict(row) for row in summarize(rows))
    result = Result(
        kind=kind, keys=keys, settings=dict(settings), rows=tuple(rows), summary=summary, notes=tuple(notes)
    )
    return CollectedResult(result, interrupted)


class OtherPrograms:
    """The CPU time that other programs use on this machine, from the creation of this object."""

    def __init__(self) -> None:
        self._start, self._busy_s, self._own_s = time.perf_counter(), cpu_busy_s(), _own_cpu_s()

    def notes(self) -> list[str]:
        """Return a note if other programs used more than BUSY_SHARE of the machine, else nothing."""
        own_s = _own_cpu_s() - self._own_s
        share = (cpu_busy_s() - self._busy_s - own_s) / (
            (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        )
        if share < BUSY_SHARE:
            return []
        return [
            f"other programs used {min(share, 1.0):.0%} of this machine during the measurement; "
            "an idle machine reaches higher rates"
        ]


def cpu_busy_s() -> float:
    """Return the busy CPU seconds of all cores, including what a hypervisor took from them (steal)."""
    times = psutil.cpu_times()._asdict()
    return sum(
        seconds for name, seconds in times.items() if name not in ("idle", "iowait", "guest", "guest_nice")
    )


def _own_cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
