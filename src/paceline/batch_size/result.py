"""What a training with one batch needed to reach the target, from the events of its run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from paceline.batch_size.target import Target
from paceline.events import Ended, Evaluated, Event, NoiseMeasured, Started, Step

WARM_UP_STEPS = 3  # of each start, excluded from the time of a step
WIDEST = 16.0  # factor on the learning rate, up to which --tune continues


@dataclass(frozen=True)
class BatchResult:
    """A training with one batch.

    lr: None if the task defines its optimizer. lr_factor: of --tune, on the scaled learning rate. first:
    steps before it, of the checkpoint from which it branches. steps: to the target, without these; None if
    it was not reached. best: value of the metric, at best_step. step_s: median. why: a sentence, if the
    training ended before its length and without the target. is_early: whether the first evaluation reached
    the target, so that fewer steps may do.
    """

    batch: int
    lr: float | None
    first: int
    done: int
    steps: float | None
    best: float | None
    best_step: int | None
    step_s: float | None
    noise: NoiseMeasured | None = None
    why: str = ""
    lr_factor: float = 1.0
    is_early: bool = False

    @property
    def samples(self) -> float | None:
        """Samples to the target."""
        return self.steps * self.batch if self.steps is not None else None

    @property
    def seconds(self) -> float | None:
        """Seconds of steps to the target, without evaluations and checkpoints."""
        return self.steps * self.step_s if self.steps is not None and self.step_s is not None else None


def read_result(events: Iterable[Event], batch: int, lr: float | None, target: Target) -> BatchResult:
    """Return the result of a training from its events. A resumed training repeats some steps."""
    first: int | None = None
    begin = done = 0
    evaluations: dict[int, float] = {}
    step_s: dict[int, float] = {}
    noise: NoiseMeasured | None = None
    why = ""
    for event in events:
        match event:
            case Started():
                begin, why = event.step, ""
                first = begin if first is None else first
                done = max(first, min(done, begin))
                evaluations = {step: value for step, value in evaluations.items() if step <= begin}
            case Step():
                done = event.step
                if event.step > begin + WARM_UP_STEPS:
                    step_s[event.step] = event.step_s
            case Evaluated():
                evaluations[event.step] = event.metrics.get(target.name, math.nan)
            case NoiseMeasured():
                noise = event
            case Ended():
                why = event.why
    first = first or 0
    crossing = target.find_crossing(sorted(evaluations.items()))
    best = target.best(list(evaluations.values()))
    return BatchResult(
        batch=batch,
        lr=lr,
        first=first,
        done=done,
        steps=max(crossing - first, 0.0) if crossing is not None else None,
        best=best,
        best_step=next((step for step, value in evaluations.items() if value == best), None),
        step_s=median(step_s.values()) if step_s else None,
        noise=noise,
        why="" if crossing is not None else why,
        is_early=crossing is not None and crossing == min(evaluations),
    )
