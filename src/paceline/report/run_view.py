"""RunView: what the files of a run tell, for commands, pages and reports. It reads only, and needs neither torch nor a live run.

    view = RunView(RunFolder(path))
    view.refresh()                 # the whole history, in bounded memory; again later: what has been appended since
    view.summary, view.measured()  # facts
    view.steps                     # points of a curve
    view.skipped                   # lines that could not be read

    glance(RunFolder(path))        # how it is now: reads the end of its file, and searches back to its last start

A history of up to 2^15 steps is exact. Of a longer one, evenly spaced steps are parsed and stand for those between them (`Summary.sampled`
says how many were), besides the first steps of each start, the last step and all events that are no steps.
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
    def __init__(self, run: RunFolder):
        self.run = run
        self._reader = EventReader(run.events)
        self._begin()

    def _begin(self) -> None:
        self._summary, self._measured = SummaryBuilder(), RunBreakdownBuilder()

    def refresh(self) -> bool:
        """Read what has been appended since the last time; return whether there was anything. Raises RunError for an unreadable file."""
        restarts, is_new = self._reader.restarts, False
        with events.readable(self.run.events):
            for event, count in self._reader.sampled():
                if self._reader.restarts > restarts:  # another file took its place
                    restarts = self._reader.restarts
                    self._begin()
                self._summary.add(event, count)
                self._measured.add(event, count)
                is_new = True
        return is_new

    @property
    def summary(self) -> Summary:
        return self._summary.summary()

    def measured(self) -> RunBreakdown:
        """Return where time and memory went. Raises RunError where no step was profiled."""
        return self._measured.measured()

    @property
    def steps(self) -> Sequence[HistoryPoint]:
        """The steps in rising order, each with the number of steps that it stands for."""
        return self._summary.history.points

    @property
    def skipped(self) -> Skipped:
        return self._reader.skipped


def view(run: RunFolder) -> RunView:
    """Return a view of all that has happened so far."""
    found = RunView(run)
    found.refresh()
    return found


@dataclass(frozen=True)
class RunGlance:
    """`summary`: of the last start, its last evaluation, save and failure, and the last lines; its rates are of these lines."""

    summary: Summary
    skipped: Skipped = field(default_factory=Skipped)  # of what was read


def glance(run: RunFolder) -> RunGlance:
    """Return how a run is now. Raises RunError for an unreadable file."""
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
    return RunGlance(builder.summary(), skipped)
