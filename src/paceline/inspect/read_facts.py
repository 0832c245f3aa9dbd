"""Read the facts of a run from its folder. Damaged parts are left out, and a note says so."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from paceline import events
from paceline.doctor.heartbeat import Heartbeat
from paceline.doctor.rank_state import find_damaged_heartbeats, read_heartbeats
from paceline.errors import Error, PlanError, RunError
from paceline.events import Ended, Evaluated, Event, EventReader, Failed, Profiled, Saved, Started, Step
from paceline.inspect.facts import WARM_UP_STEPS, RunFacts, Sibling, StepPoint
from paceline.inspect.windows import Window, cut_windows, describe_lost_gpus, describe_other_times
from paceline.monitor.columns import kind_of
from paceline.monitor.samples import SampleTable, read_samples
from paceline.plan.plan import ResolvedPlan, parse
from paceline.report.run_view import glance
from paceline.report.summary import SummaryBuilder
from paceline.run import RunFolder
from paceline.spec import Launch, Spec
from paceline.units import several, without_controls

MAX_SIBLINGS = 50  # runs of the same folder that are compared, the latest
MAX_SIBLING_BYTES = 2**26  # of their events together; older ones are left out, as reading may take minutes


class _Course:
    """What happened in a run: events in bounded memory, without those that a resume repeats."""

    def __init__(self) -> None:
        self.summary = SummaryBuilder()
        self.steps: list[StepPoint] = []
        self.evaluated: list[Evaluated] = []
        self.saved: list[Saved] = []
        self.profiled: list[Profiled] = []
        self.failures: list[Failed] = []
        self.started: Started | None = None
        self.ended: Ended | None = None
        self.last_time = 0.0  # of a step, an evaluation or a checkpoint

    def add(self, event: Event, count: int) -> None:
        self.summary.add(event, count)
        if isinstance(event, (Step, Evaluated, Saved)):
            self.last_time = event.time
        match event:
            case Started():
                if self.started is not None and not _is_same_training(self.started, event):
                    self._cut(-1)
                self.started, self.ended = event, None
                self._cut(event.step)
            case Step():
                begin = self.started.step if self.started is not None else 0
                if self.steps and event.step <= self.steps[-1].step:
                    self.steps = [point for point in self.steps if point.step < event.step]
                self.steps.append(
                    StepPoint(
                        event.step,
                        event.time,
                        event.loss,
                        event.grad_norm,
                        event.lr,
                        event.step_s,
                        event.data_s,
                        event.samples_per_s,
                        count,
                        event.step - begin,
                    )
                )
            case Evaluated():
                self.evaluated.append(event)
            case Saved():
                self.saved.append(event)
            case Profiled() if event.step_s > 0:
                self.profiled.append(event)
            case Failed():
                self.failures.append(event)
            case Ended():
                self.ended = event

    def _cut(self, step: int) -> None:
        """Remove what happened after `step`."""
        self.steps = [point for point in self.steps if point.step <= step]
        self.evaluated = [event for event in self.evaluated if event.step <= step]
        self.saved = [event for event in self.saved if event.step <= step]
        self.profiled = [event for event in self.profiled if event.step <= step]


def _is_same_training(before: Started, after: Started) -> bool:
    """Whether the times of two starts can be compared."""
    names = ("plan", "ranks", "batch", "device", "precision", "threads")
    return all(getattr(before, name) == getattr(after, name) for name in names)


def read_facts(run: RunFolder) -> RunFacts:
    """Return the facts of a run. Raises RunError if a file cannot be read at all."""
    reader, course = EventReader(run.events), _Course()
    with events.readable(run.events):
        for event, count in reader.sampled():
            course.add(event, count)
    notes = [str(reader.skipped)] if reader.skipped else []
    notes += [f"skipped damaged {path}" for path in find_damaged_heartbeats(run)]
    is_running = run.is_locked()
    if not is_running and reader.has_incomplete_line():
        notes.append("the last line of events.jsonl is incomplete: a rank was killed, or the disk was full")
    spec, launch = _read_request(run, notes)
    is_own_loop = not run.spec.exists() and course.started is None
    windows, why_no_samples = _read_windows(run, course, is_own_loop, notes)
    started, summary = course.started, course.summary.build()
    return RunFacts(
        path=run.path,
        is_own_loop=is_own_loop,
        spec=spec,
        launch=launch,
        started=started,
        is_running=is_running,
        steps=tuple(course.steps),
        evaluated=tuple(course.evaluated),
        saved=tuple(course.saved),
        profiled=tuple(course.profiled),
        failures=tuple(course.failures),
        ended=course.ended,
        run_s=summary.total_s,
        remaining_s=_estimate_remaining_s(course, summary.total_s),
        beats=_read_beats(run, started),
        siblings=tuple(_find_siblings(run, spec, started))[::-1] if spec is not None else (),
        disk_free_bytes=_measure_free_bytes(run.path) if is_running else None,
        notes=tuple(notes),
        plan=_resolve(started),
        facts=started.facts if started is not None else {},
        windows=windows,
        why_no_samples=why_no_samples,
    )


def read_recorded_facts(path: Path) -> RunFacts:
    """Return the facts of a recording: a file of `paceline monitor`, or CSV of nvidia-smi.

    Raises RunError if it cannot be read, or is neither."""
    samples = read_samples(path)
    notes = [*samples.notes]
    if samples.damaged:
        notes.append(f"skipped {several(samples.damaged, 'damaged line')} in {path}")
    windows = cut_windows([samples], None, None)
    notes += describe_lost_gpus(windows)
    return RunFacts(path=path, is_recording=True, windows=windows, notes=tuple(notes))


# Columns that no rule reads: a node with many cores has many.
UNUSED_COLUMNS = {"cpuN", "gpuN fan", "gpuN encoder", "gpuN decoder", "gpuN energy", "cpu energy"}


def _read_windows(
    run: RunFolder, course: _Course, is_own_loop: bool, notes: list[str]
) -> tuple[tuple[Window, ...], str]:
    """Return the samples while the training stepped, and why there are none. An own loop records no steps."""
    folder = run.path / "monitor"
    paths = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    if not paths:
        return (), ": the run was not sampled (--monitor)"
    warm = [point for point in course.steps if point.since_start > WARM_UP_STEPS]
    if not warm and not is_own_loop:
        return (), ": none was taken while the training stepped"
    recordings: list[SampleTable] = []
    for path in paths:
        try:
            samples = read_samples(path, only=lambda name: kind_of(name) not in UNUSED_COLUMNS)
        except RunError as error:
            notes.append(str(error))
            continue
        if samples.damaged:
            notes.append(f"skipped {several(samples.damaged, 'damaged line')} in {path}")
        recordings.append(samples)
    begin, end = (warm[0].time, max(warm[-1].time, course.last_time)) if warm else (None, None)
    windows = cut_windows(recordings, begin, end)
    notes += describe_lost_gpus(windows)
    if begin is not None and end is not None:
        notes += describe_other_times(recordings, begin, end)
    return windows, "" if windows else ": none was taken while the training stepped"


def _read_request(run: RunFolder, notes: list[str]) -> tuple[Spec | None, Launch | None]:
    if not run.spec.exists():  # a loop of the user, which paceline.setup prepared
        return None, None
    try:
        return run.request()
    except Error as error:
        notes.append(f"rules about the request were not checked: {error}")
        return None, None


def _resolve(started: Started | None) -> ResolvedPlan | None:
    if started is None:
        return None
    try:
        return parse(started.plan).resolve(started.ranks)
    except PlanError:  # a plan of a newer version
        return None


def _estimate_remaining_s(course: _Course, run_s: float) -> float | None:
    """Return the time until the end of the training, at the mean rate until now."""
    if course.ended is not None and course.ended.reason == "done":
        return 0.0
    done = sum(point.num_steps for point in course.steps)
    if course.started is None or not done:
        return None
    return max(0, course.started.steps - course.steps[-1].step) * run_s / done


def _read_beats(run: RunFolder, started: Started | None) -> tuple[Heartbeat | None, ...]:
    """Return the heartbeats of the last start."""
    with contextlib.suppress(OSError):
        beats = read_heartbeats(run)
        if started is not None and len(beats) == started.ranks:
            return tuple(
                beat if beat is not None and beat.time >= started.time - 1.0 else None for beat in beats
            )
    return ()


def _measure_free_bytes(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize
    return None


def _find_siblings(run: RunFolder, spec: Spec, started: Started | None) -> Iterator[Sibling]:
    """Yield the comparable runs next to a run: all but plan, ranks, threads, length and seed are equal."""
    if started is None:
        return
    try:
        specs = run.path.absolute().parent.glob("*/spec.toml")
        folders = [path.parent for path in specs if path.is_file()]  # a pipe would block the reader
        folders = sorted(folders, key=lambda path: path.stat().st_mtime)[-MAX_SIBLINGS:]
    except OSError:
        return
    left = MAX_SIBLING_BYTES
    for folder in reversed(folders):
        if folder.name == run.path.absolute().name:
            continue
        other = RunFolder(folder)
        try:
            if not _is_comparable(other.request()[0], spec):
                continue
            left -= other.events.stat().st_size
            if left < 0:
                return
            summary = glance(other).summary
        except (Error, OSError):
            continue
        start = summary.started
        if (
            start is not None
            and summary.samples_per_s
            and summary.steps >= MIN_SIBLING_STEPS
            and (start.device, start.batch) == (started.device, started.batch)
        ):
            yield Sibling(
                without_controls(folder.name), start.plan, start.ranks, start.threads, summary.samples_per_s
            )


MIN_SIBLING_STEPS = 20
# Keys that do not change the work of a step.
IGNORED = (
    "epochs",
    "steps",
    "seed",
    "evaluate_every",
    "evaluate_splits",
    "threads",
    "profile",
    "timeout_s",
    "max_time",
    "optimizer",
    "schedule",
    "save",
    "stop",
)


def _is_comparable(spec: Spec, other: Spec) -> bool:
    return spec.model_dump(exclude={*IGNORED}) == other.model_dump(exclude={*IGNORED})
