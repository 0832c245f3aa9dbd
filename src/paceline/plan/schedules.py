"""Pipeline schedules in one table: what each requires, what it costs, and the class of torch that runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple


class StageTimes(NamedTuple):
    """Seconds of one micro-batch over all stages of one rank: forward, backward by inputs and by weights."""

    forward_s: float
    inputs_s: float
    weights_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.inputs_s + self.weights_s


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline of p ranks with v stages per rank, which processes m micro-batches.

    idle_s: seconds that filling and draining costs one rank, from (p, m, v, times of a micro-batch); all
    ranks take equal time.
    exposed_sends: sends of an activation that delay a rank, from (p, m, v).
    kept: micro-batches whose activations rank r keeps at its peak, from (p, m, v, r), in units of all stages
    of the rank.
    microbatches: what the number of micro-batches must be.
    min_stages, max_stages: stages per rank; a plan without `stages` has `min_stages`. None: no upper limit.
    searched_stages: stages per rank that the search for a plan tries.
    splits_backward: whether gradients of weights are computed separately from those of activations.
    folded: whether the stages go through the ranks and back, so that the first rank also has the last stage.
    torch_class: name in `torch.distributed.pipelining`; empty: a published schedule that only predictions
    know.
    """

    idle_s: Callable[[int, int, int, StageTimes], float]
    exposed_sends: Callable[[int, int, int], float]
    kept: Callable[[int, int, int, int], float]
    microbatches: Literal["any", "at least pp", "multiple of pp"] = "any"
    min_stages: int = 1
    max_stages: int | None = 1
    searched_stages: tuple[int, ...] = ()
    splits_backward: bool = False
    folded: bool = False
    torch_class: str = ""

    def allows(self, microbatches: int, pp: int) -> bool:
        """Whether a pipeline of `pp` ranks can process `microbatches` micro-batches under this schedule."""
        if self.microbatches == "multiple of pp":
            return microbatches % pp == 0
        return self.microbatches == "any" or microbatches >= pp


def _kept_interleaved(p: int, m: int, v: int, r: int) -> float:
    """Return the warm-up of interleaved 1F1B: 2·(p - r - 1) + (v - 1)·p stages, and one more in progress.

    Source: arXiv 2104.04473, section 2.2.2.
    """
    return min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) / v


def _kept_1f1b(p: int, m: int, v: int, r: int) -> float:
    return float(min(m, p - r))


def _kept_equal(p: int, m: int, v: int, r: int) -> float:
    """Every rank keeps what the first rank keeps under 1F1B."""
    return float(min(m, p))


def _kept_double(p: int, m: int, v: int, r: int) -> float:
    return float(min(m, 2 * p - 1))


def _idle_after_weights_s(p: int, m: int, t: StageTimes, max_deferred: float) -> float:
    """Return what remains of the first rank's wait for its last gradient, p - 1 forward and backward passes.

    Meanwhile it computes gradients of weights that it deferred: at most `max_deferred`, and at most those of
    the micro-batches before the last.
    """
    return max(0.0, (p - 1) * (t.forward_s + t.inputs_s) - min(max_deferred, m - 1) * t.weights_s)


# idle_s: arXiv 2104.04473, sections 2.2.1 and 2.2.2; arXiv 2401.10241, table 2, for ZB-H1 and H2; the same
# without a limit of deferred gradients for the automatic schedule ZB-2p. torch's zero-bubble schedule is
# interleaved. It and torch's ZB-V (zbv) have (p - 1)/(3·v·m) if the three passes take equal time
# (docs/decisions.md). zb-v is the published schedule, whose ranks do not wait for each other at the end of a
# step.
# exposed_sends: 1F1B has p micro-batches in progress in a round of p·(F + B) and 2·(p - 1) sends, so that
# each micro-batch waits for 2·(p - 1)/p of them. The other schedules wait only while they fill and drain.
# searched_stages: 1F1B is as fast as GPipe and keeps less. Interleaved is also tried with 4 stages, for where
# 2 do not hide the bubble.
SCHEDULES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * t.total_s,
        lambda p, m, v: 2.0 * (p - 1),
        lambda p, m, v, r: float(m),
        torch_class="ScheduleGPipe",
    ),
    "1f1b": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * t.total_s,
        lambda p, m, v: 2 * (p - 1) / p * m + 2 * (p - 2),
        _kept_1f1b,
        microbatches="at least pp",
        searched_stages=(1,),
        torch_class="Schedule1F1B",
    ),
    "interleaved": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * t.total_s / v,
        lambda p, m, v: float(2 * p * v - p - 2),
        _kept_interleaved,
        microbatches="multiple of pp",
        min_stages=2,
        max_stages=None,
        searched_stages=(2, 4),
        torch_class="ScheduleInterleaved1F1B",
    ),
    "zero-bubble": PipelineSchedule(
        lambda p, m, v, t: _idle_after_weights_s(p, m * v, t, p - 1) / v,
        lambda p, m, v: float(2 * p * v - p - 2),
        _kept_interleaved,
        microbatches="multiple of pp",
        min_stages=2,
        max_stages=None,
        searched_stages=(2,),
        splits_backward=True,
        torch_class="ScheduleInterleavedZeroBubble",
    ),
    "zbv": PipelineSchedule(
        lambda p, m, v, t: _idle_after_weights_s(p, 2 * m, t, p - 1) / 2,
        lambda p, m, v: 4.0 * (p - 1),
        _kept_equal,
        microbatches="multiple of pp",
        min_stages=2,
        max_stages=2,
        searched_stages=(2,),
        splits_backward=True,
        folded=True,
        torch_class="ScheduleZBVZeroBubble",
    ),
    "zb-v": PipelineSchedule(
        lambda p, m, v, t: (p - 1) * max(0.0, t.forward_s + t.inputs_s - 2 * t.weights_s) / 4,
        lambda p, m, v: 8.0 * (p - 1),
        _kept_equal,
        min_stages=2,
        max_stages=2,
        splits_backward=True,
        folded=True,
    ),
    "zb-h1": PipelineSchedule(
        lambda p, m, v, t: _idle_after_weights_s(p, m, t, p - 1),
        lambda p, m, v: 4.0 * (p - 1),
        _kept_equal,
        splits_backward=True,
    ),
    "zb-h2": PipelineSchedule(
        lambda p, m, v, t: _idle_after_weights_s(p, m, t, 2 * (p - 1)),
        lambda p, m, v: 2.0 * (p - 1),
        _kept_double,
        splits_backward=True,
    ),
    "zb-2p": PipelineSchedule(
        lambda p, m, v, t: _idle_after_weights_s(p, m, t, m),
        lambda p, m, v: 1.5 * (p - 1),
        _kept_double,
        splits_backward=True,
    ),
}
# The values of the plan key pp_schedule.
RUNNABLE_SCHEDULES: Mapping[str, PipelineSchedule] = {
    name: schedule for name, schedule in SCHEDULES.items() if schedule.torch_class
}


def bubble_share(schedule: str, p: int, m: int, v: int, stage: StageTimes, send_s: float) -> float:
    """Return the share of a step's time that a rank is idle. All ranks take equal time."""
    row = SCHEDULES[schedule]
    work_s = m * stage.total_s
    idle_s = row.idle_s(p, m, v, stage) + row.exposed_sends(p, m, v) * send_s
    return idle_s / (work_s + idle_s)
