"""Cost of traces and histograms: the steps with them, compared with the others of the same training.

    python benchmarks/traces.py [--rounds 5] [--samples 24]

Under each plan, a training on two ranks writes the histograms of every 10th step. The cost is the time by
which such a step and the next step are longer than the mean of the other eight, and is shown as the share of
100 steps. Other trainings trace 5 steps. The cost is the time by which these and the next ten steps are
longer than usual steps, and is shown as the share of 1,000 steps. The first trace of a process also starts
torch's profiler. The bar is 2 % for each.
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

import turns
from paceline import RunFolder, Spec, train
from paceline.plan.plan import parse
from paceline.spec import Save
from paceline.tasks.text import Text

PLANS = ("ddp", "zero3", "tp=2", "pp=2,microbatches=4")
TASK = Text(width=64, depth=2, context=64)
WARMUP = 20  # steps
PERIOD = 10
TRACED, AFTER, USUAL = 5, 10, 40  # steps


def time_steps(plan: str, steps: int, **options: object) -> list[float]:
    """Return the seconds of the steps of a training from the second on, from update to update."""
    spec = Spec(batch=16, steps=steps, profile=False, evaluate_every=10**9, save=Save(minutes=float("inf")))
    folders = [tempfile.mkdtemp(prefix="paceline-traces-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    run, stamps = RunFolder(Path(folders[0])), []

    def observe(model: object, what: str, step: int) -> None:
        if what == "weights":
            stamps.append(time.perf_counter())

    for _ in train(spec.model_copy(update=options), parse(plan), task=TASK, run=run, observe=observe):
        pass
    dist.barrier()
    if dist.get_rank() == 0:
        run.delete()
    assert len(stamps) == steps
    return [end - begin for begin, end in itertools.pairwise(stamps)]


def measure_histograms(plan: str, samples: int) -> tuple[list[float], float]:
    """Return the additional seconds of each step with histograms, and the seconds of a usual step."""
    step_s = time_steps(plan, WARMUP + PERIOD * (samples + 1), histograms=PERIOD)
    costs, usual = [], []
    for number in range(WARMUP + PERIOD, WARMUP + PERIOD * (samples + 1), PERIOD):
        first = number - 2  # the first time is that of step 2
        others = step_s[first + 2 : first + PERIOD]
        costs.append(sum(step_s[first : first + 2]) - 2 * statistics.mean(others))
        usual += others
    return costs, statistics.mean(usual)


def measure_trace(plan: str) -> tuple[float, float]:
    """Return the additional seconds of a trace of 5 steps, and the seconds of a usual step."""
    first = WARMUP + USUAL
    step_s = time_steps(plan, first + TRACED + AFTER, trace=f"{first}:{first + TRACED - 1}")
    usual_s = statistics.mean(step_s[WARMUP - 2 : first - 2])
    traced = step_s[first - 2 :]
    return sum(traced) - len(traced) * usual_s, usual_s


def run_rank(rounds: int, samples: int) -> None:
    cost_s, usual_s = measure_trace(PLANS[0])
    turns.print_on_rank_0(
        f"first trace of a process, {PLANS[0]}: {cost_s:.2f} s, {cost_s / usual_s / 1000:.2%}"
    )
    for plan in PLANS:
        costs, usual_s = measure_histograms(plan, samples)
        traces = [measure_trace(plan) for _ in range(rounds)]
        trace_s = statistics.median(cost for cost, _ in traces)
        trace_share = statistics.median(cost / usual / 1000 for cost, usual in traces)
        low, median, high = statistics.quantiles(costs, n=4) if len(costs) > 1 else costs * 3
        turns.print_on_rank_0(
            f"{plan:22}{1e3 * usual_s:6.1f} ms per step; histograms 100: {1e3 * median:.1f} ms "
            f"({1e3 * low:.1f} to {1e3 * high:.1f}), {median / usual_s / 100:.2%}; "
            f"trace of {TRACED} steps in 1,000: {trace_s:.2f} s, {trace_share:.2%}"
        )


if __name__ == "__main__":
    turns.main(__doc__ or "", run_rank, [2], rounds=5, samples=24)
