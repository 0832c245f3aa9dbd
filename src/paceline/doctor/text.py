"""A diagnosis as text: a sentence, a line for each rank, then the stacks of the blocking ranks."""

import time
from collections.abc import Sequence

from paceline.doctor.diagnose import Diagnosis, describe_location
from paceline.doctor.heartbeat import Collective, Frame
from paceline.doctor.rank_state import RankState
from paceline.units import format_seconds

MAX_STACK_LINES = 12


def format_sentence(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.sentence}; {diagnosis.hint}" if diagnosis.hint else diagnosis.sentence


def format_details(diagnosis: Diagnosis) -> list[str]:
    now = time.time()
    lines = [line for rank in diagnosis.seen for line in _format_rank(rank, now)]
    for rank in diagnosis.seen:
        if rank.rank in diagnosis.at_fault and rank.stack:
            lines += [f"rank {rank.rank}, innermost line last:", *_format_stack(rank.stack)]
        for reader in rank.readers:
            lines += [
                f"reader of rank {rank.rank} (process {reader.pid}), which {reader.state}:",
                *_format_stack(reader.stack),
            ]
    return lines


def _format_rank(rank: RankState, now: float) -> list[str]:
    if rank.beat is None:
        return [f"rank {rank.rank}  {rank.state}"]
    spent = ", ".join(
        f"{phase} {format_seconds(seconds)}" for phase, seconds in rank.beat.spent_s.items() if seconds
    )
    parts = [
        f"rank {rank.rank}  {rank.state}: process {rank.beat.pid} on {rank.beat.host}",
        f"step {rank.beat.step} done",
        f"in {rank.beat.phase} for {format_seconds(max(0.0, now - rank.beat.since))}",
        *([f"at {location}"] if (location := describe_location(rank.stack)) else []),
        *([f"per step: {spent}"] if spent else []),
    ]
    return [
        "; ".join(parts),
        *(f"  {_format_collective(collective, now)}" for collective in rank.collectives),
    ]


def _format_collective(collective: Collective, now: float) -> str:
    members = ", ".join(map(str, collective.members))
    state = "done" if collective.is_over else "not done"
    return (
        f"group {collective.group} of ranks {members}: {collective.kind} {collective.number} is "
        f"{collective.operation} of {collective.items:,} items, "
        f"called {format_seconds(max(0.0, now - collective.called))} ago, {state}"
    )


def _format_stack(stack: Sequence[Frame]) -> list[str]:
    return [f"  {frame.file}:{frame.line} {frame.function}" for frame in stack[-MAX_STACK_LINES:]]
