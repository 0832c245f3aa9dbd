"""A diagnosis as text: one sentence first, then each rank, then the stacks of those that keep the others."""

import time
from collections.abc import Sequence

from paceline.doctor.diagnose import Diagnosis, place
from paceline.doctor.heartbeat import Collective, Frame
from paceline.doctor.rank_state import RankState
from paceline.units import format_seconds

DEEPEST = 12  # lines of a stack


def sentences(found: Diagnosis) -> str:
    return f"{found.sentence}; {found.hint}" if found.hint else found.sentence


def details(found: Diagnosis) -> list[str]:
    now = time.time()
    lines = [line for one in found.seen for line in _rank(one, now)]
    for one in found.seen:
        if one.rank in found.at_fault and one.stack:
            lines += [f"rank {one.rank}, innermost line last:", *_stack(one.stack)]
        for reader in one.readers:
            lines += [
                f"reader of rank {one.rank} (process {reader.pid}), which {reader.state}:",
                *_stack(reader.stack),
            ]
    return lines


def _rank(one: RankState, now: float) -> list[str]:
    if one.beat is None:
        return [f"rank {one.rank}  {one.state}"]
    spent = ", ".join(
        f"{phase} {format_seconds(seconds)}" for phase, seconds in one.beat.spent_s.items() if seconds
    )
    words = [
        f"rank {one.rank}  {one.state}: process {one.beat.pid} on {one.beat.host}",
        f"step {one.beat.step} done",
        f"in {one.beat.phase} for {format_seconds(max(0.0, now - one.beat.since))}",
        *([f"at {here}"] if (here := place(one.stack)) else []),
        *([f"a step: {spent}"] if spent else []),
    ]
    return ["; ".join(words), *(f"  {_collective(collective, now)}" for collective in one.collectives)]


def _collective(one: Collective, now: float) -> str:
    what = f"group {one.group} of ranks {', '.join(map(str, one.members))}: {one.kind} {one.number} is {one.operation} of {one.items:,} items"
    return f"{what}, called {format_seconds(max(0.0, now - one.called))} ago, {'done' if one.is_over else 'not done'}"


def _stack(stack: Sequence[Frame]) -> list[str]:
    return [f"  {frame.file}:{frame.line} {frame.function}" for frame in stack[-DEEPEST:]]
