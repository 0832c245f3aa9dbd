"""Which flipped bits the guard finds: python benchmarks/guard_flips.py [--flips 50] [--every 5]

Trains a small GPT under several plans with `guard.every` and `guard.locate`. In each training, one bit of a
random element of a random weight flips on a random rank, between two random steps. The bit is the lowest or
the highest of the mantissa, one of the exponent, or the sign. Then come healthy trainings, in which nothing
may be found. Counts the flips that were found in time, and those whose rank and step were named.
"""

import argparse
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import guard_flips as module  # under the name by which the ranks import it
from paceline import Spec, train
from paceline.cluster.cpu import read_cpu
from paceline.errors import CorruptionError, Error
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import parse
from paceline.spec import Save, WeightGuard
from paceline.tasks.text import Text
from paceline.training.step.step import TrainingStep

STEPS = 16
BATCH = 12
PLANS = (("ddp", 2), ("ddp", 3), ("zero1", 2), ("hsdp", 4), ("tp=2", 4), ("pp=2,microbatches=2", 4))
BITS = {
    "lowest of the mantissa": [0],
    "highest of the mantissa": [22],
    "exponent": [*range(23, 31)],
    "sign": [31],
}


@dataclass(frozen=True)
class Flip:
    rank: int
    step: int  # steps done before
    bit: int
    seed: int  # of the weight and its element


@dataclass(frozen=True)
class Outcome:
    """What a training with a flip reported."""

    flipped: bool  # on this rank
    error: str  # "" if there was none

    @property
    def found_after(self) -> int | None:
        """Return the steps done when the guard found the flip; None if it did not."""
        match = re.match(r"silent corruption, found after step (\d+):", self.error)
        return int(match[1]) if match is not None else None


def draw_flip(ranks: int, bits: list[int], seed: str) -> Flip:
    rng = random.Random(seed)
    return Flip(rng.randrange(ranks), rng.randint(1, STEPS - 6), rng.choice(bits), rng.getrandbits(32))


@contextmanager
def flipping(flip: Flip | None) -> Iterator[list[str]]:
    """Flip the bit before its step, on its rank. Yields a list that then has the name of the weight."""
    original, flipped = TrainingStep.__call__, list[str]()

    def call(self: TrainingStep, batches: Any, step: int, lr_factor: float) -> Any:
        if flip is not None and step == flip.step and os.environ["RANK"] == str(flip.rank):
            flipped.append(flip_weight(self.model, flip))
        return original(self, batches, step, lr_factor)

    TrainingStep.__call__ = call  # type: ignore[method-assign]
    try:
        yield flipped
    finally:
        TrainingStep.__call__ = original  # type: ignore[method-assign]


def flip_weight(model: nn.Module, flip: Flip) -> str:
    """Flip a bit in the memory of a weight of this rank, and return its name."""
    parts: dict[str, Any] = {
        name: parameter.to_local() if hasattr(parameter, "to_local") else parameter
        for name, parameter in model.named_parameters()
        if parameter.device.type == "cpu"
    }
    rng = random.Random(flip.seed)
    name = rng.choice([name for name, part in parts.items() if part.numel()])
    # Through .data: torch counts no change, as of broken memory.
    words = parts[name].data.view(torch.int32).view(-1)
    mask = torch.tensor(1 << flip.bit, dtype=torch.int64).to(torch.int32)  # bit 31 wraps around
    words[rng.randrange(words.numel())] ^= mask
    return name


def train_with_flip(plan: str, every: int, locate: bool, flip: Flip | None) -> Outcome:
    """Train on this rank."""
    spec = Spec(
        steps=STEPS,
        batch=BATCH,
        guard=WeightGuard(every=every, locate=locate),
        threads=1,
        profile=False,
        save=Save(minutes=1e6),
    )
    error = ""
    with flipping(flip) as flipped:
        try:
            list(train(spec, parse(plan), task=Text(width=16, depth=2, heads=2, context=8)))
        except CorruptionError as found:
            error = str(found)
        except Error as other:  # such as a loss that is not finite
            error = f"{type(other).__name__}: {other}"
    return Outcome(bool(flipped), error)


def is_named(outcome: Outcome, flip: Flip) -> bool:
    """Return whether the rank of the flip is named alone, and the step."""
    changed = f"the weights of rank {flip.rank} changed outside of an update"
    return f"{changed}, before the update of step {flip.step + 1};" in outcome.error


def run_plan(plan: str, size: int, options: argparse.Namespace) -> list[int]:
    """Return of a plan: flips, those found, found in time and named, and healthy trainings with an alarm."""
    counts = [0] * 5
    with Ranks(size) as ranks:
        for at in range(options.flips):
            kind, bits = list(BITS.items())[at % len(BITS)]
            flip = module.draw_flip(size, bits, f"{plan} {size} {at} {options.seed}")
            outcomes = ranks(
                module.train_with_flip, plan, options.every, not options.replicas_only, flip, timeout_s=100.0
            )
            assert outcomes[flip.rank].flipped, f"{plan}: rank {flip.rank} has no weight"
            found = [outcome.found_after for outcome in outcomes]
            in_time = [after is not None and after <= flip.step + options.every for after in found]
            row = [True, None not in found, all(in_time), all(is_named(other, flip) for other in outcomes)]
            counts = [count + value for count, value in zip(counts, [*row, False], strict=True)]
            if not all(row[:3]):
                print(f"  {plan}, {kind}, {flip}: {outcomes[flip.rank]}", flush=True)
        for _ in range(options.healthy):
            outcomes = ranks(
                module.train_with_flip, plan, options.every, not options.replicas_only, None, timeout_s=100.0
            )
            counts[4] += any(outcome.error for outcome in outcomes)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=50, help="of each plan")
    parser.add_argument("--healthy", type=int, default=5, help="trainings without a flip of each plan")
    parser.add_argument("--every", type=int, default=5, help="steps between comparisons")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", nargs="+", help="such as ddp tp=2")
    parser.add_argument("--replicas-only", action="store_true", help="without guard.locate")
    options = parser.parse_args()
    print(f"{read_cpu().name}, guard.every={options.every}, {'no ' * options.replicas_only}guard.locate")
    total = [0] * 5
    for plan, size in PLANS:
        if options.plans is None or plan in options.plans:
            counts = run_plan(plan, size, options)
            total = [sum(pair) for pair in zip(total, counts, strict=True)]
            print(describe(f"{plan} on {size} ranks", counts, options), flush=True)
    print(describe("all", total, options))


def describe(name: str, counts: list[int], options: argparse.Namespace) -> str:
    flips, found, in_time, named, alarms = counts
    return (
        f"{name}: {flips} flips, {found} found, {in_time} within {options.every} steps, {named} with rank "
        f"and step; {alarms} false alarms in healthy trainings"
    )


if __name__ == "__main__":
    main()
