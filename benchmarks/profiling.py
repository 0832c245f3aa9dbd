"""Overhead of profiled steps: a training with and without profiles in turns, in the same two ranks.

    python benchmarks/profiling.py [--rounds 40]

A round is a block of 25 steps of each. The number of profiled steps is that of a normal training of this
length. Blocks without a profile show the difference between two equal blocks on this machine.
"""

import statistics
import time
from collections.abc import Iterator

import torch.distributed as dist

import turns
from paceline import Spec, train
from paceline.events import Event, Profiled, Step
from paceline.plan.plan import parse
from paceline.tasks.text import Text

BLOCK = 25
WARMUP_BLOCKS = 2
PLANS = ("ddp", "zero3", "tp=2")
TASK = Text(width=64, depth=2, context=64)


class Contender:
    """A training that runs block by block."""

    def __init__(self, profile: bool | None, plan: str, rounds: int):
        spec = Spec(
            batch=16, steps=BLOCK * (rounds + WARMUP_BLOCKS + 1), profile=profile, evaluate_every=10**9
        )
        self.events: Iterator[Event] = train(spec, parse(plan), task=TASK)
        self.profiles: list[Profiled] = []
        self.step = 0

    def run_block(self) -> tuple[float, bool]:
        """Return the seconds per step, and whether a step was profiled.

        Events of fast steps arrive in groups, so a block may be slightly longer.
        """
        dist.barrier()
        start, profiles_before, first = time.perf_counter(), len(self.profiles), self.step
        while self.step < first + BLOCK:
            event = next(self.events)
            if isinstance(event, Profiled):
                self.profiles.append(event)
            if isinstance(event, Step):
                self.step = event.step
        dist.barrier()
        return (time.perf_counter() - start) / (self.step - first), len(self.profiles) > profiles_before


def run_rank(rounds: int) -> None:
    for plan in PLANS:
        profiled, plain = Contender(None, plan, rounds), Contender(False, plan, rounds)
        step_s: dict[Contender, list[float]] = {profiled: [], plain: []}
        without_profile = []
        for index in range(rounds + WARMUP_BLOCKS):
            order = (profiled, plain) if index % 2 else (plain, profiled)
            blocks = {contender: contender.run_block() for contender in order}
            if index < WARMUP_BLOCKS:
                continue
            for contender, (seconds, _) in blocks.items():
                step_s[contender].append(seconds)
            if not blocks[profiled][1]:
                without_profile.append(blocks[profiled][0] / blocks[plain][0] - 1)
        measured = sum(step_s[profiled]) / sum(step_s[plain]) - 1
        reported = sum(profile.costs_s for profile in profiled.profiles) / (BLOCK * sum(step_s[profiled]))
        low, median, high = statistics.quantiles(without_profile, n=4)
        turns.print_on_rank_0(
            f"{plan:8}{1e3 * statistics.median(step_s[plain]):7.1f} ms per step; "
            f"{len(profiled.profiles)} profiles: overhead {reported:.2%} as they report, "
            f"{measured:+.2%} as measured; blocks without a profile {median:+.2%} ({low:+.2%} to {high:+.2%})"
        )


if __name__ == "__main__":
    turns.main(__doc__ or "", run_rank, [2])
