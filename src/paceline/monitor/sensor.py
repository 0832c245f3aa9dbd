"""Sensors: what a sampler reads at each sample."""

import abc
from collections.abc import Mapping, Sequence


class AbsentSensorError(Exception):
    """The machine lacks a sensor, or this user may not read it. The text is the reason."""


class Sensor(abc.ABC):
    """A source of some columns.

    columns   names of its columns; another sequence replaces them when they change
    comments  what the header reports, by topic
    absent    why columns or parts have no values, by column or part
    """

    def __init__(self, columns: Sequence[str] = ()):
        self.columns = columns
        self.comments: dict[str, str] = {}
        self.absent: dict[str, str] = {}

    @abc.abstractmethod
    def read(self, now: float) -> Sequence[float | None]:
        """Return the values of the columns; None if one is missing. now: seconds of a steady clock."""


class RateMeter:
    """Turns counters that grow into rates."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._time: float | None = None

    def rates(self, counts: Mapping[str, float], now: float) -> dict[str, float | None]:
        """Return the increase per second of each counter since the last call.

        None for a counter that is new, or that has decreased because it was reset.
        """
        elapsed_s = now - self._time if self._time is not None else 0.0
        rates = {
            name: (count - self._before[name]) / elapsed_s
            if elapsed_s > 0 and name in self._before and count >= self._before[name]
            else None
            for name, count in counts.items()
        }
        self._before, self._time = dict(counts), now
        return rates
