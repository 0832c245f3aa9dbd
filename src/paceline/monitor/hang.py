"""Notice that a foreign program makes no progress."""

import statistics
import time
from collections.abc import Sequence

from paceline.monitor.columns import kind_of
from paceline.monitor.step_pattern import StepClock
from paceline.units import format_seconds

AFTER_S = 60.0
STEPS = 20  # times the median step
IDLE_CPU = 5.0  # percent of a core: less is waiting
MIN_STEPS = 3


class HangDetector:
    """Reports once that no step ended, or that all ranks and GPUs were idle, for a time.

    after_s: the time; None: a minute, and 20 median steps at least
    steps: the steps of the program, if its output has them
    """

    def __init__(self, after_s: float | None, steps: StepClock | None):
        self._after_s, self._steps = after_s, steps
        self._idle_since: float | None = None
        self._was_hung = False

    def check(self, columns: Sequence[str], values: Sequence[float | None]) -> str | None:
        """Return a sentence at the first sample of a hang."""
        now = time.monotonic()
        hung_s, what = self._no_step_s(now) if self._steps is not None else self._idle_s(now, columns, values)
        is_hung = hung_s is not None and hung_s >= self.limit_s
        is_new, self._was_hung = is_hung and not self._was_hung, is_hung
        return f"{what} for {format_seconds(hung_s)}" if is_new and hung_s is not None else None

    @property
    def limit_s(self) -> float:
        """How long nothing may happen."""
        if self._after_s is not None:
            return self._after_s
        times = self._steps.times if self._steps is not None else []
        return max(AFTER_S, STEPS * statistics.median(times[-1000:]) if times else 0.0)

    def _no_step_s(self, now: float) -> tuple[float | None, str]:
        assert self._steps is not None
        at, step = self._steps.last_at, self._steps.step
        if at is None or step is None or len(self._steps.times) < MIN_STEPS:
            return None, ""
        return now - at, f"no step after step {step:.0f}"

    def _idle_s(
        self, now: float, columns: Sequence[str], values: Sequence[float | None]
    ) -> tuple[float | None, str]:
        of_ranks, of_gpus = [], []
        for name, value in zip(columns, values, strict=True):
            kind = kind_of(name)
            if kind in ("rankN cpu", "rankN workers cpu"):
                of_ranks.append(value)
            elif kind == "gpuN utilization":
                of_gpus.append(value)
        known = [value for value in of_ranks if value is not None]
        is_idle = bool(known) and sum(known) < IDLE_CPU and not any(value for value in of_gpus)
        if not is_idle:
            self._idle_since = None
            return None, ""
        if self._idle_since is None:
            self._idle_since = now
        return now - self._idle_since, "all ranks and GPUs were idle"
