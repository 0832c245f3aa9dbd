"""Rows and remarks as they come, made into a Result; also when Ctrl-C ends them early."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from paceline.bench.result import Result, Row

BUSY = 0.1  # share of a machine that other programs may take, unremarked


@dataclass(frozen=True)
class CollectedResult:
    result: Result
    interrupted: bool = False


def gather(
    kind: str,
    keys: tuple[str, ...],
    settings: Mapping[str, Any],
    source: Iterable[Row | str],
    watch: Callable[[Row], object] = lambda row: None,
    conclude: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: (),
) -> CollectedResult:
    """`source`: rows, and as strings what was left out and why. `watch` sees each row when it is there; `conclude` makes the summary."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    interrupted = False
    others = OtherPrograms()
    try:
        for found in source:
            if isinstance(found, str):
                notes.append(found)
            else:
                rows.append(dict(found))
                watch(found)
    except KeyboardInterrupt:
        interrupted = True
        notes.append("interrupted: this is what was measured until then")
    notes += others.remark()
    summary = tuple(dict(row) for row in conclude(rows))
    result = Result(
        kind=kind, keys=keys, settings=dict(settings), rows=tuple(rows), summary=summary, notes=tuple(notes)
    )
    return CollectedResult(result, interrupted)


class OtherPrograms:
    """What other programs take of this machine, from now on."""

    def __init__(self) -> None:
        self._began, self._busy_s, self._own_s = time.perf_counter(), busy_s(), _own_s()

    def remark(self) -> list[str]:
        own_s = _own_s() - self._own_s
        share = (busy_s() - self._busy_s - own_s) / (
            (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        )
        if share < BUSY:
            return []
        return [
            f"other programs took {min(share, 1.0):.0%} of this machine meanwhile: it can do more than was measured"
        ]


def busy_s() -> float:
    """Of all cores together, what a host of virtual machines took from them included."""
    times = psutil.cpu_times()._asdict()
    return sum(
        seconds for name, seconds in times.items() if name not in ("idle", "iowait", "guest", "guest_nice")
    )


def _own_s() -> float:
    """Of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
