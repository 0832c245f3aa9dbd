"""Views of a run from its files, for commands, pages and reports. They require neither torch nor a live run.

    view = RunView(RunFolder(path))
    view.refresh()                   # reads the history in bounded memory; later calls read appended lines
    view.summary, view.break_down()  # facts
    view.steps                       # points of a curve
    view.skipped                     # lines that could not be read

    glance(RunFolder(path))          # present state: reads the end of the file, back to the last start

A history of up to 2^15 steps is exact. Of a longer history, evenly spaced steps are parsed, which represent
the steps between them; `Summary.sampled` is their number. The first steps of each start, the last step and
all other events are always parsed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline import events
from paceline.events import Evaluated, EventReader, Failed, Saved, Skipped, Started
from paceline.report.breakdown import RunBreakdown, RunBreakdownBuilder
from paceline.report.history import HistoryPoint
from paceline.report.summary import Summary, SummaryBuilder
from paceline.run import RunFolder


class RunView:
    """The whole history of a run, read incrementally."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._reader = EventReader(run.events)
        self._reset()

    def _reset(self) -> None:
        self._summary, self._breakdown = SummaryBuilder(), RunBreakdownBuilder()

    def refresh(self) -> bool:
        """Read the lines appended since the last call, and return whether there were any.

        Raises RunError for an unreadable file."""
        restarts, is_new = self._reader.restarts, False
        with events.readable(self.run.events):
            for event, count in self._reader.sampled():
                if self._reader.restarts > restarts:  # another file replaced it
                    restarts = self._reader.restarts
                    self._reset()
                self._summary.add(event, count)
                self._breakdown.add(event, count)
                is_new = True
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


def glance(run: RunFolder) -> RunGlance:
    """Return the present state of a run. Raises RunError for an unreadable file."""
    skipped, builder = Skipped(), SummaryBuilder()
    with events.readable(run.events):
        begin, lines = events.tail(run.events, skipped)
        has_start = any(isinstance(event, Started) for event in lines)
        before = (
            events.last(run.events, Started, Evaluated, Saved, Failed, until=(Started,), before=begin)
            if not has_start
            else []
        )
    for event in [*before, *lines]:
        builder.add(event)
    return RunGlance(builder.build(), skipped)
