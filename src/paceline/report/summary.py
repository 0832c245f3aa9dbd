"""Events -> a summary of facts. Reads files only; needs neither torch nor the run to be alive."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.events import Ended, Evaluated, Event, Failed, Saved, Started, Step

WARM_UP_STEPS = 3  # left out of rates: they allocate, connect and compile


@dataclass(frozen=True)
class Summary:
    started: Started | None  # the last start
    starts: int
    steps: int  # done
    first_loss: float | None
    last_loss: float | None
    metrics: Mapping[str, float]  # of the last evaluation
    samples_per_s: float | None  # median over the steps
    step_s: float | None
    total_s: float  # of steps, evaluation and saving
    shares: Mapping[str, float]  # of total_s; parts that cannot be known are not among them
    saved: tuple[Saved, ...]
    failures: tuple[Failed, ...]
    ended: Ended | None  # None: interrupted, or still running


def summarize(events: Iterable[Event]) -> Summary:
    started: list[Started] = []
    steps: dict[int, Step] = {}
    evaluated: list[Evaluated] = []
    saved: list[Saved] = []
    failures: list[Failed] = []
    ended: Ended | None = None
    for event in events:
        match event:
            case Started():
                started.append(event)
                steps = {step: found for step, found in steps.items() if step <= event.step}
                evaluated = [found for found in evaluated if found.step <= event.step]
                saved = [found for found in saved if found.step <= event.step]
                ended = None
            case Step():
                steps[event.step] = event
            case Evaluated():
                evaluated.append(event)
            case Saved():
                saved.append(event)
            case Failed():
                failures.append(event)
            case Ended():
                ended = event
    warm = [step for number, step in sorted(steps.items()) if number > (started[-1].step if started else 0) + WARM_UP_STEPS] or list(
        steps.values()
    )
    step_s = sum(step.step_s for step in steps.values())
    data_s = sum(step.data_s for step in steps.values())
    evaluating_s = sum(event.seconds for event in evaluated)
    saving_s = sum(event.blocked_s for event in saved)
    total_s = step_s + evaluating_s + saving_s
    parts = {"data": data_s}
    if ended is not None and ended.communication is not None:
        parts["communication"] = ended.communication * (step_s - data_s)
    parts["compute" if "communication" in parts else "compute and communication"] = step_s - sum(parts.values())
    parts |= {"evaluation": evaluating_s, "save": saving_s}
    return Summary(
        started=started[-1] if started else None,
        starts=len(started),
        steps=max(steps, default=started[-1].step if started else 0),
        first_loss=steps[min(steps)].loss if steps else None,
        last_loss=steps[max(steps)].loss if steps else None,
        metrics=evaluated[-1].metrics if evaluated else {},
        samples_per_s=statistics.median(step.samples_per_s for step in warm) if warm else None,
        step_s=statistics.median(step.step_s for step in warm) if warm else None,
        total_s=total_s,
        shares={name: seconds / total_s for name, seconds in parts.items()} if total_s else {},
        saved=tuple(saved),
        failures=tuple(failures),
        ended=ended,
    )
