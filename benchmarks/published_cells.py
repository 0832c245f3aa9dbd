"""Numbers in the cells of tables of published measurements."""

import re
from collections.abc import Mapping


class NotPredictable(Exception):
    """The reason why a row cannot be predicted."""


def whole_number(text: str) -> int:
    """Return a whole number, or 0."""
    return int(float(text)) if re.fullmatch(r"\d+(\.0+)?(e\+?\d+)?", text.strip()) else 0


def read_int(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key, "")
    if re.fullmatch(r"\d+(\.0+)?(e\+?\d+)?", text):
        return int(float(text))
    if default is None:
        raise NotPredictable(f"{key} is missing")
    return default


def read_float(row: Mapping[str, str], key: str) -> float:
    try:
        return float(row.get(key, ""))
    except ValueError:
        raise NotPredictable(f"{key} is missing") from None
