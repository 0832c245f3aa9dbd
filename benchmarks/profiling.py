"""What profiling costs a training: the same with profiled steps and without, a block of steps each in turns, in the same two ranks.

    python benchmarks/profiling.py [--rounds 40]

Rounds are blocks of 25 steps. Profiled are as many steps as a training of so many rounds asks for by itself. The blocks without
a profile say how far two blocks of this machine are apart anyway.
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
WARM = 2  # blocks
PLANS = ("ddp", "zero3", "tp=2")
TASK = Text(width=64, depth=2, context=64)


class Contender:
    """A training that goes on by blocks."""

    def __init__(self, profile: bool | None, plan: str, rounds: int):
        spec = Spec(batch=16, steps=BLOCK * (rounds + WARM + 1), profile=profile, evaluate_every=10**9)
        self.events: Iterator[Event] = train(spec, parse(plan), task=TASK)
        self.profiles: list[Profiled] = []
        self.step = 0

    def block(self) -> tuple[float, bool]:
        """Seconds, and whether a step was profiled. Events of quick steps come some at a time, so that a block may be a bit longer."""
        dist.barrier()
        began, before, first = time.perf_counter(), len(self.profiles), self.step
        while self.step < first + BLOCK:
            event = next(self.events)
            if isinstance(event, Profiled):
                self.profiles.append(event)
            if isinstance(event, Step):
                self.step = event.step
        dist.barrier()
        return (time.perf_counter() - began) / (self.step - first), len(self.profiles) > before


def be_a_rank(rounds: int) -> None:
    for plan in PLANS:
        with_, without = Contender(None, plan, rounds), Contender(False, plan, rounds)
        took: dict[Contender, list[float]] = {with_: [], without: []}
        quiet = []
        for at in range(rounds + WARM):
            found = {one: one.block() for one in ((with_, without) if at % 2 else (without, with_))}
            for one, (seconds, _) in found.items():
                took[one] += [seconds] if at >= WARM else []
            if at >= WARM and not found[with_][1]:
                quiet.append(found[with_][0] / found[without][0] - 1)
        whole = sum(took[with_]) / sum(took[without]) - 1
        costs = sum(one.costs_s for one in with_.profiles) / (BLOCK * sum(took[with_]))
        low, middle, high = statistics.quantiles(quiet, n=4)
        turns.say(
            f"{plan:8}{1e3 * statistics.median(took[without]):7.1f} ms a step; {len(with_.profiles)} profiles: {costs:.2%} of the time as "
            f"they say, {whole:+.2%} as measured; blocks without a profile {middle:+.2%} ({low:+.2%} to {high:+.2%})"
        )


if __name__ == "__main__":
    turns.main(__doc__ or "", be_a_rank, [2])
