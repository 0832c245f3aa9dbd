"""Samples to a target as a function of the batch: E = Emin · (1 + B / Bcrit), fitted to few measurements.

The form is that of McCandlish et al., An empirical model of large-batch training, 2018, equation 2.11. Emin
is reached with small batches, and a training with B = Bcrit needs twice as many samples.

Trainings also rise in other forms: slower, steeper, or after a plateau. Each of FORMS has a probability, and
in each of them a training with B = Bcrit needs twice as many samples.

Few measurements determine Bcrit badly, and measurements deviate from the form together: neighbouring batches
share hyper-parameters. So the logarithm of E has a deviation that is correlated along log B (an
Ornstein-Uhlenbeck process), and log Bcrit has a distribution over trainings, whose mean the trainings of one
fit share. A measurement whose standard error is not known has one of several levels of noise, about which
the measurements of its training decide. All of it is integrated on a grid; nothing is optimized, and no start
value matters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import BenchError

Array = npt.NDArray[np.float64]

# log(E / Emin) as a function of B / Bcrit, with the probability before any measurement.
FORMS: Sequence[tuple[float, Callable[[Array], Array]]] = (
    (0.35, np.log1p),  # that of McCandlish et al.
    (0.1, lambda ratio: np.log1p(ratio**0.5)),
    (0.15, lambda ratio: np.log1p(ratio**0.7)),
    (0.15, lambda ratio: np.log1p(ratio**1.4)),
    (0.1, lambda ratio: np.log1p(ratio**2)),
    (0.15, lambda ratio: np.log1p(3 * ratio**2) / 2),  # a plateau, and then proportional to B
)
# Of the logarithm of E, from 53 published points of seven trainings.
DEVIATION = 0.1  # standard deviation of a training from the form
DEVIATION_LENGTH = 1.0  # in log B, over which the deviation changes
NOISE = 0.02  # of each point, besides its standard error
UNKNOWN_NOISE = np.array([0.02, 0.05, 0.1])  # of points without a standard error: equally probable levels
# Of log(Bcrit / largest measured batch): mean over trainings, its uncertainty, spread between trainings.
CRITICAL_MEAN = 1.0
CRITICAL_MEAN_ERROR = 0.7
CRITICAL_SPREAD = 1.5

GRID = np.linspace(-5.0, 7.0, 241)  # log(Bcrit / largest measured batch)
MEANS = CRITICAL_MEAN + CRITICAL_MEAN_ERROR * np.linspace(-3.0, 3.0, 31)


@dataclass(frozen=True)
class Measurement:
    """Samples (or epochs) to the target with a batch.

    error: standard error, relative to `cost`; None: not known, as of a single training.
    """

    batch: float
    cost: float
    error: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("cost", self.cost)):
            if not (math.isfinite(value) and value > 0):
                raise BenchError(f"a measured {name} is {value}; it must be a positive number")
        if self.error is not None and not (math.isfinite(self.error) and self.error >= 0):
            raise BenchError(f"the relative error of a measurement is {self.error}; it must be at least 0")


@dataclass(frozen=True)
class Interval:
    """A median, and the limits of the central 68 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ConvergenceCurve:
    """E of one training, as a distribution over Bcrit, forms and levels of noise.

    The first axis of all arrays is that of the cases, each a level and a form, except of `critical` and
    `log_batches`. weights: probability of each case and each Bcrit of the grid. log_minimum: log Emin for
    each of them; its variance depends on the level only. residuals: of each measurement for each Bcrit,
    multiplied by the inverse covariance.
    """

    critical: Array
    weights: Array
    log_minimum: Array
    log_minimum_variance: Array
    log_batches: Array
    residuals: Array
    inverse: Array

    @property
    def critical_batch(self) -> Interval:
        """The batch that needs twice as many samples as small batches."""
        weights = self.weights.sum(0)
        low, middle, high = np.interp((0.16, 0.5, 0.84), np.cumsum(weights), np.log(self.critical))
        return Interval(math.exp(middle), math.exp(low), math.exp(high))

    @property
    def minimum(self) -> Interval:
        """Emin, in the unit of the measurements."""
        return self._interval(self.log_minimum, self.log_minimum_variance)

    def predict(self, batch: float, error: float | None = None) -> Interval:
        """Return E at a batch, as a measurement finds it. error: its relative standard error, if known."""
        covariance = _covary(np.array([math.log(batch)]), self.log_batches)
        values = self.log_minimum + _log_forms(batch / self.critical) + (covariance @ self.residuals)[:, 0]
        gains = (covariance @ self.inverse)[:, 0]
        explained, leverage = gains @ covariance[0], 1.0 - gains.sum(1)
        variance = np.maximum(0.0, DEVIATION**2 - explained) + leverage**2 * self.log_minimum_variance
        return self._interval(values, variance + _noise_variance([error])[:, 0])

    def form(self, batch: float) -> float:
        """Return E at a batch as the forms have it, without the deviations of measurements."""
        return math.exp(float((self.weights * (self.log_minimum + _log_forms(batch / self.critical))).sum()))

    def _interval(self, values: Array, variance: Array) -> Interval:
        """Return the interval of the exponential of values, each with a normal error of its case's variance.

        The middle is the mean of the logarithms, which differs little from the median.
        """
        mean = float((self.weights * values).sum())
        width = math.sqrt(float((self.weights * ((values - mean) ** 2 + variance[:, None])).sum()))
        return Interval(math.exp(mean), math.exp(mean - width), math.exp(mean + width))


@dataclass(frozen=True)
class _Likelihood:
    """The likelihood of cases and Bcrit given the measurements of one training, with Emin integrated out."""

    logs: Array
    curve: Mapping[str, Any]


def fit_curves(trainings: Mapping[str, Sequence[Measurement]]) -> dict[str, ConvergenceCurve]:
    """Return the curve of each training. The trainings share the mean of log(Bcrit / largest batch)."""
    likelihoods = {name: _likelihood(points) for name, points in trainings.items()}
    prior = np.exp(-(((GRID[None] - MEANS[:, None]) / CRITICAL_SPREAD) ** 2) / 2)
    prior /= prior.sum(1, keepdims=True)
    evidence = {name: np.log(prior @ np.exp(found.logs).sum(0)) for name, found in likelihoods.items()}
    log_means = -(((MEANS - CRITICAL_MEAN) / CRITICAL_MEAN_ERROR) ** 2) / 2 + sum(evidence.values())
    means = np.exp(log_means - log_means.max())
    curves = {}
    for name, found in likelihoods.items():
        # A mean counts once for this training: with all others, but without its own evidence.
        others = means * np.exp(evidence[name].max() - evidence[name])
        weights = (others @ prior) * np.exp(found.logs)
        curves[name] = ConvergenceCurve(weights=weights / weights.sum(), **found.curve)
    return curves


def fit_curve(points: Sequence[Measurement]) -> ConvergenceCurve:
    """Return the curve of a single training."""
    return fit_curves({"": points})[""]


def _covary(left: Array, right: Array) -> Array:
    """Return the covariance of the deviations at two lists of log B."""
    return DEVIATION**2 * np.exp(-np.abs(left[:, None] - right[None]) / DEVIATION_LENGTH)


def _likelihood(points: Sequence[Measurement]) -> _Likelihood:
    if not points:
        raise BenchError("no measurement to fit; give at least one batch with its samples to the target")
    log_batches = np.log([point.batch for point in points])
    critical = max(point.batch for point in points) * np.exp(GRID)
    noise = _noise_variance([point.error for point in points])
    covariance = _covary(log_batches, log_batches) + noise[:, :, None] * np.eye(len(points))
    inverse = np.linalg.inv(covariance)
    ratios = np.array([point.batch for point in points])[:, None] / critical
    logs = np.log([point.cost for point in points])[:, None] - _log_forms(ratios)
    precision = inverse.sum((1, 2))
    log_minimum = (inverse.sum(1)[:, None] @ logs)[:, 0] / precision[:, None]
    residuals = logs - log_minimum[:, None]
    solved = inverse @ residuals
    determinant = (np.linalg.slogdet(covariance)[1] + np.log(precision))[:, None]
    found = _log_probabilities() - ((residuals * solved).sum(1) + determinant) / 2
    return _Likelihood(
        found - found.max(),
        {
            "critical": critical,
            "log_minimum": log_minimum,
            "log_minimum_variance": 1.0 / precision,
            "log_batches": log_batches,
            "residuals": solved,
            "inverse": inverse,
        },
    )


def _log_forms(ratios: Array) -> Array:
    """Return log(E / Emin) in each case for each B / Bcrit."""
    return np.stack([form(ratios) for _, form in FORMS] * len(UNKNOWN_NOISE))


def _log_probabilities() -> Array:
    """Return the logarithm of the probability of each case before any measurement, as a column."""
    return np.log([probability for probability, _ in FORMS] * len(UNKNOWN_NOISE))[:, None]


def _noise_variance(errors: Sequence[float | None]) -> Array:
    """Return the variance of each measurement (columns) besides the deviation, in each case (rows)."""
    known = [
        [NOISE**2 + error**2 if error is not None else level**2 for error in errors]
        for level in UNKNOWN_NOISE
    ]
    return np.repeat(np.array(known), len(FORMS), axis=0)
