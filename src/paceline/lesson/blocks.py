"""What a lesson shows: text, code, tables, claims, questions and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LessonText:
    """Paragraphs in a small part of Markdown: headings, lists, `code` and **bold**."""

    text: str


@dataclass(frozen=True)
class LessonCode:
    code: str


@dataclass(frozen=True)
class LessonPrint:
    """What the code or the ranks printed."""

    text: str


@dataclass(frozen=True)
class LessonTable:
    """A table. The cells keep their values, so that tests can compare them.

    is_measured: it contains times or rates, which differ from run to run.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    is_measured: bool = False


@dataclass(frozen=True)
class LessonClaim:
    """A claim that has been checked, and is true."""

    claim: str


@dataclass(frozen=True)
class LessonQuestion:
    question: str
    answer: str


@dataclass(frozen=True)
class LessonPicture:
    title: str
    svg: str = field(repr=False)


Block = LessonText | LessonCode | LessonPrint | LessonTable | LessonClaim | LessonQuestion | LessonPicture


def format_value(value: Any) -> str:
    """Return a value of a table as text: tensors as nested lists, numbers with at most 4 significant digits.

    [6.0, 10.0] -> `[6, 10]`; 0.12345 -> `0.1235`
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return _format_number(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return str(value)


def _format_number(value: float) -> str:
    if value.is_integer() and abs(value) < 1e15:
        return format_value(int(value))
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"
