"""Numbers in the cells of tables of published measurements."""

import re
from collections.abc import Mapping

# a number at the beginning of a cell, and the letters behind it; `4-8` and `1/2` are not numbers
NUMBER = re.compile(
    r"[~≈]?\s*(\d[\d,]*\.?\d*(?:e[+-]?\d+)?|\.\d+)(?![\d.,])\s*([a-wyz]*)(?![a-z]|\s*[-/x×]\s*\d)",
    re.IGNORECASE,
)
# units of a column other than its own, as factors
FACTORS = {
    "k": 1e3,
    "pflop": 1e3,
    "pflops": 1e3,
    "ms": 1e-3,
    "min": 60.0,
    "mib": 2**-10,
    "mb": 1e-3,
    "tb": 1e3,
}
PARAMETERS = {
    "k": 1e3,
    "m": 1e6,
    "million": 1e6,
    "b": 1e9,
    "bn": 1e9,
    "billion": 1e9,
    "t": 1e12,
    "trillion": 1e12,
}
FEWEST_PARAMETERS = 1e5  # a smaller number is meant in 10⁹


class NotPredictable(Exception):
    """The reason why a row cannot be predicted."""


def whole_number(text: str) -> int:
    """Return a whole number, such as 64 of `64 GPUs` or 8192 of `8k`, or 0."""
    if (match := NUMBER.match(text.strip())) is None:
        return 0
    number = float(match[1].replace(",", "")) * (2**10 if match[2].lower() == "k" else 1)
    return round(number) if number < 1e18 else 0


def read_int(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    if number := whole_number(row.get(key, "")):
        return number
    if default is None:
        raise NotPredictable(f"{key} is missing")
    return default


def read_float(row: Mapping[str, str], key: str) -> float:
    if (number := find_number(row.get(key, ""))) is None:
        raise NotPredictable(f"{key} is missing")
    return number


def find_number(text: str) -> float | None:
    """Return the number at the beginning of a cell in the unit of its column, or None.

    45.4 of `45.4 %`, 0.25 of `250 ms`.
    """
    match = NUMBER.match(text.strip())
    number = float(match[1].replace(",", "")) * FACTORS.get(match[2].lower(), 1.0) if match else 0.0
    return number if number > 0 else None


def find_rate(text: str) -> float | None:
    """Return GB/s, also of a cell in Gb/s, or None."""
    number = find_number(text)
    return number / 8 if number is not None and re.search(r"Gb(it|ps|/s)", text) else number


def find_parameters(text: str) -> float | None:
    """Return a number of parameters, such as 7e10 of `70B`, or None."""
    match = NUMBER.match(text.strip())
    if match is None:
        return None
    number = float(match[1].replace(",", "")) * PARAMETERS.get(match[2].lower(), 1.0)
    return (number if number >= FEWEST_PARAMETERS else number * 1e9) or None
