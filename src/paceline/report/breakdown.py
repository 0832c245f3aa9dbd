"""Events -> where the time and memory of a run went. Reads files only; needs neither torch nor the run to be alive."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.errors import RunError
from paceline.events import Event, Profiled, Saved, Started, Step
from paceline.report.history import History, HistoryPoint
from paceline.report.summary import WARM_UP_STEPS

CONSISTENT = 1.25  # a rank is slow that is busy so many times as long as the mean
MOST_PROFILED = 10_000  # steps of one profile, whatever a damaged line says


@dataclass(frozen=True)
class RunBreakdown:
    """Of a step, the mean over those that were neither the first nor profiled."""

    started: Started  # the last start
    first: float  # when the run was started for the first time
    steps: int  # that the mean is over
    step_s: float  # with what saves take of it
    seconds: Mapping[str, float]  # by part; they add up to step_s
    memory: Mapping[str, float]  # bytes at the peak by part, of the rank that holds most
    fullest: int  # that rank
    profiles: int
    spent: float  # share of the time of all steps that profiling took
    slow: int | None  # a rank for which the others wait
    slow_s: float  # that it is busy in a step, and
    busy_s: float  # the mean over the ranks
    sampled: int | None = None  # of a long run: so many of its steps were looked at, and stand for all


class RunBreakdownBuilder:
    """Takes events as they come, in bounded memory; a step may stand for several. Holds the starts that are like the last one."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._starts: list[Started] = []
        self._history = History()
        self._profiled: list[Profiled] = []
        self._saving_s = 0.0

    def add(self, event: Event, count: int = 1) -> None:
        match event:
            case Started():
                if not self._is_like(event):
                    self._begin()
                self._starts.append(event)
                self._history.cut(event.step)
                self._first = self._first if self._first is not None else event.time
            case Step():
                self._history.add(event, count)
            case Profiled() if event.step_s > 0:
                self._profiled.append(event)
            case Saved():
                self._saving_s += event.blocked_s

    def _is_like(self, event: Started) -> bool:
        names = ("task", "plan", "ranks", "batch", "device", "precision", "threads")
        return bool(self._starts) and all(
            getattr(self._starts[-1], name) == getattr(event, name) for name in names
        )

    def measured(self) -> RunBreakdown:
        """Of the last start, and of those before it that were like it. Raises RunError where no step was profiled."""
        profiled, points = self._profiled, self._history.points
        if not self._starts or self._first is None:
            raise RunError("nothing has happened in it yet")
        if not profiled or not points:
            raise RunError("none of its steps was profiled")
        warm = {start.step + k for start in self._starts for k in range(1, WARM_UP_STEPS + 1)}
        slowed = {one.step - k for one in profiled for k in range(min(one.num_steps, MOST_PROFILED))}
        clean = [point for point in points if point.step not in warm and point.step not in slowed]
        counts = [float(point.num_steps) for point in clean]
        step_s = (
            _mean([point.step_s for point in clean], counts)
            if clean
            else _mean([one.step_s for one in profiled])
        )
        weights = _weights([one.step for one in profiled], points[-1].step)
        names = dict.fromkeys(name for one in profiled for name in one.seconds)
        shares = {
            name: _mean([one.seconds.get(name, 0.0) / one.step_s for one in profiled], weights)
            for name in names
        }
        seconds = _scaled(shares, step_s, _input_s(profiled, clean, counts, weights))
        seconds["save"] = self._saving_s / self._history.num_steps
        seconds["other"] = seconds.pop("other", 0.0)
        spent = {one.step: one.costs_s for one in profiled}
        fullest = max(profiled, key=lambda one: sum(one.memory.values()))
        slow = _slow(profiled)
        of_slow = [one for one in profiled if one.slowest == slow]
        all_s = self._history.step_s
        return RunBreakdown(
            started=self._starts[-1],
            first=self._first,
            steps=sum(point.num_steps for point in clean),
            step_s=step_s + seconds["save"],
            seconds=seconds,
            memory=fullest.memory,
            fullest=fullest.fullest,
            profiles=len(profiled),
            spent=sum(spent.values()) / all_s if all_s else 0.0,
            slow=slow,
            slow_s=_mean([one.slowest_s for one in of_slow]) if of_slow else 0.0,
            busy_s=_mean([one.busy_s for one in of_slow]) if of_slow else 0.0,
            sampled=len(points) if self._history.is_thinned else None,
        )


def measured(events: Iterable[Event]) -> RunBreakdown:
    """Of the last start, and of those before it that were like it. Raises RunError where no step was profiled."""
    builder = RunBreakdownBuilder()
    for event in events:
        builder.add(event)
    return builder.measured()


def _slow(profiled: list[Profiled]) -> int | None:
    """The rank that is slowest in more than half of the profiles."""
    found = Counter(one.slowest for one in profiled if one.slowest_s > CONSISTENT * one.busy_s)
    rank, times = max(found.items(), key=lambda pair: pair[1], default=(None, 0))
    return rank if 2 * times > len(profiled) else None


def _input_s(
    profiled: list[Profiled], clean: list[HistoryPoint], counts: list[float], weights: list[float]
) -> float:
    """Each step says how long rank 0 waited for its batch; how much more or less the others do, only those that were profiled."""
    more = _mean([one.seconds.get("input", 0.0) - one.input_s for one in profiled], weights)
    first = (
        _mean([point.data_s for point in clean], counts)
        if clean
        else _mean([one.input_s for one in profiled], weights)
    )
    return max(0.0, first + more)


def _scaled(shares: Mapping[str, float], step_s: float, input_s: float) -> dict[str, float]:
    """Profiled steps take longer than others: what is not input has its share of what is left."""
    input_s = min(input_s, step_s)
    rest = sum(share for name, share in shares.items() if name != "input") or 1.0
    return {
        name: input_s if name == "input" else (step_s - input_s) * share / rest
        for name, share in shares.items()
    }


def _weights(steps: list[int], last: int) -> list[float]:
    """A profile stands for the steps until the next one."""
    return [max(1, until - step) for step, until in zip(steps, [*steps[1:], last], strict=True)]


def _mean(values: list[float], weights: list[float] | None = None) -> float:
    weights = weights or [1.0] * len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
