"""Step times of a foreign program, from the lines that it prints."""

import re
import statistics
import time
from collections.abc import Sequence

from paceline.monitor.sensor import Sensor
from paceline.units import is_whole_number

MAX_LINE = 4096  # characters of a line that are searched
LINE_END = re.compile(rb"[\r\n]")  # progress bars end their lines with a carriage return


class StepClock(Sensor):
    """The steps that a program reports, by a pattern of its output lines.

    pattern: its first group, or the group named `step`, is the number of the step. Without a number, each
        line is a step.
    """

    def __init__(self, pattern: re.Pattern[str]):
        super().__init__(("step", "step time"))
        self._pattern = pattern
        self._rests: dict[str, bytes] = {}
        self._new: list[float] = []  # seconds per step, since the last sample
        self.times: list[float] = []  # seconds per step, of the whole run
        self.step: float | None = None
        self.last_at: float | None = None  # steady clock at the last step

    def feed(self, stream: str, data: bytes) -> None:
        """Search new output of a stream."""
        *lines, self._rests[stream] = LINE_END.split(self._rests.get(stream, b"") + data)
        self._rests[stream] = self._rests[stream][-MAX_LINE:]
        now = time.monotonic()
        for line in lines:
            match = self._pattern.search(line[:MAX_LINE].decode(errors="replace"))
            if match:
                self._see(match, now)

    def _see(self, match: re.Match[str], now: float) -> None:
        named = match.groupdict().get("step") or (match[1] if match.re.groups else None)
        before = self.step
        step = float(named) if named is not None and is_whole_number(named) else (before or 0.0) + 1
        if before is not None and self.last_at is not None and step > before:
            step_s = (now - self.last_at) / (step - before)
            self._new.append(step_s)
            self.times.append(step_s)
        if before is None or step != before:  # several ranks may report one step
            self.step, self.last_at = step, now

    def read(self, now: float) -> Sequence[float | None]:
        new, self._new = self._new, []
        return [self.step, statistics.median(new) if new else None]
