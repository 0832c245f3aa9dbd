"""Train a request for a few steps, and return the time of a step and its breakdown."""

import contextlib
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError, RankError, RunError
from paceline.events import Event, Failed, Profiled, Started, Step, last, read
from paceline.launch.launchers import find_launcher
from paceline.launch.train_run import train
from paceline.plan.plan import Plan
from paceline.report.breakdown import RunBreakdown, break_down
from paceline.run import RunFolder, choose_path, create
from paceline.spec import Launch, Save, Spec
from paceline.units import several

STEPS = 20  # that count, at least
SECONDS = 1.0  # that the counted steps take, at least
MAX_STEPS = 400
WARM_UP_STEPS = 5  # that do not count, besides those that are profiled
BLOCKS = 4  # into which the steps are divided, to estimate the error of their median
NEVER = 10**9  # steps between evaluations
POLL_S = 1.0  # between queries of a job


@dataclass(frozen=True)
class ShortRun:
    """The measured time of a step. error: its standard error, relative. seconds: of all that it took.

    breakdown: None if no step was profiled.
    """

    ranks: int
    batch: int
    plan: Plan
    step_s: float
    error: float
    steps: int
    seconds: float
    breakdown: RunBreakdown | None


def train_shortly(
    spec: Spec, launch: Launch, plan: Plan, steps: int = STEPS, report: Callable[[str], None] | None = None
) -> ShortRun:
    """Train a request under a plan until its steps are measured. Nothing is kept.

    launch: with the number of ranks, and how they are started: on this machine, by Ray, by srun in an
    allocation of Slurm, or else in a job of Slurm. report: called with the state of a queued job.

    Raises the Error that ended the training.
    """
    ranks = launch.ranks or 1
    launch = launch.model_copy(
        update={"plan": str(plan), "monitor": "off", "report": False, "run": None, "restarts": 0}
        | {"least_nodes": None, "mlflow": None, "nsys": False}
    )
    begin = time.monotonic()
    is_local = launch.nodes == 1 and launch.launcher in (None, "local")
    events = _train_here(spec, launch, steps) if is_local else _train_elsewhere(spec, launch, steps, report)
    step_s, error, count = summarize_steps(events)
    return ShortRun(
        ranks, spec.batch, plan, step_s, error, count, time.monotonic() - begin, _break_down(events)
    )


def count_steps(predicted_step_s: float) -> int:
    """Return how many steps to measure, if a step takes about this time."""
    return min(MAX_STEPS, max(STEPS, math.ceil(SECONDS / predicted_step_s)))


def summarize_steps(events: Sequence[Event]) -> tuple[float, float, int]:
    """Return the median time of a step, its relative standard error, and the number of steps in it.

    Neither the first steps count nor those that were profiled. Raises RunError if no others remain.
    """
    profiled = {
        event.step - before
        for event in events
        if isinstance(event, Profiled)
        for before in range(event.num_steps)
    }
    times = [
        event.step_s
        for event in events
        if isinstance(event, Step) and event.step > WARM_UP_STEPS and event.step not in profiled
    ]
    if len(times) < BLOCKS:
        raise RunError(f"the short training has {several(len(times), 'step')} to measure; it needs {BLOCKS}")
    middle = statistics.median(times)
    size = len(times) / BLOCKS
    blocks = [statistics.median(times[round(at * size) : round((at + 1) * size)]) for at in range(BLOCKS)]
    return middle, statistics.stdev(blocks) / math.sqrt(BLOCKS) / middle, len(times)


def _break_down(events: Iterable[Event]) -> RunBreakdown | None:
    try:
        return break_down(events)
    except RunError:  # no step was profiled
        return None


def _shorten(spec: Spec, steps: int) -> Spec:
    """Return the request with this number of steps, all of one batch, and without evaluations."""
    update = {
        "steps": steps,
        "epochs": None,
        "profile": True,
        "trace": None,
        "histograms": None,
        "noise_scale": None,
        "graph": False,
        "max_time": None,
        "evaluate_every": NEVER,
        "save": Save(),
        "batch_schedule": None,
        "batch_warmup": None,
    }
    return spec.model_copy(update=update)


def _train_here(spec: Spec, launch: Launch, steps: int) -> list[Event]:
    """Train on ranks of this machine until enough steps are measured; nothing is evaluated or saved."""
    events: list[Event] = []
    training = train(
        _shorten(spec, NEVER), launch.plan, ranks=launch.ranks, device=launch.device, monitor="off"
    )
    with contextlib.closing(training):
        for event in training:
            events.append(event)
            if isinstance(event, Step) and event.step >= WARM_UP_STEPS + steps + _count_profiled(events):
                break
    return events


def _count_profiled(events: Iterable[Event]) -> int:
    return sum(event.num_steps for event in events if isinstance(event, Profiled))


def _train_elsewhere(
    spec: Spec, launch: Launch, steps: int, report: Callable[[str], None] | None
) -> list[Event]:
    """Train through the launcher, and return the events. A run that fails is kept."""
    total = WARM_UP_STEPS + 2 * steps  # half of the steps may be profiled
    is_job = launch.launcher != "ray" and "SLURM_JOB_ID" not in os.environ
    if not is_job:
        find_launcher(launch).check(launch)
    run = create(choose_path(None, spec.task), _shorten(spec, total), launch)
    run.temporary.touch()
    try:
        if is_job:
            _run_job(run, launch, report)
        else:
            with _redirect_output(run.path / "output.txt"):
                find_launcher(launch).start(run, launch)
        events = list(read(run.events))
        if sum(isinstance(event, Step) for event in events) < total:
            raise RankError(f"the short training ended early; {run.path} has its output")
    except LaunchError:
        if not (run.events.exists() and last(run.events, Started)):
            shutil.rmtree(run.path)
        raise
    run.delete()
    return events


@contextlib.contextmanager
def _redirect_output(path: Path) -> Iterator[None]:
    """Write what this process and its children print into a file."""
    sys.stdout.flush()
    before = os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)


def _run_job(run: RunFolder, launch: Launch, report: Callable[[str], None] | None) -> None:
    """Queue a job of Slurm for a run, and wait until it ends; if that is interrupted, cancel the job."""
    from paceline.launch.slurm import client
    from paceline.launch.slurm.job_script import build_job, render
    from paceline.launch.slurm.site import read_site

    site = read_site(None)
    job = build_job(launch, site, run.path, None)
    client.check(job, site)
    run.job_script.write_text(render(job, site), encoding="utf-8")
    number = client.submit(run.job_script)
    run.write_job(number)
    try:
        while (status := client.status(number)) is not None and status.is_active:
            if report is not None:
                report(f"job {number} is {status.state.lower()}")
            time.sleep(POLL_S)
    except BaseException:
        client.cancel(number)
        raise
    if status is not None and status.state != "COMPLETED":
        failures = [event for event in read(run.events) if isinstance(event, Failed)]
        why = f": {failures[-1].message}" if failures else ""
        raise RankError(f"job {number} is {status.state}{why}; {run.path} has its output")
