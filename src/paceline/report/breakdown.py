"""The breakdown of a run's time and memory, from its events. Requires neither torch nor a live run."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from paceline.errors import RunError
from paceline.events import Event, Profiled, Saved, Started, Step
from paceline.report.history import History, HistoryPoint
from paceline.report.summary import WARM_UP_STEPS

SLOW_RATIO = 1.25  # a rank is slow if it is busy for more than this multiple of the mean
MAX_PROFILED = 10_000  # steps of one profile; a damaged line may have more


@dataclass(frozen=True)
class RunBreakdown:
    """The mean step of a run, without the first steps and the profiled steps."""

    started: Started  # the last start
    first: float  # time of the first start
    steps: int  # number of steps in the mean
    step_s: float  # including its share of saves
    seconds: Mapping[str, float]  # by part; they add up to step_s
    memory: Mapping[str, float]  # bytes at the peak by part, of the rank with peak memory
    peak_rank: int
    profiles: int
    profiling_share: float  # of the time of all steps
    straggler: int | None  # rank for which the others wait
    straggler_busy_s: float  # per step
    mean_busy_s: float  # per step, over the ranks
    sampled: int | None = None  # number of steps read of a long run, which represent all; None: all were read

    @property
    def name(self) -> str:
        """The time of the first start, which identifies the run in a cluster.json."""
        return datetime.fromtimestamp(self.first, UTC).isoformat()


class RunBreakdownBuilder:
    """Builds a RunBreakdown from events in bounded memory. A step may represent several.

    Only the last start counts, and those before it with the same plan, ranks and so on."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._starts: list[Started] = []
        self._history = History()
        self._profiled: list[Profiled] = []
        self._saving_s = 0.0

    def add(self, event: Event, count: int = 1) -> None:
        match event:
            case Started():
                if not self._is_same_training(event):
                    self._reset()
                self._starts.append(event)
                self._history.cut(event.step)
                self._first = self._first if self._first is not None else event.time
            case Step():
                self._history.add(event, count)
            case Profiled() if event.step_s > 0:
                self._profiled.append(event)
            case Saved():
                self._saving_s += event.blocked_s

    def _is_same_training(self, event: Started) -> bool:
        names = ("task", "plan", "ranks", "batch", "device", "precision", "threads")
        return bool(self._starts) and all(
            getattr(self._starts[-1], name) == getattr(event, name) for name in names
        )

    def build(self) -> RunBreakdown:
        """Return the breakdown. Raises RunError if no step was profiled."""
        profiled, points = self._profiled, self._history.points
        if not self._starts or self._first is None:
            raise RunError("it has no events yet")
        if not profiled or not points:
            raise RunError("none of its steps was profiled")
        warm = {start.step + k for start in self._starts for k in range(1, WARM_UP_STEPS + 1)}
        slowed = {
            profile.step - k for profile in profiled for k in range(min(profile.num_steps, MAX_PROFILED))
        }
        clean = [point for point in points if point.step not in warm and point.step not in slowed]
        counts = [float(point.num_steps) for point in clean]
        step_s = (
            _mean([point.step_s for point in clean], counts)
            if clean
            else _mean([profile.step_s for profile in profiled])
        )
        weights = _count_steps_until_next([profile.step for profile in profiled], points[-1].step)
        names = dict.fromkeys(name for profile in profiled for name in profile.seconds)
        shares = {
            name: _mean([profile.seconds.get(name, 0.0) / profile.step_s for profile in profiled], weights)
            for name in names
        }
        seconds = _scale_to_step(shares, step_s, _mean_input_s(profiled, clean, counts, weights))
        seconds["save"] = self._saving_s / self._history.num_steps
        seconds["other"] = seconds.pop("other", 0.0)
        costs_s = {profile.step: profile.costs_s for profile in profiled}
        peak = max(profiled, key=lambda profile: sum(profile.memory.values()))
        straggler = _find_straggler(profiled)
        slow_profiles = [profile for profile in profiled if profile.slowest == straggler]
        total_s = self._history.step_s
        return RunBreakdown(
            started=self._starts[-1],
            first=self._first,
            steps=sum(point.num_steps for point in clean),
            step_s=step_s + seconds["save"],
            seconds=seconds,
            memory=peak.memory,
            peak_rank=peak.fullest,
            profiles=len(profiled),
            profiling_share=sum(costs_s.values()) / total_s if total_s else 0.0,
            straggler=straggler,
            straggler_busy_s=(
                _mean([profile.slowest_s for profile in slow_profiles]) if slow_profiles else 0.0
            ),
            mean_busy_s=_mean([profile.busy_s for profile in slow_profiles]) if slow_profiles else 0.0,
            sampled=len(points) if self._history.is_thinned else None,
        )


def break_down(events: Iterable[Event]) -> RunBreakdown:
    """Return the breakdown of a run. Raises RunError if no step was profiled."""
    builder = RunBreakdownBuilder()
    for event in events:
        builder.add(event)
    return builder.build()


def _find_straggler(profiled: list[Profiled]) -> int | None:
    """Return the rank that is slowest in more than half of the profiles; None if there is none."""
    counts = Counter(
        profile.slowest for profile in profiled if profile.slowest_s > SLOW_RATIO * profile.busy_s
    )
    rank, count = max(counts.items(), key=lambda pair: pair[1], default=(None, 0))
    return rank if 2 * count > len(profiled) else None


def _mean_input_s(
    profiled: list[Profiled], clean: list[HistoryPoint], counts: list[float], weights: list[float]
) -> float:
    """Return the mean seconds of input per step over all ranks.

    Each step has the time that rank 0 waited for its batch; only profiled steps have that of other ranks."""
    others_more_s = _mean(
        [profile.seconds.get("input", 0.0) - profile.input_s for profile in profiled], weights
    )
    rank_0_s = (
        _mean([point.data_s for point in clean], counts)
        if clean
        else _mean([profile.input_s for profile in profiled], weights)
    )
    return max(0.0, rank_0_s + others_more_s)


def _scale_to_step(shares: Mapping[str, float], step_s: float, input_s: float) -> dict[str, float]:
    """Return the seconds of each part in a step that was not profiled.

    Profiled steps take longer: all parts except input share the rest of the step in proportion."""
    input_s = min(input_s, step_s)
    rest = sum(share for name, share in shares.items() if name != "input") or 1.0
    return {
        name: input_s if name == "input" else (step_s - input_s) * share / rest
        for name, share in shares.items()
    }


def _count_steps_until_next(steps: list[int], last: int) -> list[float]:
    """Return the number of steps that each profile represents: those until the next profile."""
    return [max(1, until - step) for step, until in zip(steps, [*steps[1:], last], strict=True)]


def _mean(values: list[float], weights: list[float] | None = None) -> float:
    weights = weights or [1.0] * len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
