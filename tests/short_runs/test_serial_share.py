"""The serial share of measured step times, and whether more ranks pay."""

import random

import pytest

from paceline.cluster.published import parse
from paceline.errors import RunError
from paceline.events import Profiled, Step
from paceline.plan.model.library import load_model
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import find_best_plans
from paceline.short_runs.report import describe_serial
from paceline.short_runs.scaling import MeasuredPoint, judge
from paceline.short_runs.serial_share import Sample, SerialShare, fit_amdahl, fit_gustafson
from paceline.short_runs.training import BLOCKS, WARM_UP_STEPS, ShortRun, summarize_steps

COUNTS = (1, 2, 4, 8)


def strong(share: float, error: float = 0.01) -> list[Sample]:
    return [Sample(n, 3.0 * (share + (1 - share) / n), error) for n in COUNTS]


def weak(share: float, error: float = 0.01) -> list[Sample]:
    return [Sample(n, 3.0 * n / (share + (1 - share) * n), error) for n in COUNTS]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_laws_are_recovered(share: float) -> None:
    for fit, samples in ((fit_amdahl, strong(share)), (fit_gustafson, weak(share))):
        found = fit(samples)
        assert found is not None
        assert found.share == pytest.approx(share, abs=1e-9)
        assert found.low <= share + 1e-9
        assert found.high >= share - 1e-9


def test_fewest_ranks_need_not_be_one() -> None:
    found = fit_amdahl([Sample(4 * n, step_s, error) for n, step_s, error in strong(0.2)])
    assert found is not None
    assert found.share == pytest.approx(0.2)


def test_one_number_of_ranks_has_no_share() -> None:
    assert fit_amdahl(strong(0.2)[:1]) is None


def test_interval_contains_the_share() -> None:
    draw = random.Random(1)
    hits = narrow = 0
    for _ in range(20):
        noisy = [Sample(n, t * (1 + draw.gauss(0, 0.05)), 0.05) for n, t, _ in strong(0.3)]
        found = fit_amdahl(noisy)
        too_sure = fit_amdahl([Sample(n, t, 1e-3) for n, t, _ in noisy[:2]])  # negative control
        assert found is not None
        assert too_sure is not None
        hits += found.low <= 0.3 <= found.high
        narrow += too_sure.low <= 0.3 <= too_sure.high
    assert hits >= 17
    assert narrow < hits


def test_errors_widen_the_interval() -> None:
    narrow, wide = (fit_amdahl(strong(0.3, error)) for error in (0.01, 0.1))
    assert narrow is not None
    assert wide is not None
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def points(*times: tuple[int, float], error: float = 0.01) -> list[MeasuredPoint]:
    cost = find_best_plans(load_model("gpt2"), parse("a100-80g:1x1"), 8, "single").plans[0][1]
    runs = [ShortRun(n, 8, Plan(), step_s, error, 20, 1.0, None) for n, step_s in times]
    first = runs[0]
    speedups = [first.step_s / run.step_s for run in runs]
    return [
        MeasuredPoint(run, cost, speedup, speedup * first.ranks / run.ranks)
        for run, speedup in zip(runs, speedups, strict=True)
    ]


@pytest.mark.parametrize(
    ("share", "end"),
    [
        (0.25, "; no number of ranks would be more than 4.0 times as fast as the fewest"),
        (0.99, "; more ranks would not be faster than the fewest"),
        (1.0, "; more ranks would not be faster than the fewest"),
        (0.0, ")"),
    ],
)
def test_limit_of_the_speedup(share: float, end: str) -> None:
    [sentence] = describe_serial(SerialShare(share, share, share), "Amdahl")
    assert sentence.endswith(end)


def test_two_devices_as_fast_as_eight() -> None:
    verdict = judge(points((2, 7.01), (8, 7.57)), 0.8)
    assert not verdict.pays
    assert verdict.ranks == 2
    assert verdict.sentence.startswith("more ranks do not pay: for the same work, 8 ranks take 7.6 s")
    assert "2 ranks take 7.0 s a step" in verdict.sentence


@pytest.mark.parametrize(
    ("times", "ranks", "begin"),
    [
        (((1, 8.0), (2, 4.1), (4, 2.1)), 4, "more ranks pay"),
        (((1, 8.0), (2, 4.1), (4, 3.4)), 2, "more ranks are faster and cost more"),
        (((1, 8.0), (2, 8.1), (4, 9.5)), 1, "more ranks do not pay"),
        (((1, 8.0), (2, 4.1), (4, 4.1)), 2, "more ranks do not pay"),
    ],
)
def test_verdict(times: tuple[tuple[int, float], ...], ranks: int, begin: str) -> None:
    verdict = judge(points(*times), 0.8)
    assert verdict.ranks == ranks
    assert verdict.sentence.startswith(begin)
    assert verdict.pays == (begin == "more ranks pay")


def step(number: int, step_s: float) -> Step:
    return Step(
        step=number, samples=0, loss=0.0, grad_norm=0.0, lr=0.0, step_s=step_s, data_s=0.0, samples_per_s=1.0
    )


def test_slow_steps_do_not_count() -> None:
    """First steps and profiled steps are slower, and must not be in the median."""
    profile = Profiled(
        step=9,
        num_steps=2,
        step_s=9.0,
        seconds={},
        input_s=0.0,
        slowest=0,
        slowest_s=0.0,
        busy_s=0.0,
        fullest=0,
        memory={},
        costs_s=0.0,
    )
    slow = {*range(1, WARM_UP_STEPS + 1), 8, 9}
    events = [step(n, 9.0 if n in slow else 2.0) for n in range(1, 21)]
    assert summarize_steps([*events, profile]) == (2.0, 0.0, 20 - len(slow))
    assert summarize_steps(events)[2] == 20 - WARM_UP_STEPS
    with pytest.raises(RunError, match="3 steps to measure"):
        summarize_steps(events[: WARM_UP_STEPS + BLOCKS - 1])
