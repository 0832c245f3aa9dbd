"""Run a lesson cell by cell, and pass on its text, its code and what they show."""

import contextlib
import io
from typing import Any

from paceline.errors import SpecError
from paceline.lesson.blocks import LessonCode, LessonPrint, LessonText
from paceline.lesson.cells import LessonCell, LessonFile
from paceline.lesson.outputs import Show, shown_by
from paceline.lesson.ranks import use_ranks

RANKS = (1, 2, 3, 4, 8)  # they divide the samples and tensors of every lesson


def check_ranks(ranks: int) -> None:
    """Raise SpecError for a number of ranks that lessons do not support."""
    if ranks not in RANKS:
        raise SpecError(f"lessons run on 1, 2, 3, 4 or 8 ranks, got {ranks}; use --ranks 4")


def play(lesson: LessonFile, ranks: int, show: Show, has_pictures: bool = False) -> None:
    """Run a lesson on `ranks` ranks, and pass its blocks to `show` as they appear.

    has_pictures: draw pictures, which takes matplotlib.

    Raises SpecError for a number of ranks that lessons do not support, AssertionError if a claim of the
    lesson is false, and what `paceline.spawn` raises.
    """
    check_ranks(ranks)
    names: dict[str, Any] = {"__name__": "__lesson__"}
    with use_ranks(ranks), shown_by(show, has_pictures):
        show(LessonText(lesson.text))
        for cell in lesson.cells:
            if cell.text:
                show(LessonText(cell.text))
            if cell.shown_code:
                show(LessonCode(cell.shown_code))
            if cell.code:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    execute(cell, str(lesson.path), names)
                if printed.getvalue():
                    show(LessonPrint(printed.getvalue()))


def execute(cell: LessonCell, file: str, names: dict[str, Any]) -> None:
    """Run the code of a cell with these names. Tracebacks have the line of the file."""
    exec(compile("\n" * cell.line + cell.code, file, "exec"), names)
