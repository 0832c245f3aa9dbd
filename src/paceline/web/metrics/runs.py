"""Metrics of runs: their state, progress, losses, events and profile."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline import events
from paceline.events import Evaluated, EventReader, Failed, Profiled, Saved, Stalled, Started, Step
from paceline.plan.cost_model.compare import MEMORY_PARTS, TIME_PARTS
from paceline.report.curves import MAX_NAMED_LOSSES
from paceline.report.event_log import MAX_METRICS
from paceline.report.summary import Summary
from paceline.run import RunFolder
from paceline.units import without_controls
from paceline.web.metrics.exposition import Labels, MetricFamily
from paceline.web.prediction import read_prediction

STATES = ("running", "done", "stopped", "interrupted", "failed", "not started", "damaged")
MAX_LABEL = 200  # characters of a value of a label
# By name: type, unit, and help.
FAMILIES: dict[str, tuple[str, str, str]] = {
    "run": ("info", "", "The request of the last start of a run."),
    "run_state": ("stateset", "", "Whether a run is in a state."),
    "run_last_event_timestamp_seconds": ("gauge", "seconds", "Time of the last step or start."),
    "run_ranks": ("gauge", "", "Number of ranks."),
    "run_step": ("gauge", "", "Updates of the weights so far."),
    "run_target_step": ("gauge", "", "The step after which the run is complete."),
    "run_samples": ("gauge", "", "Samples consumed so far, over all ranks."),
    "run_remaining_seconds": ("gauge", "seconds", "Predicted time to the end of the steps, while it runs."),
    "run_step_seconds": ("gauge", "seconds", "Median time of the last steps."),
    "run_data_seconds": (
        "gauge",
        "seconds",
        "Time of the last step that was spent on waiting for its batch.",
    ),
    "run_samples_per_second": (
        "gauge",
        "",
        "Samples of the global batch per second, median of the last steps.",
    ),
    "run_loss": ("gauge", "", "Mean loss over the global batch of the last step."),
    "run_named_loss": ("gauge", "", "Losses that the task returns by name, of the last step."),
    "run_gradient_norm": ("gauge", "", "Norm of the whole gradient of the last step, before clipping."),
    "run_learning_rate": ("gauge", "", "Learning rate of the last step."),
    "run_metric": ("gauge", "", "Metrics of the last evaluation."),
    "run_starts": ("counter", "", "Starts; all but the first are restarts."),
    "run_failures": ("counter", "", "Failures by what failed: run, rank, node, save or worker."),
    "run_stalls": ("counter", "", "Stalls: no rank made progress for a while."),
    "run_saves": ("counter", "", "Complete checkpoints."),
    "run_saved_bytes": ("counter", "bytes", "Bytes of complete checkpoints."),
    "run_save_blocked_seconds": ("counter", "seconds", "Time in which training stood still for checkpoints."),
    "run_evaluations": ("counter", "", "Evaluations."),
    "run_evaluation_seconds": ("counter", "seconds", "Time spent on evaluations."),
    "run_step_part_seconds": ("gauge", "seconds", "Parts of a step in the last profile."),
    "run_predicted_step_part_seconds": (
        "gauge",
        "seconds",
        "Parts of a step, as paceline profile predicted them.",
    ),
    "run_model_flops_utilization_ratio": (
        "gauge",
        "ratio",
        "FLOPs of the model per second, relative to the peak of the devices.",
    ),
    "run_memory_part_bytes": (
        "gauge",
        "bytes",
        "Memory by part of the rank with the highest peak, in the last profile.",
    ),
}


FAILURES = ("run", "rank", "node", "save", "worker")


class EventTotals:
    """Counts of the events of a run, read incrementally. Lines of steps are not parsed."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._reader = EventReader(run.events)
        self._clear()

    def _clear(self) -> None:
        self.counts: Counter[str] = Counter()
        self.amounts = {"saved_bytes": 0.0, "save_blocked_seconds": 0.0, "evaluation_seconds": 0.0}
        self.failures: Counter[str] = Counter()
        self.profiled: Profiled | None = None

    def refresh(self) -> None:
        """Read what was appended. Raises RunError for an unreadable file."""
        restarts = self._reader.restarts
        with events.readable(self.run.events):
            for event in self._reader.new(Started, Saved, Evaluated, Failed, Stalled, Profiled):
                if self._reader.restarts > restarts:  # another file replaced it
                    restarts = self._reader.restarts
                    self._clear()
                self._add(event)

    def _add(self, event: events.Event) -> None:
        match event:
            case Started():
                self.counts["starts"] += 1
            case Saved():
                self.counts["saves"] += 1
                self.amounts["saved_bytes"] += _positive(event.bytes)
                self.amounts["save_blocked_seconds"] += _positive(event.blocked_s)
            case Evaluated():
                self.counts["evaluations"] += 1
                self.amounts["evaluation_seconds"] += _positive(event.seconds)
            case Failed():
                self.failures[event.what if event.what in FAILURES else "other"] += 1
            case Stalled():
                self.counts["stalls"] += 1
            case Profiled():
                self.profiled = event

    def parts(self, name: str, known: Iterable[str]) -> dict[str, float]:
        """Return the known parts of time ("seconds") or memory in the last profile."""
        values = getattr(self.profiled, name) if self.profiled is not None else {}
        return {part: values[part] for part in known if part in values}


def _positive(value: float) -> float:
    return value if 0 <= value < math.inf else 0.0


def label(text: str) -> str:
    """Return a value of a label from text that another user may have written."""
    return without_controls(text.encode(errors="replace").decode())[:MAX_LABEL]


@dataclass
class MetricSink:
    """Takes values of families, and counts those that it leaves out by kind.

    limit: number of values."""

    families: dict[str, MetricFamily]
    limit: int
    count: int = 0
    omitted: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, value: float | None, labels: Labels, kind: str) -> None:
        """Add a value unless it is unknown, the limit is reached, or other labels are cut to the same."""
        if value is None:
            return
        if self.count < self.limit and self.families[name].add(value, labels):
            self.count += 1
        else:
            self.omitted[kind] += 1


def add_run(sink: MetricSink, run: Labels, state: str, summary: Summary, totals: EventTotals) -> None:
    """Add the values of a run."""

    def add(name: str, value: float | None, *labels: tuple[str, str], kind: str = "runs") -> None:
        sink.add(f"run_{name}", value, run + labels, kind)

    def add_named(name: str, key: str, values: Mapping[str, float], limit: int, kind: str) -> None:
        for text, value in [*values.items()][:limit]:
            add(name, value, (key, label(text)), kind=kind)
        sink.omitted[kind] += max(0, len(values) - limit)

    for name in STATES:
        add("state", float(name == state), ("paceline_run_state", name))
    started = summary.started
    if started is not None:
        request = {"task": started.task, "plan": started.plan, "device": started.device}
        request |= {"precision": started.precision}
        sink.add("run", 1, run + tuple((key, label(text)) for key, text in request.items()), "runs")
        add("ranks", started.ranks)
        add("target_step", started.steps)
        add("step_seconds", summary.step_s)
        add("samples_per_second", summary.samples_per_s)
        if state == "running" and summary.step_s is not None:
            add("remaining_seconds", max(0, started.steps - summary.steps) * summary.step_s)
    add("step", summary.steps)
    step = _find_last_step(totals.run)
    last = step or started
    add("last_event_timestamp_seconds", last.time if last is not None else None)
    if step is not None:
        add("samples", step.samples)
        add("data_seconds", step.data_s)
        add("loss", step.loss)
        add("gradient_norm", step.grad_norm)
        add("learning_rate", step.lr)
        add_named("named_loss", "loss", step.losses, MAX_NAMED_LOSSES, "named losses")
    add_named("metric", "metric", summary.metrics, MAX_METRICS, "metrics")
    for name in ("starts", "stalls", "saves", "evaluations"):
        add(name, totals.counts[name])
    for name, amount in totals.amounts.items():
        add(name, amount)
    for what in (*FAILURES, "other"):
        add("failures", totals.failures[what], ("what", what))
    for part, value in totals.parts("seconds", TIME_PARTS).items():
        add("step_part_seconds", value, ("part", part))
    for part, value in totals.parts("memory", MEMORY_PARTS).items():
        add("memory_part_bytes", value, ("part", part))
    prediction = read_prediction(totals.run, started)
    add("model_flops_utilization_ratio", prediction.find_utilization(summary.step_s))
    for part, (seconds, _) in prediction.time_s.items():
        add("predicted_step_part_seconds", seconds, ("part", part))


def _find_last_step(run: RunFolder) -> Step | None:
    """Return the last step of the last start; None before its first step."""
    with events.readable(run.events):
        *_, last = (None, *events.last(run.events, Started, Step, until=(Step,)))
    return last if isinstance(last, Step) else None
