"""The outcome of a training of a trial, from the files of its run."""

import math
import statistics
from pathlib import Path

from paceline import events
from paceline.events import Ended, Evaluated, Failed, Profiled, Started, Step
from paceline.launch.spawn import UNFINISHED, describe_exit
from paceline.report.run_view import view
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.tuning.folder import StudyFolder
from paceline.tuning.journal import Finished, Metrics, Reached, StudyState

# Quantities that may be objectives besides metrics.
MEASURED = ("step_s", "parameters", "memory", "time", "energy", "price")
MEASURED_STEPS = 200  # last steps whose median is the step time


def is_trained(run: RunFolder, spec: Spec) -> bool:
    """Return whether the last training of a run reached the length of a request, or a metric ended it."""
    found = events.last(run.events, Started, Ended)
    if not found or not isinstance(ended := found[-1], Ended) or ended.reason == "stopped":
        return False
    started = next((event for event in found if isinstance(event, Started)), None)
    return bool(ended.why) or (started is not None and ended.step >= spec.total_steps(started.samples))


def read_metrics(run: RunFolder) -> tuple[int, Metrics]:
    """Return the samples that a run has consumed, and the metrics of its last evaluation.

    The measured quantities step_s (seconds), parameters and memory (bytes of the rank with peak memory, if
    steps were profiled) are added.
    """
    metrics: Metrics = {}
    samples = 0
    for event in events.last(run.events, Started, Step, Profiled):
        match event:
            case Started():
                metrics["parameters"] = float(event.parameters)
            case Profiled():
                metrics["memory"] = float(sum(event.memory.values()))
            case Step():
                samples = event.samples
    if (step_s := _measure_step_s(run)) is not None:
        metrics["step_s"] = step_s
    for event in events.last(run.events, Evaluated):
        if isinstance(event, Evaluated):
            metrics |= {
                name: value if math.isfinite(value) else None for name, value in event.metrics.items()
            }
    return samples, metrics


def _measure_step_s(run: RunFolder) -> float | None:
    _, recent = events.tail(run.events, events.Skipped())
    steps = [event.step_s for event in recent if isinstance(event, Step)][-MEASURED_STEPS:]
    return statistics.median(steps) if steps else None


def measure_seconds(run: RunFolder) -> float:
    """Return the wall time of all starts of a run, from its events."""
    return sum(view(run).summary.wall_s.values())


def collect_results(state: StudyState, folder: StudyFolder) -> None:
    """Add the results of trials that jobs of their own have trained, and no controller recorded."""
    for trial in list(state.trials.values()):
        run = folder.run(trial.number)
        if trial.state == "waiting" and run.spec.exists() and is_trained(run, run.request()[0]):
            samples, metrics = read_metrics(run)
            seconds = metrics["time"] = measure_seconds(run)
            state.apply(Reached(trial=trial.number, samples=samples, metrics=metrics, seconds=seconds))
            state.apply(Finished(trial=trial.number, state="complete"))


def describe_failure(run: RunFolder, begin: int, output: str, log: Path, status: int) -> str:
    """Return the sentence that says why a training failed, and write it to the events if no rank did.

    begin: the position of the first event of the training.
    output, status: what the process of the trial printed to `log`, and its exit status.
    """
    step = 0
    for event in events.read(run.events, begin):
        if isinstance(event, Failed) and event.what == "run" and not event.lost_peer:
            return event.message
        if isinstance(event, (Started, Step)):
            step = event.step
    for line in reversed(output.splitlines()):
        if line.startswith("paceline: "):
            return line.removeprefix("paceline: ")
    message = f"the trial {describe_exit(status or UNFINISHED)}, after step {step}; see {log}"
    events.append(run.events, Failed(what="run", step=step, rank=0, message=message))
    return message
