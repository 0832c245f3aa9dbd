"""The serial share of a training, fitted to measured step times: Amdahl's and Gustafson's laws."""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

DRAWS = 2000  # of noise, for an interval
LOW, HIGH = 0.025, 0.975  # quantiles of an interval


class Sample(NamedTuple):
    """A measured step. error: its standard deviation, relative."""

    ranks: int
    step_s: float
    error: float


class SerialShare(NamedTuple):
    """The share of the time on the fewest ranks that more ranks do not shorten.

    low, high: its 95 % confidence interval.
    """

    share: float
    low: float
    high: float


def fit_amdahl(samples: Sequence[Sample]) -> SerialShare | None:
    """Return the serial share of strong scaling; None for fewer than two numbers of ranks.

    On n times the ranks, a step takes t(n) = t(1) × (s + (1 - s) / n) (Amdahl 1967).
    """
    return _fit(samples, _solve_amdahl, lambda share, times: share + (1 - share) / times)


def fit_gustafson(samples: Sequence[Sample]) -> SerialShare | None:
    """Return the serial share of weak scaling; None for fewer than two numbers of ranks.

    n times the ranks do n - s × (n - 1) times the work in the same time (Gustafson 1988).
    """
    return _fit(samples, _solve_gustafson, lambda share, times: times / (times - share * (times - 1)))


def _fit(
    samples: Sequence[Sample],
    solve: Callable[[Sequence[float], Sequence[float], Sequence[float]], tuple[float, float]],
    law: Callable[[float, float], float],
) -> SerialShare | None:
    """Return the share and its interval: that of fits to the times with noise added.

    The noise is the error of a sample, or the distance of the samples from the law if that is larger.
    solve: returns the share and the time on the fewest ranks. law: the time, relative to that.
    """
    if len({sample.ranks for sample in samples}) < 2:
        return None
    fewest = min(sample.ranks for sample in samples)
    times = [sample.ranks / fewest for sample in samples]
    steps = [sample.step_s for sample in samples]
    errors = [max(sample.error, 1e-3) for sample in samples]
    share, first_s = solve(times, steps, errors)
    free = len(samples) - 2
    if free > 0:
        squares = [
            (first_s * law(share, count) / step_s - 1) ** 2
            for count, step_s in zip(times, steps, strict=True)
        ]
        scatter = math.sqrt(sum(squares) / free)
        errors = [max(error, scatter) for error in errors]
    draw = random.Random(0)
    shares = sorted(
        solve(
            times,
            [step_s * math.exp(draw.gauss(0, error)) for step_s, error in zip(steps, errors, strict=True)],
            errors,
        )[0]
        for _ in range(DRAWS)
    )
    return SerialShare(share, shares[int(LOW * DRAWS)], shares[int(HIGH * DRAWS)])


def _fit_line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float, float]:
    """Return the weighted mean of y, and intercept and slope of the weighted line of least squares."""
    total = sum(weights)
    mean_x = sum(w * at for w, at in zip(weights, x, strict=True)) / total
    mean_y = sum(w * value for w, value in zip(weights, y, strict=True)) / total
    spread = sum(w * (at - mean_x) ** 2 for w, at in zip(weights, x, strict=True))
    both = sum(w * (at - mean_x) * (value - mean_y) for w, at, value in zip(weights, x, y, strict=True))
    slope = both / spread
    return mean_y, mean_y - slope * mean_x, slope


def _solve_amdahl(
    times: Sequence[float], steps: Sequence[float], errors: Sequence[float]
) -> tuple[float, float]:
    """Fit t = a + b / n by least squares of the relative errors, with a and b at least 0."""
    weights = [(error * step_s) ** -2 for step_s, error in zip(steps, errors, strict=True)]
    shares = [1 / count for count in times]
    mean_t, a, b = _fit_line(shares, steps, weights)
    if b <= 0:
        return 1.0, mean_t
    if a <= 0:
        squares = sum(w * x * x for w, x in zip(weights, shares, strict=True))
        return 0.0, sum(w * x * t for w, x, t in zip(weights, shares, steps, strict=True)) / squares
    return a / (a + b), a + b


def _solve_gustafson(
    times: Sequence[float], steps: Sequence[float], errors: Sequence[float]
) -> tuple[float, float]:
    """Fit r = r(1) × (n - s × (n - 1)), linear in r(1) and r(1) × (1 - s), where r = n / t is the rate."""
    rates = [count / step_s for count, step_s in zip(times, steps, strict=True)]
    weights = [(error * rate) ** -2 for rate, error in zip(rates, errors, strict=True)]
    # r = base + slope × (n - 1), with 0 ≤ slope ≤ base
    extra = [count - 1 for count in times]
    mean_r, base, slope = _fit_line(extra, rates, weights)
    if slope <= 0 or base <= 0:
        return 1.0, 1 / mean_r
    if slope >= base:
        squares = sum(w * n * n for w, n in zip(weights, times, strict=True))
        return 0.0, squares / sum(w * n * r for w, n, r in zip(weights, times, rates, strict=True))
    return 1 - slope / base, 1 / base
