"""Cost: predicted time and memory of a plan, part by part, each with its source."""

from dataclasses import dataclass, replace
from math import hypot, sqrt
from typing import NamedTuple

# Of a step: one configuration differed by 0 to 11 % between two published runs of the same authors.
RUN_NOISE = 0.05


@dataclass(frozen=True, slots=True)
class CostPart:
    """A part of the step's seconds or of a rank's bytes; error: standard deviation relative to `value`."""

    name: str
    value: float
    error: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """Peak memory of the rank with the highest peak.

    The parts add up to it. rank: of the pipeline. limit_bytes: of a device.
    """

    parts: tuple[CostPart, ...]
    rank: int
    limit_bytes: float

    @property
    def peak_bytes(self) -> float:
        return sum(part.value for part in self.parts)

    @property
    def error(self) -> float:
        return _combined_error(self.parts, self.peak_bytes)

    def fits(self, margin: float = 0.0) -> bool:
        """Whether the peak leaves the share `margin` of the device's memory free."""
        return self.peak_bytes <= self.limit_bytes * (1 - margin)


@dataclass(frozen=True, slots=True)
class TimeCost:
    """Time of one step.

    The parts add up to it. flops: of the model on one rank; hardware_flops: with recomputation.
    extrapolation_error: relative, common to all plans, of a device or a size that nothing was fitted to.
    measured_error: relative standard error, if the step was measured; the parts are then scaled to it.
    """

    parts: tuple[CostPart, ...]
    flops: float
    hardware_flops: float
    tokens: float  # of all ranks
    samples: float
    peak_flops: float | None
    guesses: tuple[str, ...] = ()
    extrapolation_error: float = 0.0
    measured_error: float | None = None

    @property
    def step_s(self) -> float:
        return sum(part.value for part in self.parts)

    @property
    def error(self) -> float:
        """Standard deviation relative to `step_s`."""
        return hypot(self.error_of_plan, self.extrapolation_error)

    @property
    def error_of_plan(self) -> float:
        """The part of the error that differs between plans on the same devices."""
        if self.measured_error is not None:
            return hypot(RUN_NOISE, self.measured_error)
        return hypot(RUN_NOISE, _combined_error(self.parts, self.step_s))

    @property
    def is_measured(self) -> bool:
        return self.measured_error is not None

    def scaled_to(self, step_s: float, error: float) -> "TimeCost":
        """Return the same parts, scaled to a measured step with this relative standard error."""
        factor = step_s / self.step_s
        parts = tuple(replace(part, value=factor * part.value) for part in self.parts)
        return replace(self, parts=parts, guesses=(), extrapolation_error=0.0, measured_error=error)

    @property
    def extrapolated(self) -> bool:
        return bool(self.guesses)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def model_flops_per_s(self) -> float:
        """Rate of one rank, without recomputation."""
        return self.flops / self.step_s

    @property
    def hardware_flops_per_s(self) -> float:
        return self.hardware_flops / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization; None if the peak is unknown."""
        return self.model_flops_per_s / self.peak_flops if self.peak_flops else None


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time and memory of a plan; micro_batch: samples that a data rank processes at once."""

    time: TimeCost
    memory: MemoryCost
    micro_batch: int

    @property
    def step_s(self) -> float:
        return self.time.step_s

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak_bytes


def list_slower_parts(cost: Cost, best: Cost) -> list[CostPart]:
    """Return how many seconds longer each part of a step takes than in the best plan, largest first.

    A shorter part is negative.
    """
    own, other = ({part.name: part for part in compared.time.parts} for compared in (cost, best))
    differences = []
    for name in own.keys() | other.keys():
        seconds = (own[name].value if name in own else 0.0) - (other[name].value if name in other else 0.0)
        differences.append(CostPart(name, seconds, (own.get(name) or other[name]).error))
    return sorted(differences, key=lambda part: (-part.value, part.name))


def _combined_error(parts: tuple[CostPart, ...], total: float) -> float:
    """Return the relative error of the sum of independent parts."""
    return sqrt(sum((part.value * part.error) ** 2 for part in parts)) / total if total else 0.0


CURRENCY = "USD"  # of prices, unless another is given


@dataclass(frozen=True, slots=True)
class Bill:
    """Time, energy and price of a whole training.

    co2_kg: emitted for the energy, if that is known. currency: of the price.
    """

    seconds: float
    device_hours: float
    kWh: float | None
    price: float | None
    co2_kg: float | None = None
    currency: str = CURRENCY

    @property
    def days(self) -> float:
        return self.seconds / 86400


# Of a device's maximum power, during a training (Patterson et al. 2021, arXiv 2104.10350: V100 at 330 of 300
# W to 250).
USED_POWER = 0.85
FACILITY_OVERHEAD = 1.1  # power usage effectiveness of a modern data centre (the same, table 4)


def compute_bill(
    step_s: float,
    steps: float,
    devices: int,
    power_W: float | None = None,
    price_per_hour: float | None = None,
    facility: float = FACILITY_OVERHEAD,
    co2_g_per_kWh: float | None = None,
    currency: str = CURRENCY,
) -> Bill:
    """Return the bill of `steps` steps on `devices` devices. `facility`: power usage effectiveness."""
    seconds = step_s * steps
    hours = seconds / 3600 * devices
    kWh = hours * power_W * USED_POWER * facility / 1000 if power_W is not None else None
    price = hours * price_per_hour if price_per_hour is not None else None
    co2_kg = kWh * co2_g_per_kWh / 1000 if kWh is not None and co2_g_per_kWh is not None else None
    return Bill(seconds, hours, kWh, price, co2_kg, currency)


def training_days(tokens: float, params: float, devices: int, flops_per_s: float) -> float:
    """Return the days of a training with recomputation: 8·T·P / (n·X) (arXiv 2104.04473, equation 4)."""
    return 8 * tokens * params / (devices * flops_per_s) / 86400


class Estimate(NamedTuple):
    """A training on the back of an envelope: 6 FLOPs for each parameter and token, at one rate.

    Frozen parameters have 4, since their gradients are not computed.

    device_years: of 365 days. billed_years: the same, without the fraction of a year from 100 years on, which
    is less than the estimate is worth. price: of the billed years.
    """

    flops: float
    device_years: float
    billed_years: float
    price: float | None


def estimate_training(
    params: float, tokens: float, flops_per_s: float, price_per_hour: float | None = None, frozen: float = 0.0
) -> Estimate:
    """Return the estimate of a training whose devices reach `flops_per_s` each.

    frozen: how many of the parameters are frozen.
    """
    flops = (6 * params - 2 * frozen) * tokens
    years = flops / flops_per_s / (365 * 86400)
    billed = float(int(years)) if years >= 100 else round(years, 2) if years >= 1 else years
    price = billed * 365 * 24 * price_per_hour if price_per_hour is not None else None
    return Estimate(flops, years, billed, price)
