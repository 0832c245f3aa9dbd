"""Summaries and events as text for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.events import (
    Ended,
    Evaluated,
    Event,
    Failed,
    NoiseMeasured,
    Noted,
    Profiled,
    Saved,
    Stalled,
    Started,
    Step,
    describe_metric,
)
from paceline.report.summary import Summary
from paceline.units import format_bytes, format_count, format_seconds, several


def format_event(event: Event, lr_group: str = "") -> str:
    """Return a line for a log. lr_group: parameter group of the learning rate, from the last start."""
    match event:
        case Started():
            return format_headline(event)
        case Step():
            norm = f"{event.grad_norm:.3g}" if event.grad_norm is not None else "overflow, update skipped"
            lr = f"{event.lr:.3g}" + (f" ({lr_group})" if lr_group else "")
            losses = f" ({format_metrics(event.losses)})" if event.losses else ""
            return (
                f"step {event.step}  loss {event.loss:.4f}{losses}  grad norm {norm}  lr {lr}  "
                f"{event.samples_per_s:,.0f} samples/s"
            )
        case Noted():
            return f"step {event.step}  note: {event.message}"
        case Profiled():
            shares = ", ".join(
                f"{name} {seconds / event.step_s:.0%}" for name, seconds in event.seconds.items() if seconds
            )
            return f"step {event.step}  profiled: {shares}"
        case NoiseMeasured():
            return f"step {event.step}  noise scale: {format_noise(event)}"
        case Evaluated():
            return f"step {event.step}  evaluated: {format_metrics(event.metrics)}"
        case Saved():
            size = f"{format_bytes(event.bytes)} in {format_seconds(event.seconds)}"
            return f"step {event.step}  saved {event.path}, {size}"
        case Failed():
            is_named = event.what == "save" or event.message.startswith("rank ")
            rank = "" if is_named else f"rank {event.rank}: "
            return f"step {event.step}  {rank}{event.message}"
        case Stalled():
            return f"step {event.step}  stalled: {event.message}"
        case Ended():
            return f"step {event.step}  {event.reason}" + (f": {event.why}" if event.why else "")
    return type(event).__name__.lower()


def format_headline(started: Started) -> str:
    """Return a line with task, length, data and plan of a start."""
    ranks = several(started.ranks, "rank")
    threads = several(started.threads, "thread")
    task = started.task.rpartition("/")[2]
    begin = f"from step {started.step} " if started.step else ""
    return (
        f"{task} with {format_count(started.parameters)} parameters: {begin}to step {started.steps}, "
        f"batch {started.batch} of {started.samples:,} samples; "
        f"plan {started.plan} on {ranks}, {started.device}, {started.precision}, {threads} each"
    )


def format_start_times(started: Started) -> str:
    """Return a line with the seconds of each part of a start."""
    parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in started.start_s.items())
    return f"start {format_seconds(sum(started.start_s.values()))}: {parts}"


def format_noise(event: NoiseMeasured) -> str:
    """Return the noise scale with its error, such as `312 ± 20 samples`."""
    if event.noise_scale is None:
        return "not measurable yet, the gradient is lost in its noise"
    error = f" ± {event.error * event.noise_scale:,.3g}" if event.error is not None else ""
    return f"{event.noise_scale:,.3g}{error} samples"


def format_metrics(values: object) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in dict(values).items())  # type: ignore[call-overload]


def build_closing_table(summary: Summary) -> RenderableType:
    """Return the table at the end of a training."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    if summary.first_loss is not None and summary.last_loss is not None:
        losses = f" ({format_metrics(summary.losses)})" if summary.losses else ""
        table.add_row("loss", f"{summary.first_loss:.4f} → {summary.last_loss:.4f}{losses}")
    for name, value in summary.metrics.items():
        table.add_row(describe_metric(name), f"{value:.4f}")
    if summary.noise is not None:
        table.add_row("noise scale", f"{format_noise(summary.noise)} at step {summary.noise.step}")
    median = "median"
    if summary.sampled is not None:
        median += f" of {summary.sampled:,} evenly spaced steps"
    if summary.samples_per_s is not None and summary.step_s is not None:
        table.add_row(
            "speed",
            f"{summary.samples_per_s:,.0f} samples/s, {format_seconds(summary.step_s)} a step ({median})",
        )
    if summary.shares:
        table.add_row(
            "time",
            f"{format_seconds(summary.total_s)}: "
            + ", ".join(f"{name} {share:.0%}" for name, share in summary.shares.items()),
        )
    if summary.wall_s.get("start"):
        wall = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in summary.wall_s.items())
        table.add_row("wall", f"{format_seconds(sum(summary.wall_s.values()))}: {wall}")
    if summary.saved:
        last = summary.saved[-1]
        table.add_row(
            "checkpoint",
            f"step {last.step}, {format_bytes(last.bytes)}, "
            f"training was blocked for {format_seconds(last.blocked_s)}",
        )
    if summary.ended is not None and summary.ended.why:
        table.add_row("end", Text(summary.ended.describe()))
    started_notes = summary.started.notes if summary.started else ()
    notes = [Text(f"note: {note}", style="yellow") for note in (*started_notes, *summary.notes)]
    failures = [Text(failure.message, style="red") for failure in summary.failures if failure.what != "run"]
    return Group(table, *notes, *failures)
