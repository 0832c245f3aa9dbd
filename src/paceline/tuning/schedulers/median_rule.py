"""The median rule: a trial that is worse than half of the others at the same length is stopped.

Golovin et al., Google Vizier: A Service for Black-Box Optimization, 2017.
"""

import contextlib
import math
import statistics
from collections.abc import Sequence

from paceline.errors import SpecError
from paceline.events import Evaluated, EventReader, Started
from paceline.run import RunFolder
from paceline.spec import StepBatches
from paceline.tuning.journal import Metrics
from paceline.tuning.objectives import StudyObjective

MIN_OTHERS = 4  # trials that are at least as long, before any trial is stopped
Curve = Sequence[tuple[int, float]]  # samples and loss of each evaluation


def is_hopeless(curve: Curve, others: Sequence[Curve]) -> bool:
    """Return whether the best loss of a trial is above the median of the best losses of others by then.

    others: curves of other trials. Those that ended before this length do not count.
    """
    if not curve:
        return False
    samples = curve[-1][0]
    best = min(loss for _, loss in curve)
    bests = [
        min(loss for at, loss in other if at <= samples)
        for other in others
        if other and other[0][0] <= samples <= other[-1][0]
    ]
    return len(bests) >= MIN_OTHERS and best > statistics.median(bests)


class EvaluationCurve:
    """The evaluations of a run, read as they are written."""

    def __init__(self, run: RunFolder, objective: StudyObjective):
        self._run, self._objective = run, objective
        self._reader, self._steps = EventReader(run.events), 0
        self._batches = StepBatches((0,))
        self.points: list[tuple[int, float]] = []
        self.metrics: Metrics = {}  # of the last evaluation
        self.is_at_end = False  # whether that was the last of the training

    def update(self) -> bool:
        """Read new events. Return whether there was a new evaluation."""
        before = len(self.points)
        for event in self._reader.new(Started, Evaluated):
            if isinstance(event, Started):
                self._batches, self._steps = StepBatches((event.batch,)), event.steps
                with contextlib.suppress(SpecError, OSError):  # the file was deleted
                    self._batches = self._run.request()[0].batches
            elif isinstance(event, Evaluated):
                self.metrics = {
                    name: value if math.isfinite(value) else None for name, value in event.metrics.items()
                }
                loss = self._objective.read_loss(self.metrics)
                self.points.append(
                    (self._batches.samples_before(event.step), math.inf if loss is None else loss)
                )
                self.is_at_end = event.step >= self._steps
        return len(self.points) > before
