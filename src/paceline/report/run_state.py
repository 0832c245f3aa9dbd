"""The state of a run, in half a sentence."""

from paceline.events import describe_metric
from paceline.report.summary import Summary
from paceline.run import RunFolder
from paceline.units import format_count


def describe_run(run: RunFolder, summary: Summary) -> str:
    """Return the state of a run by its files and its lock."""
    hint = f"continue with: paceline resume {run.path}"
    if summary.ended is not None:
        return summary.ended.describe() + (f"; {hint}" if summary.ended.reason == "stopped" else "")
    if summary.started is None:
        return (
            f"after step {summary.steps}; the event of its start is damaged; {hint}"
            if summary.steps
            else "not started yet"
        )
    progress = f"step {summary.steps} of {summary.started.steps}"
    if run.is_locked():
        return f"running, {progress}"
    failures = [
        event for event in summary.failures if event.what == "run" and event.time >= summary.started.time
    ]
    if not failures:
        return f"interrupted after {progress}; {hint}"
    cause = next((event for event in failures if not event.lost_peer), failures[0])
    return f"failed after {progress}: {cause.message}" + (
        "" if "paceline resume" in cause.message else f"; {hint}"
    )


def describe_progress(summary: Summary, best: str) -> str:
    """Return the last loss, a validation metric and the throughput, each after a comma.

    best: the name of the metric; if the last evaluation lacks it, its first metric is used.
    """
    figures = [f"loss {summary.last_loss:.4f}"] if summary.last_loss is not None else []
    if summary.metrics:
        name = best if best in summary.metrics else next(iter(summary.metrics))
        figures.append(f"{describe_metric(name)} {summary.metrics[name]:.4f}")
    if summary.samples_per_s is not None:
        figures.append(f"{format_count(summary.samples_per_s)} samples/s")
    return "".join(f", {figure}" for figure in figures)
