"""The events of a run besides its steps, in bounded memory."""

import bisect
from array import array
from collections import deque
from collections.abc import Mapping

from paceline.events import Evaluated, Event, Failed, Noted, Profiled, Saved, Stalled, Started, Step
from paceline.report.curves import BucketColumn, keep_last_of_pairs

MAX_EVENTS = 1000  # of each kind: the last ones are kept
MAX_METRICS = 64  # others are counted in `omitted_metrics`
MAX_EVALUATIONS = 2**12  # then neighbours are merged
MAX_OMITTED = 10**5


class EvaluationCurves:
    """Each metric by evaluation. Neighbours of many evaluations are merged, with their extremes."""

    def __init__(self) -> None:
        self.steps, self.times = array("q"), array("d")
        self.columns: dict[str, BucketColumn] = {}
        self.omitted: set[str] = set()
        self._width = 1
        self._count = 0  # of evaluations in the last bucket

    def add(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        for name in metrics:
            if name in self.columns:
                continue
            if len(self.columns) < MAX_METRICS:
                self.columns[name] = column = BucketColumn()
                column.append_empty(len(self.steps))
            elif len(self.omitted) < MAX_OMITTED:
                self.omitted.add(name)
        if self.steps and self._count < self._width:
            self._count += 1
            self.steps[-1], self.times[-1] = step, time
            for name, column in self.columns.items():
                if name in metrics:
                    column.merge_into_last((metrics[name],))
            return
        self.steps.append(step)
        self.times.append(time)
        self._count = 1
        for name, column in self.columns.items():
            if name in metrics:
                column.append((metrics[name],))
            else:
                column.append_empty(1)
        if len(self.steps) > MAX_EVALUATIONS:
            single = len(self.steps) % 2
            keep_last_of_pairs(self.steps, self.times)
            for column in self.columns.values():
                column.halve()
            self._count = self._count if single else self._width + self._count
            self._width *= 2

    def cut(self, step: int) -> None:
        """Remove the evaluations after `step`, and those before it that were merged with them."""
        kept = bisect.bisect_right(self.steps, step)
        if kept < len(self.steps):
            self._count = self._width
        del self.steps[kept:], self.times[kept:]
        for column in self.columns.values():
            column.truncate(kept)


class EventLog:
    """Collects events. A start removes what a resumed run repeats.

    version: number of events besides steps so far."""

    def __init__(self) -> None:
        self.version = 0
        self.starts: deque[Started] = deque(maxlen=MAX_EVENTS)
        self.first_start: Started | None = None
        self.evaluations = EvaluationCurves()
        self.saves: deque[Saved] = deque(maxlen=MAX_EVENTS)
        self.profiles: deque[Profiled] = deque(maxlen=MAX_EVENTS)
        self.failures: deque[Failed] = deque(maxlen=MAX_EVENTS)
        self.stalls: deque[Stalled] = deque(maxlen=MAX_EVENTS)
        self.notes: deque[Noted] = deque(maxlen=MAX_EVENTS)

    def add(self, event: Event) -> None:
        self.version += not isinstance(event, Step)
        match event:
            case Started():
                self.first_start = self.first_start or event
                self.starts.append(event)
                self.evaluations.cut(event.step)
                while self.saves and self.saves[-1].step > event.step:
                    self.saves.pop()
            case Evaluated():
                self.evaluations.add(event.step, event.time, event.metrics)
            case Saved():
                self.saves.append(event)
            case Profiled():
                self.profiles.append(event)
            case Failed():
                self.failures.append(event)
            case Stalled():
                self.stalls.append(event)
            case Noted():
                self.notes.append(event)
