"""Curves as braille characters: two dots across and four down in each character."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ACROSS, DOWN = 2, 4
FIRST = 0x2800
# Bit of the dot in a column and a row of a character.
BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

Values = Sequence[float | None]


class Dots:
    """A grid of dots, `width` by `height` characters. Row 0 is at the top."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self._cells = [[0] * width for _ in range(height)]

    def set(self, x: int, y: int) -> None:
        """Set a dot; outside of the grid, nothing happens."""
        if 0 <= x < self.width * ACROSS and 0 <= y < self.height * DOWN:
            self._cells[y // DOWN][x // ACROSS] |= BITS[x % ACROSS][y % DOWN]

    def draw_line(self, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Set the dots of a straight line, both ends included."""
        (x, y), (to_x, to_y) = begin, end
        count = max(abs(to_x - x), abs(to_y - y), 1)
        for at in range(count + 1):
            self.set(x + round((to_x - x) * at / count), y + round((to_y - y) * at / count))

    def has(self, column: int, row: int) -> bool:
        """Return whether a character has a dot."""
        return self._cells[row][column] != 0

    def char(self, column: int, row: int) -> str:
        return chr(FIRST + self._cells[row][column]) if self._cells[row][column] else " "


@dataclass(frozen=True)
class Plot:
    """A drawn curve. `rows`: characters. `is_band`: those that show only the band, in the same shape.

    low, high: the values at the lower and the upper edge; None if there is nothing to draw."""

    rows: list[str]
    is_band: list[list[bool]]
    low: float | None
    high: float | None


def draw_curve(
    x: Sequence[float],
    mean: Values,
    low: Values,
    high: Values,
    width: int,
    height: int,
    is_log: bool = False,
    limits: tuple[float, float] | None = None,
    base: float | None = None,
) -> Plot:
    """Draw the mean of each point as a line, and the band from lowest to highest value behind it.

    x: ascending. limits: of the horizontal axis, else the first and the last point.
    base: value that the vertical axis contains in any case.
    is_log: logarithmic vertical axis, which leaves out values that are not positive."""

    def scale(value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        if is_log:
            return math.log10(value) if value > 0 else None
        return value

    scaled = [[scale(value) for value in values] for values in (mean, low, high)]
    known = [value for values in scaled for value in values if value is not None]
    line, band = Dots(width, height), Dots(width, height)
    if not known:
        return _compose(line, band, None, None)
    known += [] if base is None or is_log else [base]
    bottom, top = min(known), max(known)
    begin, end = limits or (x[0], x[-1])
    num_x, num_y = width * ACROSS - 1, height * DOWN - 1
    half_span = top / 2 - bottom / 2  # the whole span of huge numbers is infinite

    def place_x(value: float) -> int:
        return round((value - begin) / (end - begin) * num_x) if end > begin else num_x

    def place_y(value: float) -> int:
        if half_span > 0:
            return round((top / 2 - value / 2) / half_span * num_y)
        return num_y // 2 if base is None else num_y

    before: tuple[int, int] | None = None
    for at, value, least, most in zip(map(place_x, x), *scaled, strict=True):
        if least is not None and most is not None:
            for y in range(place_y(most), place_y(least) + 1):
                if (at + y) % 2 == 0:  # half of the dots, so that it looks different without colours too
                    band.set(at, y)
        if value is None:
            before = None
            continue
        here = (at, place_y(value))
        line.draw_line(before or here, here)
        before = here
    return _compose(line, band, *((10**bottom, 10**top) if is_log else (bottom, top)))


def _compose(line: Dots, band: Dots, low: float | None, high: float | None) -> Plot:
    rows, is_band = [], []
    for row in range(line.height):
        of_band = [not line.has(at, row) and band.has(at, row) for at in range(line.width)]
        rows.append("".join((band if of_band[at] else line).char(at, row) for at in range(line.width)))
        is_band.append(of_band)
    return Plot(rows, is_band, low, high)


def draw_bar(share: float, width: int) -> str:
    """Return a horizontal bar of a share from 0 to 1, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width)
