"""What the code of a lesson calls to show something: tables, claims, questions and pictures."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import TYPE_CHECKING, Any

from paceline.lesson.blocks import (
    Block,
    LessonClaim,
    LessonPicture,
    LessonPrint,
    LessonQuestion,
    LessonTable,
    LessonText,
    format_value,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Show = Callable[[Block], None]
PLAIN = (bool, int, str, NoneType)  # values whose comparison no student defines
MAX_SHOWN = 200  # characters of a value in an error


def _show_here(block: Block) -> None:
    """Show a block in a script or a notebook."""
    if isinstance(block, LessonPicture):
        from IPython.display import SVG, display

        display(SVG(block.svg))
        return
    from paceline.lesson.terminal_text import format_block

    print(format_block(block), end="")


class _Output:
    """Where blocks go, and whether pictures are wanted."""

    show: Show = staticmethod(_show_here)
    has_pictures: bool | None = None  # None: in a notebook only


_output = _Output()


@contextmanager
def shown_by(show: Show, has_pictures: bool) -> Iterator[None]:
    """Pass the blocks of a lesson to `show` inside the context."""
    before = _output.show, _output.has_pictures
    _output.show, _output.has_pictures = show, has_pictures
    try:
        yield
    finally:
        _output.show, _output.has_pictures = before


def say(text: str) -> None:
    """Show a sentence that contains results."""
    _output.show(LessonText(text))


def ask(question: str, answer: str) -> None:
    """Ask the reader a question. The answer is shown at the end of the lesson, or when it is opened."""
    _output.show(LessonQuestion(question, answer))


def column(results: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the value of one key of the results of all ranks."""
    return [result.get(key) for result in results]


def table(
    title: str,
    results: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    is_measured: bool = False,
) -> None:
    """Show results by rank: a line for each rank, a column for each key.

    results: a dict for each rank, or a dict of columns, each with a value for each rank.
    is_measured: it contains times or rates, which differ from run to run.
    """
    if not isinstance(results, Mapping):
        results = {
            key: column(results, key) for key in dict.fromkeys(key for result in results for key in result)
        }
    lines = [(rank, *values) for rank, values in enumerate(zip(*results.values(), strict=True))]
    rows(title, ["rank", *results], lines, is_measured)


def rows(
    title: str, headers: Sequence[str], lines: Sequence[Sequence[Any]], is_measured: bool = False
) -> None:
    """Show a table with these headers and lines."""
    _output.show(LessonTable(title, tuple(headers), tuple(map(tuple, lines)), is_measured))


def check(claim: str, got: Any, expected: Any = True, tolerance: float = 0.0) -> None:
    """Show a claim after comparing two values: numbers, tensors, or lists and dicts of them.

    tolerance: largest absolute difference of two numbers that counts as equal.

    Raises AssertionError, with both values, if they differ.
    """
    if not _is_equal(got, expected, tolerance):
        raise AssertionError(f"{claim}: this is false; {_describe_difference(got, expected)}")
    _output.show(LessonClaim(claim))


def _describe_difference(got: Any, expected: Any) -> str:
    """Return both values in words, with their shapes or their ratio if that is what differs."""
    shapes = [tuple(getattr(value, "shape", ())) for value in (got, expected)]
    if hasattr(got, "shape") and hasattr(expected, "shape") and shapes[0] != shapes[1]:
        return f"expected the shape {shapes[1]}, got the shape {shapes[0]}"
    text = f"expected {describe_value(expected)}, got {describe_value(got)}"
    ratio = _find_ratio(*(list(_flatten(value)) for value in (got, expected)))
    return text if ratio is None else f"{text}: {ratio:.4g} times what is expected"


def _flatten(value: Any) -> Iterator[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _find_ratio(got: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """Return the factor between all numbers of both, or None if there is no such factor."""
    if len(got) != len(expected) or not all(isinstance(x, float) for x in (*got, *expected)):
        return None
    ratios = [a / b if b else math.inf for a, b in zip(got, expected, strict=True) if a or b]
    if len(ratios) < 2 or not all(map(math.isfinite, ratios)):
        return None
    first = ratios[0]
    is_constant = max(ratios) - min(ratios) <= 1e-3 * abs(first)
    return first if is_constant and first and abs(first - 1) > 1e-2 else None


def describe_value(value: Any) -> str:
    """Return a value as text for an error: texts in quotes, and at most MAX_SHOWN characters."""
    if value is None or isinstance(value, str):
        text = repr(value)
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(describe_value, value[:MAX_SHOWN]))}]"
    elif hasattr(value, "shape") and not math.prod(value.shape):
        text = f"a tensor of shape {tuple(value.shape)}"
    elif " object at 0x" in repr(value):
        text = f"an object of {type(value).__name__}"
    else:
        text = format_value(value)
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _is_equal(got: Any, expected: Any, tolerance: float) -> bool:
    got, expected = (value.tolist() if hasattr(value, "tolist") else value for value in (got, expected))
    if isinstance(expected, Mapping):
        return (
            isinstance(got, Mapping)
            and got.keys() == expected.keys()
            and all(_is_equal(got[key], expected[key], tolerance) for key in expected)
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(_is_equal(one, other, tolerance) for one, other in zip(got, expected, strict=True))
        )
    if isinstance(expected, float) or isinstance(got, float):
        if not isinstance(got, int | float) or not isinstance(expected, int | float):
            return False
        return got == expected or math.isclose(got, expected, rel_tol=0.0, abs_tol=tolerance)
    return isinstance(got, PLAIN) and got == expected


def picture(
    title: str, width: float = 8.0, height: float = 3.5
) -> "Callable[[Callable[[Figure], None]], None]":
    """Draw a picture by a function of an empty matplotlib figure, where pictures can be shown.

    @picture("loss by step")
    def draw(figure):
        figure.subplots().plot(losses)
    """

    def draw(function: "Callable[[Figure], None]") -> None:
        if not (_is_notebook() if _output.has_pictures is None else _output.has_pictures):
            return
        if find_spec("matplotlib") is None:
            hint = "matplotlib is not installed; run: pip install 'paceline[plot]'"
            _output.show(LessonPrint(f"picture not drawn: {title}: {hint}"))
            return
        _output.show(LessonPicture(title, _draw(function, width, height)))

    return draw


def _draw(function: "Callable[[Figure], None]", width: float, height: float) -> str:
    from paceline.plotting.figure import figure

    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        with figure(path, width, height) as drawn:
            function(drawn)
        return path.read_text(encoding="utf-8")


def _is_notebook() -> bool:
    import sys

    return "ipykernel" in sys.modules
