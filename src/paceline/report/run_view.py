"""Views of a run from its files, for commands, pages and reports. They require neither torch nor a live run.

    view = RunView(RunFolder(path))
    view.refresh()                   # reads the history in bounded memory; later calls read appended lines
    view.summary, view.break_down()  # facts
    view.steps                       # steps, of a long history evenly spaced ones
    view.curve("loss", "samples")    # all steps, with the extremes between the points
    view.metric_curve("accuracy")    # evaluations
    view.log                         # other events
    view.machine                     # samples of each node
    view.skipped                     # lines that could not be read
    view.problems                    # sentences about data that is absent or cannot be shown

    glance(RunFolder(path))          # present state: reads the end of the file, back to the last start

A history of up to 2^15 steps is exact. Of a longer history, evenly spaced steps are parsed, which represent
the steps between them; `Summary.sampled` is their number. The first steps of each start, the last step and
all other events are always parsed. Curves parse all steps, when they are used for the first time. Of a long
run, they are copied to a local folder, from which the next view continues.
"""

import bisect
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from paceline import events
from paceline.errors import RunError
from paceline.events import Evaluated, Event, EventReader, Failed, Saved, Skipped, Started, Step
from paceline.report import curve_cache
from paceline.report.breakdown import RunBreakdown, RunBreakdownBuilder
from paceline.report.curve_points import AXES, CurvePoints, find_points
from paceline.report.curves import StepCurves
from paceline.report.event_log import EventLog
from paceline.report.history import HistoryPoint
from paceline.report.machine_samples import MachineSamples
from paceline.report.step_batches import NAMED_LOSS, QUANTITIES, StepBatch, read_batches
from paceline.report.summary import Summary, SummaryBuilder
from paceline.run import RunFolder
from paceline.units import format_seconds, several


class RunView:
    """The whole history of a run, read incrementally."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._reader = EventReader(run.events)
        self._curve_reader: CurveReader | None = None
        self._machine: MachineSamples | None = None
        self._energy_axis: list[float] | None = None
        self._reset()

    def _reset(self) -> None:
        self._summary, self._breakdown, self.log = SummaryBuilder(), RunBreakdownBuilder(), EventLog()
        self.last_time: float | None = None  # of the last step or start

    def refresh(self) -> bool:
        """Read the lines appended since the last call, and return whether there were any.

        Raises RunError for an unreadable file."""
        restarts, is_new = self._reader.restarts, False
        self._energy_axis = None
        with events.readable(self.run.events):
            for event, count in self._reader.sampled():
                if self._reader.restarts > restarts:  # another file replaced it
                    restarts = self._reader.restarts
                    self._reset()
                self._summary.add(event, count)
                self._breakdown.add(event, count)
                self.log.add(event)
                if isinstance(event, (Started, Step)):
                    self.last_time = event.time
                is_new = True
            if self._curve_reader is not None:
                self._curve_reader.refresh()
        if self._machine is not None:
            self._machine.refresh()
        return is_new

    @property
    def summary(self) -> Summary:
        return self._summary.build()

    def break_down(self) -> RunBreakdown:
        """Return the breakdown of time and memory. Raises RunError if no step was profiled."""
        return self._breakdown.build()

    @property
    def steps(self) -> Sequence[HistoryPoint]:
        """The steps in ascending order, each with the number of steps that it represents."""
        return self._summary.history.points

    @property
    def skipped(self) -> Skipped:
        return self._reader.skipped

    @property
    def curves(self) -> StepCurves:
        """All steps, until the last `refresh`. Raises RunError for an unreadable file."""
        if self._curve_reader is None:
            with events.readable(self.run.events):
                reader = CurveReader(self.run)
                reader.refresh()
            self._curve_reader = reader
        return self._curve_reader.curves

    @property
    def has_curves(self) -> bool:
        """Whether the curves were read, so that they are available at once."""
        return self._curve_reader is not None

    def use_curves(self, reader: "CurveReader") -> None:
        """Use curves that another thread has read. Raises RunError for an unreadable file."""
        with events.readable(self.run.events):
            reader.refresh()  # lines were appended since
        self._curve_reader = reader

    @property
    def machine(self) -> MachineSamples:
        """The samples of all nodes, until the last `refresh`."""
        if self._machine is None:
            self._machine = MachineSamples(self.run.monitor)
            self._machine.refresh()
        return self._machine

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the curves of steps: the fields of `Step` that are measured, and losses/NAME."""
        return tuple(self.curves.columns) or QUANTITIES

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics of evaluations."""
        return tuple(self.log.evaluations.columns)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which this run can be drawn."""
        return tuple(axis for axis in AXES if axis != "energy" or self.machine.has_energy)

    def curve(
        self,
        name: str,
        axis: str = "step",
        begin: float | None = None,
        end: float | None = None,
        limit: int = 1000,
    ) -> CurvePoints:
        """Return a quantity of the steps in at most `limit` points, between two values of the axis.

        axis: "step", "samples"; "time", seconds of training without the pauses between starts; or "energy",
        joules that all nodes used since the first sample.
        Raises RunError for an unknown name or axis."""
        column = self.curves.columns.get(name)
        if column is None:
            raise RunError(
                f"{self.run.path} has no quantity {name}; choose one of {', '.join(self.quantities)}"
            )
        return find_points(column, name, axis, self.values_of(axis), begin, end, limit)

    def metric_curve(self, name: str, axis: str = "step", limit: int = 1000) -> CurvePoints:
        """Return a metric of the evaluations. Raises RunError for an unknown name or axis."""
        evaluations = self.log.evaluations
        if name not in evaluations.columns:
            raise RunError(
                f"{self.run.path} has no metric {name}; choose one of {', '.join(self.metrics) or 'none'}"
            )
        values = self.values_of(axis)
        x = [self.interpolate(step, values) for step in evaluations.steps]
        return find_points(evaluations.columns[name], name, axis, x, None, None, limit)

    def values_of(self, axis: str) -> Sequence[float]:
        """Return the value of an axis after each bucket of the curves."""
        if axis not in self.axes:
            raise RunError(
                f"{self.run.path} cannot be drawn over {axis}; choose one of {', '.join(self.axes)}"
            )
        curves = self.curves
        values: dict[str, Sequence[float]] = {
            "step": curves.steps,
            "samples": curves.samples,
            "time": curves.elapsed,
        }
        if axis != "energy":
            return values[axis]
        if self._energy_axis is None:
            self._energy_axis = [*accumulate(map(self.machine.find_energy_J, curves.times), max)]
        return self._energy_axis

    def interpolate(self, step: int, values: Sequence[float]) -> float:
        """Return the value of an axis after a step, which may lie within a bucket."""
        steps = self.curves.steps
        at = bisect.bisect_left(steps, step)
        if at == len(steps):
            return values[-1] if len(values) else math.nan
        if steps[at] == step or not at:
            return values[at]
        share = (step - steps[at - 1]) / (steps[at] - steps[at - 1])
        return values[at - 1] + share * (values[at] - values[at - 1])

    @property
    def problems(self) -> list[str]:
        """Sentences about data that is absent, damaged or cannot be drawn."""
        found = [str(self.skipped)] if self.skipped else []
        for name in self.quantities:
            bad = self.curves.find_not_finite(name)
            if bad is not None:
                count, first, last = bad
                where = f"at step {first}" if first == last else f"between steps {first} and {last}"
                what = "overflowed" if name == "grad_norm" else "is not finite"
                found.append(f"{name} {what} in {several(count, 'step')}, first {where}")
        for step, seconds in self.curves.clock_jumps[:1]:
            count = len(self.curves.clock_jumps)
            found.append(
                f"the clock was set back by {format_seconds(seconds)} at step {step}"
                + (f", and {several(count - 1, 'time')} later" if count > 1 else "")
                + "; the time axis counts the duration of that step instead"
            )
        named = sum(name.startswith(NAMED_LOSS) for name in self.quantities)
        for omitted, kept, noun in (
            (self.curves.omitted, named, "named losses"),
            (self.log.evaluations.omitted, len(self.metrics), "metrics"),
        ):
            if omitted:
                found.append(f"only the first {kept} of {len(omitted) + kept:,} {noun} are kept")
        return found + self.machine.problems


class CurveReader:
    """Reads all steps of a run incrementally."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._start()
        position = curve_cache.load(self.curves, run.events)
        self._reader.position = self._copied = position

    def _start(self) -> None:
        self.curves = StepCurves(self._reread)
        self._reader = EventReader(self.run.events)
        self._copied = 0  # position up to which the local copy reaches

    def refresh(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.run.events.stat().st_size < self._reader.position:  # another file replaced it
                self._start()
        if not len(self.curves):
            self.curves.expect_steps(self._estimate_lines() // 2)
        for item in read_batches(self._reader):
            if isinstance(item, tuple):
                self.curves.start(item[1], item[0])
            else:
                self.curves.add(item)
        if self._reader.position - self._copied >= curve_cache.MIN_BYTES and curve_cache.save(
            self.curves, self.run.events, self._reader.position
        ):
            self._copied = self._reader.position

    def _estimate_lines(self) -> int:
        with contextlib.suppress(OSError), open(self.run.events, "rb") as file:
            begin = file.read(2**16)
            return self.run.events.stat().st_size * begin.count(b"\n") // max(1, len(begin))
        return 0

    def _reread(self, begin: int, end: int) -> Iterator[tuple[int, Started] | StepBatch]:
        return read_batches(EventReader(self.run.events, begin), end)


def view(run: RunFolder) -> RunView:
    """Return a view of the history until now. Raises RunError for an unreadable file."""
    run_view = RunView(run)
    run_view.refresh()
    return run_view


@dataclass(frozen=True)
class RunGlance:
    """The present state of a run.

    summary: of the last start, its last evaluation, save and failure, and the last lines. Rates are of the
    last lines only."""

    summary: Summary
    skipped: Skipped = field(default_factory=Skipped)  # of the lines that were read


@dataclass
class EarlierEvents:
    """The last events of some kinds before a position in bytes, which a later `glance` does not search."""

    position: int = 0
    events: Sequence[Event] = ()


GLANCED = (Started, Evaluated, Saved, Failed)


def glance(run: RunFolder, size: int = 2**16, earlier: EarlierEvents | None = None) -> RunGlance:
    """Return the present state of a run. Raises RunError for an unreadable file.

    size: bytes of the last lines. earlier: what the last call for this run has found, which is updated."""
    skipped, builder = Skipped(), SummaryBuilder()
    earlier = earlier if earlier is not None else EarlierEvents()
    with events.readable(run.events):
        begin, lines = events.tail(run.events, skipped, size)
        if begin < earlier.position:  # another file replaced it
            earlier.position, earlier.events = 0, ()
        before: Sequence[Event] = []
        if not any(isinstance(event, Started) for event in lines):
            first = earlier.position
            before = events.last(run.events, *GLANCED, until=(Started,), begin=first, before=begin)
            if not any(isinstance(event, Started) for event in before):
                found = {type(event) for event in before}
                before = [*(event for event in earlier.events if type(event) not in found), *before]
            earlier.position, earlier.events = begin, before
    for event in [*before, *lines]:
        builder.add(event)
    return RunGlance(builder.build(), skipped)
