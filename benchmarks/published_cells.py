"""Numbers in the cells of tables of published measurements."""

import re
from collections.abc import Mapping


class NotPredictable(Exception):
    """The reason why a row cannot be predicted."""


def whole_number(text: str) -> int:
    """Return a whole number, or 0."""
    plain = text.strip().replace(",", "").lower()
    return round(float(plain)) if re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?", plain) else 0


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
    """Return the number at the beginning of a cell, such as 45.4 of `45.4 %`, or None."""
    match = re.match(r"~?\s*([\d,]*\.?\d+(?:e[+-]?\d+)?)", text.strip().lower())
    number = float(match[1].replace(",", "")) if match else 0.0
    return number if number > 0 else None
