"""Curves in braille, read back by the names that Unicode gives the characters."""

import math
import unicodedata

import pytest

from paceline.terminal.braille import draw_bar, draw_curve

# Dot of a cell by its number in the name of the character: column and row.
PLACES = {
    "1": (0, 0),
    "2": (0, 1),
    "3": (0, 2),
    "4": (1, 0),
    "5": (1, 1),
    "6": (1, 2),
    "7": (0, 3),
    "8": (1, 3),
}


def read_dots(rows: list[str]) -> set[tuple[int, int]]:
    """Return the dots of the characters, as column and row from the upper left corner."""
    dots = set()
    for row, line in enumerate(rows):
        for column, char in enumerate(line):
            if char == " ":
                continue
            for number in unicodedata.name(char).removeprefix("BRAILLE PATTERN DOTS-"):
                x, y = PLACES[number]
                dots.add((2 * column + x, 4 * row + y))
    return dots


def draw(values, width=10, height=5, x=None, low=None, high=None, **options):
    x = x or [*range(len(values))]
    return draw_curve(x, values, low or values, high or values, width, height, **options)


def test_a_straight_line_has_one_dot_in_each_column():
    plot = draw([float(at) for at in range(20)])
    dots = read_dots(plot.rows)
    assert dots == {(at, 19 - at) for at in range(20)}
    assert (plot.low, plot.high) == (0.0, 19.0)


def test_ends_and_extremes_lie_on_the_edges():
    values = [math.sin(at / 7) for at in range(100)]
    dots = read_dots(draw(values, 30, 6).rows)
    assert {min(x for x, _ in dots), max(x for x, _ in dots)} == {0, 59}
    assert {min(y for _, y in dots), max(y for _, y in dots)} == {0, 23}
    peak = max(range(100), key=values.__getitem__)
    assert (round(peak / 99 * 59), 0) in dots


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis():
    plot = draw([1.0, 10.0, 100.0], 1, 4, is_log=True, x=[0, 0.5, 1])
    linear = draw([1.0, 10.0, 100.0], 1, 4, x=[0, 0.5, 1])
    assert plot.low == pytest.approx(1.0)
    assert plot.high == pytest.approx(100.0)
    assert read_dots(plot.rows) != read_dots(linear.rows)
    middle = draw([1.0, 10.0, 100.0], 10, 5, is_log=True)
    straight = draw([0.0, 1.0, 2.0], 10, 5)
    assert middle.rows == straight.rows


def test_a_spike_within_a_point_shows_in_the_band():
    quiet = draw([1.0] * 20, low=[1.0] * 20, high=[1.0] * 20)
    spike = draw([1.0] * 20, low=[1.0] * 20, high=[1.0] * 10 + [9.0] + [1.0] * 9)
    assert spike.high == 9.0
    assert quiet.high == 1.0
    assert any(any(row) for row in spike.is_band)
    assert not any(any(row) for row in quiet.is_band)
    assert min(y for _, y in read_dots(spike.rows)) <= 1


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([None, None], {}),
        ([math.nan, math.inf], {}),
        ([-1.0, 0.0], {"is_log": True}),
        ([], {"x": []}),
    ],
    ids=["none", "not-finite", "not-positive", "empty"],
)
def test_without_values_nothing_is_drawn(values, options):
    plot = draw(values, **options)
    assert (plot.low, plot.high) == (None, None)
    assert read_dots(plot.rows) == set()


def test_a_gap_is_not_bridged():
    whole, broken = draw([0.0] * 20), draw([0.0] * 8 + [None] * 4 + [0.0] * 8)
    assert {x for x, _ in read_dots(whole.rows)} - {x for x, _ in read_dots(broken.rows)} == {8, 9, 10, 11}


def test_huge_values_do_not_overflow():
    plot = draw([-1e308, 1e308, 0.0])
    assert (plot.low, plot.high) == (-1e308, 1e308)
    assert len(plot.rows) == 5


@pytest.mark.parametrize(
    ("share", "text"), [(0, "    "), (0.5, "██  "), (1, "████"), (7, "████"), (0.28, "█▏  ")]
)
def test_bars(share, text):
    assert draw_bar(share, 4) == text
