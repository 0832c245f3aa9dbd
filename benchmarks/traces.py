"""Cost of traces and histograms: trainings with and without them in turns, in the same two ranks.

    python benchmarks/traces.py [--rounds 12] [--steps 1000]

A training with `--trace` traces 5 steps, one with `--histograms 100` counts every 100th step. The time is
that from the first to the last step. The bar is 2 % for each.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

import turns
from paceline import RunFolder, Spec, train
from paceline.events import Ended, Step
from paceline.plan.plan import parse
from paceline.spec import Save
from paceline.tasks.text import Text

PLANS = ("ddp", "zero3", "tp=2", "pp=2,microbatches=4")
TASK = Text(width=64, depth=2, context=64)
TRACED = 5
EVERY = 100


def measure(plan: str, steps: int, **options: object) -> float:
    """Return the seconds of a training from its first to its last step."""
    spec = Spec(batch=16, steps=steps, profile=False, evaluate_every=10**9, save=Save(minutes=float("inf")))
    folders = [tempfile.mkdtemp(prefix="paceline-traces-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    began = ended = 0.0
    run = RunFolder(Path(folders[0]))
    for event in train(spec.model_copy(update=options), parse(plan), task=TASK, run=run):
        if isinstance(event, Step) and not began:
            began = time.perf_counter()
        if isinstance(event, Step):
            ended = time.perf_counter()
        assert not isinstance(event, Ended) or event.step == steps
    dist.barrier()
    if dist.get_rank() == 0:
        run.delete()
    return ended - began


def run_rank(rounds: int, steps: int) -> None:
    first = steps // 2
    contenders: dict[str, dict[str, object]] = {
        "plain": {},
        f"trace of {TRACED} steps": {"trace": f"{first}:{first + TRACED - 1}"},
        f"histograms {EVERY}": {"histograms": EVERY},
    }
    for plan in PLANS:
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for index in range(rounds):
            names = list(contenders)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                seconds[name].append(measure(plan, steps, **contenders[name]))
        plain = statistics.median(seconds["plain"])
        costs = [
            f"{name} {statistics.median(own) / plain - 1:+.2%}"
            for name, own in seconds.items()
            if name != "plain"
        ]
        turns.print_on_rank_0(f"{plan:22}{1e3 * plain / steps:7.1f} ms per step; {'; '.join(costs)}")


if __name__ == "__main__":
    turns.main(__doc__ or "", run_rank, [2], steps=1000)
