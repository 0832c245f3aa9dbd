"""What comparisons of weights cost: python benchmarks/guard.py [--widths 128 512 1024] [--steps 700]

Trains on two ranks with `guard.every=100`, without and with `guard.locate` and `guard.recompute`. Reports the
time of the guard's own calls as a share of 100 steps, and the rate at which weights are digested. The first
comparison is not counted. The calls are timed from outside, so that nothing in the product measures itself.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import guard as module  # under the name by which the ranks import it
from paceline import Spec, Step, Task, train
from paceline.cluster.cpu import read_cpu
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import parse
from paceline.spec import Save, WeightGuard
from paceline.training.guard.digest import digest
from paceline.training.guard.replica_guard import ReplicaGuard

EVERY = 100
GUARDS = {
    "every": WeightGuard(every=EVERY),
    "locate": WeightGuard(every=EVERY, locate=True),
    "recompute": WeightGuard(every=EVERY, recompute=True),
}
CALLS = ("before_step", "_record_gradients", "after_step", "compare")


@dataclass(frozen=True)
class GuardTimes:
    """Seconds of a step, and of all calls of the guard in EVERY steps."""

    step_s: float
    guard_s: float

    @property
    def share(self) -> float:
        return self.guard_s / (EVERY * self.step_s)


class Layers(Task):
    """A perceptron with `width`² weights in each of four layers."""

    width: int = 512

    def model(self) -> nn.Module:
        layers = [layer for _ in range(4) for layer in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def dataset(self, split: str) -> list[tuple[Tensor, int]] | None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.rand((1024, self.width), generator=generator)
        return [(row, at % 10) for at, row in enumerate(rows)] if split == "train" else None

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1], reduction="none")


def measure(width: int, guard: WeightGuard, num_steps: int) -> GuardTimes:
    """Train on this rank, and return the times."""
    spent = 0.0

    def timed(call: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                spent += time.perf_counter() - began

        return run

    originals = {name: getattr(ReplicaGuard, name) for name in CALLS}
    for name, call in originals.items():
        setattr(ReplicaGuard, name, timed(call))
    try:
        spec = Spec(steps=num_steps, batch=128, guard=guard, threads=1, profile=False, save=Save(minutes=1e6))
        events = []
        for event in train(spec, parse("ddp"), task=Layers(width=width)):
            events.append(event)
            if isinstance(event, Step) and event.step == EVERY + 1:
                spent = 0.0  # the first comparison also loads the code of its operations
    finally:
        for name, call in originals.items():
            setattr(ReplicaGuard, name, call)
    steps = [event.step_s for event in events if isinstance(event, Step) and event.step > 20]
    step_s, guard_s = statistics.median(steps), spent * EVERY / (num_steps - EVERY)
    return GuardTimes(step_s, guard_s)


def measure_rate_Bps(elements: int) -> float:
    """Return the bytes that a digest reads per second."""
    tensor, times = torch.rand(elements), []
    for _ in range(15):
        began = time.perf_counter()
        digest([tensor]).item()
        times.append(time.perf_counter() - began)
    return 4 * elements / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--steps", type=int, default=700)
    options = parser.parse_args()
    print(f"{read_cpu().name}, {read_cpu().usable_cores} cores, two ranks with a thread each")
    with Ranks(2) as ranks:
        for width in options.widths:
            for name, guard in GUARDS.items():
                times = ranks(module.measure, width, guard, options.steps, timeout_s=200.0)[0]
                print(
                    f"{4 * width**2:,} weights, {name}: {1e3 * times.guard_s:.2f} ms in {EVERY} steps of "
                    f"{1e3 * times.step_s:.2f} ms, {times.share:.2%}",
                    flush=True,
                )
    torch.set_num_threads(1)
    print(f"digest of 64 MiB on a thread: {measure_rate_Bps(2**24) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
