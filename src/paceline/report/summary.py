"""The summary of a run from its events. Requires neither torch nor a live run."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.events import Ended, Evaluated, Event, Failed, NoiseMeasured, Noted, Saved, Started, Step
from paceline.report.history import History, TimeSpent

WARM_UP_STEPS = 3  # of each start, excluded from rates: they allocate, connect and compile
MAX_EVENTS = 1000  # number of last evaluations, saves and failures that are kept


@dataclass(frozen=True)
class Summary:
    """Facts of a run."""

    started: Started | None  # the last start
    starts: int
    steps: int  # done
    first_loss: float | None
    last_loss: float | None
    metrics: Mapping[str, float]  # of the last evaluation
    samples_per_s: float | None  # median over the steps
    step_s: float | None
    total_s: float  # of steps, evaluation and saving
    shares: Mapping[str, float]  # of total_s; unknown parts are absent
    saved: tuple[Saved, ...]
    failures: tuple[Failed, ...]
    ended: Ended | None  # None: interrupted, or still running
    wall_s: Mapping[str, float] = field(default_factory=dict)  # start, training, end; of all starts
    notes: tuple[str, ...] = ()  # during the training, each once
    device_s: float = 0.0  # wall time × ranks, of all starts
    losses: Mapping[str, float] = field(default_factory=dict)  # of the last step, by name
    noise: NoiseMeasured | None = None  # the last one
    sampled: int | None = None  # number of steps read of a long run, which represent all; None: all were read


class SummaryBuilder:
    """Builds a Summary from events in bounded memory. A step may represent several."""

    def __init__(self) -> None:
        self.history = History()
        self._started: Started | None = None
        self._starts = 0
        self._evaluating, self._saving = TimeSpent(), TimeSpent()
        self._evaluated: deque[Evaluated] = deque(maxlen=MAX_EVENTS)
        self._saved: deque[Saved] = deque(maxlen=MAX_EVENTS)
        self._failures: deque[Failed] = deque(maxlen=MAX_EVENTS)
        self._notes: dict[str, None] = {}  # in their order
        self._ended: Ended | None = None
        self._losses: Mapping[str, float] = {}
        self._noise: NoiseMeasured | None = None
        self._wall_s = {"start": 0.0, "training": 0.0, "end": 0.0}
        self._device_s = 0.0
        self._until = 0.0  # time of the last progress

    def add(self, event: Event, count: int = 1) -> None:
        match event:
            case Started():
                self._started, self._ended = event, None
                self._starts += 1
                self._add_wall_time("start", sum(event.start_s.values()))
                self._until = event.time
                for spent in (self.history, self._evaluating, self._saving):
                    spent.cut(event.step)
                while self._evaluated and self._evaluated[-1].step > event.step:
                    self._evaluated.pop()
                while self._saved and self._saved[-1].step > event.step:
                    self._saved.pop()
            case Step():
                self.history.add(event, count)
                self._losses = event.losses
                self._add_training_time(event.time)
            case Evaluated():
                self._evaluated.append(event)
                self._evaluating.add(event.step, event.seconds)
                self._add_training_time(event.time)
            case Saved():
                self._saved.append(event)
                self._saving.add(event.step, event.blocked_s)
            case NoiseMeasured():
                self._noise = event
            case Noted() if len(self._notes) < MAX_EVENTS:
                self._notes[event.message] = None
            case Failed():
                self._failures.append(event)
            case Ended():
                self._ended = event
                self._add_wall_time("end", max(0.0, event.time - self._until))

    def _add_wall_time(self, name: str, seconds: float) -> None:
        self._wall_s[name] += seconds
        self._device_s += seconds * (self._started.ranks if self._started is not None else 0)

    def _add_training_time(self, now: float) -> None:
        self._add_wall_time("training", max(0.0, now - self._until))
        self._until = max(self._until, now)

    def build(self) -> Summary:
        history, started, ended = self.history, self._started, self._ended
        warm_from = (started.step if started is not None else 0) + WARM_UP_STEPS
        median_step_s, median_samples_per_s = history.find_medians(warm_from)
        evaluating_s, saving_s = self._evaluating.total_s, self._saving.total_s
        step_s, data_s = history.step_s, history.data_s
        total_s = step_s + evaluating_s + saving_s
        parts = {"data": data_s}
        if ended is not None and ended.communication is not None:
            parts["communication"] = ended.communication * (step_s - data_s)
        parts["compute" if "communication" in parts else "compute and communication"] = step_s - sum(
            parts.values()
        )
        parts |= {"evaluation": evaluating_s, "save": saving_s}
        return Summary(
            started=started,
            starts=self._starts,
            steps=history.points[-1].step if history.points else started.step if started is not None else 0,
            first_loss=history.first.loss if history.first is not None else None,
            last_loss=history.points[-1].loss if history.points else None,
            metrics=self._evaluated[-1].metrics if self._evaluated else {},
            samples_per_s=median_samples_per_s,
            step_s=median_step_s,
            total_s=total_s,
            shares={name: seconds / total_s for name, seconds in parts.items()} if total_s else {},
            saved=tuple(self._saved),
            failures=tuple(self._failures),
            ended=ended,
            wall_s=dict(self._wall_s),
            device_s=self._device_s,
            notes=tuple(self._notes),
            losses=self._losses,
            noise=self._noise,
            sampled=len(history.points) if history.is_thinned else None,
        )


def summarize(events: Iterable[Event]) -> Summary:
    """Return the summary of events."""
    builder = SummaryBuilder()
    for event in events:
        builder.add(event)
    return builder.build()
