"""How a run is, in half a sentence."""

from paceline.launch.slurm.client import Status
from paceline.report.summary import Summary
from paceline.run import RunFolder
from paceline.units import format_count


def of_run(run: RunFolder, summary: Summary) -> str:
    """From its files, and from whether somebody holds it."""
    go_on = f"go on with: paceline resume {run.path}"
    if summary.ended is not None:
        return f"{summary.ended.reason} at step {summary.ended.step}" + (
            f"; {go_on}" if summary.ended.reason == "stopped" else ""
        )
    if summary.started is None:
        return (
            f"after step {summary.steps}, of a start that cannot be read; {go_on}"
            if summary.steps
            else "nothing has happened yet"
        )
    so_far = f"step {summary.steps} of {summary.started.steps}"
    if run.is_locked():
        return f"running, {so_far}"
    since = [
        event for event in summary.failures if event.what == "run" and event.time >= summary.started.time
    ]
    if not since:
        return f"interrupted after {so_far}; {go_on}"
    why = next((event for event in since if not event.lost_peer), since[0])
    return f"failed after {so_far}: {why.message}" + (
        "" if "paceline resume" in why.message else f"; {go_on}"
    )


def figures(summary: Summary, best: str) -> str:
    """Return the last loss, a metric of the last evaluation (`best`, else the first) and the speed, each behind a comma."""
    found = [f"loss {summary.last_loss:.4f}"] if summary.last_loss is not None else []
    if summary.metrics:
        name = best if best in summary.metrics else next(iter(summary.metrics))
        found.append(f"validation {name} {summary.metrics[name]:.4f}")
    if summary.samples_per_s is not None:
        found.append(f"{format_count(summary.samples_per_s)} samples/s")
    return "".join(f", {figure}" for figure in found)


def of_job(job: Status) -> str:
    """In Slurm's words."""
    what = f"job {job.id} {job.state}"
    if job.state == "PENDING":
        return (
            what
            + (f" ({job.reason})" if job.reason else "")
            + (f", expected to begin at {job.start}" if job.start else "")
        )
    if job.is_active:
        return f"{what} on {job.nodes}, {job.run_time} of {job.time_limit}"
    return what + (f" ({job.reason})" if job.reason else "")
