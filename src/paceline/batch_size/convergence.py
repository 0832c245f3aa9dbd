"""Samples to a target as a function of the batch: E = Emin · (1 + B / Bcrit), fitted to few measurements.

The form is that of McCandlish et al., An empirical model of large-batch training, 2018, equation 2.11. Emin
is reached with small batches, and a training with B = Bcrit needs twice as many samples.

Few measurements determine Bcrit badly, and measurements deviate from the form together: neighbouring batches
share hyper-parameters. So the logarithm of E has a deviation that is correlated along log B (an
Ornstein-Uhlenbeck process), and log Bcrit has a distribution over trainings, whose mean the trainings of one
fit share. All of it is integrated on a grid; nothing is optimized, and no start value matters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import BenchError

Array = npt.NDArray[np.float64]

# Of the logarithm of E, from 53 published points of seven trainings.
DEVIATION = 0.1  # standard deviation of a training from the form
DEVIATION_LENGTH = 1.0  # in log B, over which the deviation changes
NOISE = 0.02  # of each point, besides its standard error
# Of log(Bcrit / largest measured batch): mean over trainings, its uncertainty, spread between trainings.
CRITICAL_MEAN = 1.0
CRITICAL_MEAN_ERROR = 0.7
CRITICAL_SPREAD = 1.0

GRID = np.linspace(-5.0, 7.0, 241)  # log(Bcrit / largest measured batch)
MEANS = CRITICAL_MEAN + CRITICAL_MEAN_ERROR * np.linspace(-3.0, 3.0, 31)


@dataclass(frozen=True)
class Measurement:
    """Samples (or epochs) to the target with a batch. error: standard error, relative to `cost`."""

    batch: float
    cost: float
    error: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("cost", self.cost)):
            if not (math.isfinite(value) and value > 0):
                raise BenchError(f"a measured {name} is {value}; it must be a positive number")
        if not (math.isfinite(self.error) and self.error >= 0):
            raise BenchError(f"the relative error of a measurement is {self.error}; it must be at least 0")


@dataclass(frozen=True)
class Interval:
    """A median, and the limits of the central 68 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ConvergenceCurve:
    """E = Emin · (1 + B / Bcrit) of one training, as a distribution over Bcrit.

    weights: probability of each Bcrit of the grid. log_minimum: log Emin for each of them, and its variance.
    residuals: of each measurement (rows) for each Bcrit (columns), multiplied by the inverse covariance.
    """

    critical: Array
    weights: Array
    log_minimum: Array
    log_minimum_variance: float
    log_batches: Array
    residuals: Array
    inverse: Array

    @property
    def critical_batch(self) -> Interval:
        """The batch that needs twice as many samples as small batches."""
        return self._interval(np.log(self.critical), 0.0)

    @property
    def minimum(self) -> Interval:
        """Emin, in the unit of the measurements."""
        return self._interval(self.log_minimum, math.sqrt(self.log_minimum_variance))

    def predict(self, batch: float, error: float = 0.0) -> Interval:
        """Return E at a batch. error: relative standard error of the measurement that it is compared with."""
        covariance = _covary(np.array([math.log(batch)]), self.log_batches)
        values = self.log_minimum + np.log1p(batch / self.critical) + (covariance @ self.residuals)[0]
        explained = float((covariance @ self.inverse @ covariance.T)[0, 0])
        leverage = 1.0 - float((covariance @ self.inverse).sum())
        variance = max(0.0, DEVIATION**2 - explained) + leverage**2 * self.log_minimum_variance
        return self._interval(values, math.sqrt(variance + NOISE**2 + error**2))

    def form(self, batch: float) -> float:
        """Return Emin · (1 + B / Bcrit) at a batch, without the deviations of measurements."""
        return math.exp(float(self.weights @ (self.log_minimum + np.log1p(batch / self.critical))))

    def _interval(self, values: Array, spread: float) -> Interval:
        """Return the interval of the exponential of values on the grid, each with a normal error `spread`.

        The middle is the mean of the logarithms, which differs little from the median.
        """
        mean = float(self.weights @ values)
        if spread == 0.0:
            order = np.argsort(values)
            cumulated = np.cumsum(self.weights[order])
            low, middle, high = (
                float(np.interp(share, cumulated, values[order])) for share in (0.16, 0.5, 0.84)
            )
            return Interval(math.exp(middle), math.exp(low), math.exp(high))
        width = math.sqrt(float(self.weights @ (values - mean) ** 2) + spread**2)
        return Interval(math.exp(mean), math.exp(mean - width), math.exp(mean + width))


@dataclass(frozen=True)
class _Likelihood:
    """The likelihood of Bcrit given the measurements of one training, with Emin integrated out."""

    logs: Array
    curve: Mapping[str, Any]


def fit_curves(trainings: Mapping[str, Sequence[Measurement]]) -> dict[str, ConvergenceCurve]:
    """Return the curve of each training. The trainings share the mean of log(Bcrit / largest batch)."""
    likelihoods = {name: _likelihood(points) for name, points in trainings.items()}
    prior = np.exp(-(((GRID[None] - MEANS[:, None]) / CRITICAL_SPREAD) ** 2) / 2)
    prior /= prior.sum(1, keepdims=True)
    evidence = {name: np.log(prior @ np.exp(found.logs)) for name, found in likelihoods.items()}
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
    errors = np.array([point.error for point in points])
    critical = max(point.batch for point in points) * np.exp(GRID)
    inverse = np.linalg.inv(_covary(log_batches, log_batches) + np.diag(NOISE**2 + errors**2))
    logs = np.log([point.cost for point in points])[:, None]
    logs = logs - np.log1p(np.array([point.batch for point in points])[:, None] / critical[None])
    precision = float(inverse.sum())
    log_minimum = inverse.sum(0) @ logs / precision
    residuals = logs - log_minimum
    solved = inverse @ residuals
    chi_squares = (residuals * solved).sum(0)
    return _Likelihood(
        -(chi_squares - chi_squares.min()) / 2,
        {
            "critical": critical,
            "log_minimum": log_minimum,
            "log_minimum_variance": 1.0 / precision,
            "log_batches": log_batches,
            "residuals": solved,
            "inverse": inverse,
        },
    )
