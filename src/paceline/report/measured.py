"""Events -> where the time and memory of a run went. Reads files only; needs neither torch nor the run to be alive."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.errors import RunError
from paceline.events import Accounted, Event, Saved, Started, Step
from paceline.report.summary import WARM_UP_STEPS

CONSISTENT = 1.25  # a rank is slow that is busy so many times as long as the mean


@dataclass(frozen=True)
class Measured:
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


@dataclass
class _Seen:
    """Starts that are alike, and what came after them."""

    starts: list[Started] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    accounted: list[Accounted] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)

    def is_like(self, event: Started) -> bool:
        names = ("task", "plan", "ranks", "batch", "device", "precision", "threads")
        return bool(self.starts) and all(getattr(self.starts[-1], name) == getattr(event, name) for name in names)


def measured(events: Iterable[Event]) -> Measured:
    """Of the last start, and of those before it that were like it. Raises RunError where no step was profiled."""
    seen, first = _Seen(), None
    for event in events:
        match event:
            case Started():
                seen = seen if seen.is_like(event) else _Seen()
                seen.starts.append(event)
                seen.steps = {number: step for number, step in seen.steps.items() if number <= event.step}
                first = first if first is not None else event.time
            case Step():
                seen.steps[event.step] = event
            case Accounted():
                seen.accounted.append(event)
            case Saved():
                seen.saved.append(event)
    if not seen.starts or first is None:
        raise RunError("nothing has happened in it yet")
    if not seen.accounted or not seen.steps:
        raise RunError("none of its steps was profiled")
    return _measured(seen, first)


def _measured(seen: _Seen, first: float) -> Measured:
    warm = {start.step + k for start in seen.starts for k in range(1, WARM_UP_STEPS + 1)}
    slowed = {one.step - k for one in seen.accounted for k in range(one.profiled)}
    clean = [step for number, step in seen.steps.items() if number not in warm | slowed]
    step_s = _mean([step.step_s for step in clean]) if clean else _mean([one.step_s for one in seen.accounted])
    weights = _weights([one.step for one in seen.accounted], max(seen.steps))
    shares = {name: _mean([one.seconds[name] / one.step_s for one in seen.accounted], weights) for name in seen.accounted[0].seconds}
    seconds = _scaled(shares, step_s, _input_s(seen, clean, weights))
    seconds["save"] = sum(saved.blocked_s for saved in seen.saved) / len(seen.steps)
    seconds["other"] = seconds.pop("other")
    spent = {one.step: one.costs_s for one in seen.accounted}
    fullest = max(seen.accounted, key=lambda one: sum(one.memory.values()))
    slow = _slow(seen.accounted)
    of_slow = [one for one in seen.accounted if one.slowest == slow]
    return Measured(
        started=seen.starts[-1],
        first=first,
        steps=len(clean),
        step_s=step_s + seconds["save"],
        seconds=seconds,
        memory=fullest.memory,
        fullest=fullest.fullest,
        profiles=len(seen.accounted),
        spent=sum(spent.values()) / sum(step.step_s for step in seen.steps.values()),
        slow=slow,
        slow_s=_mean([one.slowest_s for one in of_slow]) if of_slow else 0.0,
        busy_s=_mean([one.busy_s for one in of_slow]) if of_slow else 0.0,
    )


def _slow(accounted: list[Accounted]) -> int | None:
    """The rank that is slowest in more than half of the profiles."""
    found = Counter(one.slowest for one in accounted if one.slowest_s > CONSISTENT * one.busy_s)
    rank, times = max(found.items(), key=lambda pair: pair[1], default=(None, 0))
    return rank if 2 * times > len(accounted) else None


def _input_s(seen: _Seen, clean: list[Step], weights: list[float]) -> float:
    """Each step says how long rank 0 waited for its batch; how much more or less the others do, only those that were profiled."""
    more = _mean([one.seconds["input"] - one.input_s for one in seen.accounted], weights)
    first = _mean([step.data_s for step in clean]) if clean else _mean([one.input_s for one in seen.accounted], weights)
    return max(0.0, first + more)


def _scaled(shares: Mapping[str, float], step_s: float, input_s: float) -> dict[str, float]:
    """Profiled steps take longer than others: what is not input has its share of what is left."""
    input_s = min(input_s, step_s)
    rest = sum(share for name, share in shares.items() if name != "input")
    return {name: input_s if name == "input" else (step_s - input_s) * share / rest for name, share in shares.items()}


def _weights(steps: list[int], last: int) -> list[float]:
    """A profile stands for the steps until the next one."""
    return [max(1, until - step) for step, until in zip(steps, [*steps[1:], last], strict=True)]


def _mean(values: list[float], weights: list[float] | None = None) -> float:
    weights = weights or [1.0] * len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
