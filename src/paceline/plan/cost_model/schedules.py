"""What a pipeline schedule leaves idle, and how many micro-batches a stage keeps, in closed forms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class StageTimes(NamedTuple):
    """Seconds of one micro-batch on one rank, over all of its stages: forward, backward by inputs, backward by weights."""

    forward_s: float
    inputs_s: float
    weights_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.inputs_s + self.weights_s


@dataclass(frozen=True)
class PipelineSchedule:
    """p ranks, m micro-batches, v stages a rank.

    idle: of (p, m, v, stage): seconds that filling and draining costs one rank, of p equal ones.
    waits: how often the time to send an activation stands in the way of a rank that could compute.
    kept: micro-batches whose activations rank r has at its worst moment, in units of all its stages.
    splits: whether gradients of weights are computed apart from those of activations.
    """

    idle: Callable[[int, int, int, StageTimes], float]
    waits: Callable[[int, int, int], float]
    kept: Callable[[int, int, int, int], float]
    splits: bool = False
    folded: bool = False


def _in_turns(p: int, m: int, v: int, r: int) -> float:
    """Warm-up of interleaved 1F1B (arXiv 2104.04473, section 2.2.2): 2·(p - r - 1) + (v - 1)·p stages, and one more under way."""
    return min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) / v


def _one_for_one(p: int, m: int, v: int, r: int) -> float:
    return float(min(m, p - r))


def _alike(p: int, m: int, v: int, r: int) -> float:
    return float(min(m, p))


def _twice(p: int, m: int, v: int, r: int) -> float:
    return float(min(m, 2 * p - 1))


def _filled(p: int, m: int, t: StageTimes, most: float) -> float:
    """The first rank waits for its last gradient through p - 1 forward and backward passes, and meanwhile computes gradients of weights
    that it kept for that: at most so many, and no more than there are before the last."""
    return max(0.0, (p - 1) * (t.forward_s + t.inputs_s) - min(most, m - 1) * t.weights_s)


# idle: arXiv 2104.04473, sections 2.2.1 and 2.2.2; arXiv 2401.10241, table 2, for ZB-H1 and H2, and the same with as many as there are for
# the automatic schedule ZB-2p. The zero-bubble schedule of torch is interleaved, and it and torch's ZB-V (zbv) have (p - 1)/(3·v·m) where
# the three passes are equal (docs/decisions.md); zb-v is the published one, whose ranks do not wait for each other at the end of a step.
# waits: 1F1B has p micro-batches under way in a round of p·(F + B) and 2·(p - 1) sends, so that each micro-batch waits for 2·(p - 1)/p of
# them; the others wait while they fill and drain alone.
SCHEDULES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * t.total_s, lambda p, m, v: 2.0 * (p - 1), lambda p, m, v, r: float(m)
    ),
    "1f1b": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * t.total_s,
        lambda p, m, v: 2 * (p - 1) / p * m + 2 * (p - 2),
        _one_for_one,
    ),
    "interleaved": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * t.total_s / v, lambda p, m, v: float(2 * p * v - p - 2), _in_turns
    ),
    "zero-bubble": PipelineSchedule(
        lambda p, m, v, t: _filled(p, m * v, t, p - 1) / v,
        lambda p, m, v: float(2 * p * v - p - 2),
        _in_turns,
        splits=True,
    ),
    "zbv": PipelineSchedule(
        lambda p, m, v, t: _filled(p, 2 * m, t, p - 1) / 2,
        lambda p, m, v: 4.0 * (p - 1),
        _alike,
        splits=True,
        folded=True,
    ),
    "zb-v": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * max(0.0, t.forward_s + t.inputs_s - 2 * t.weights_s) / 4,
        lambda p, m, v: 8.0 * (p - 1),
        _alike,
        splits=True,
        folded=True,
    ),
    "zb-h1": PipelineSchedule(
        lambda p, m, v, t: _filled(p, m, t, p - 1), lambda p, m, v: 4.0 * (p - 1), _alike, splits=True
    ),
    "zb-h2": PipelineSchedule(
        lambda p, m, v, t: _filled(p, m, t, 2 * (p - 1)), lambda p, m, v: 2.0 * (p - 1), _twice, splits=True
    ),
    "zb-2p": PipelineSchedule(
        lambda p, m, v, t: _filled(p, m, t, m), lambda p, m, v: 1.5 * (p - 1), _twice, splits=True
    ),
}


def rate(schedule: str, p: int, m: int, v: int, stage: StageTimes, send_s: float) -> float:
    """Share of a step's time that a rank is idle, of p equal ones."""
    row = SCHEDULES[schedule]
    work = m * stage.total_s
    idle = row.idle(p, m, v, stage) + row.waits(p, m, v) * send_s
    return idle / (work + idle)
