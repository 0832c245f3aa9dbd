"""Print a lesson, or write it as a page or a notebook."""

import sys
import time
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import SpecError
from paceline.files import check_target, write_whole
from paceline.lesson.blocks import Block, LessonClaim, LessonPicture, LessonQuestion
from paceline.lesson.cells import LessonFile
from paceline.lesson.exercise import name_exercise
from paceline.lesson.html_page import build_page
from paceline.lesson.play import check_ranks, play
from paceline.lesson.terminal_text import format_text, style_block
from paceline.units import several


def print_lesson(lesson: LessonFile, ranks: int) -> None:
    """Run a lesson and print it. The answers to its questions come last."""
    questions: list[LessonQuestion] = []
    last: list[Block] = []

    def show(block: Block) -> None:
        if isinstance(block, LessonQuestion):
            questions.append(block)
        if last and isinstance(last[-1], LessonClaim) and not isinstance(block, LessonClaim):
            console.print()
        last[:] = [block]
        console.print(style_block(block), end="", soft_wrap=True)

    from rich.console import Console

    check_ranks(ranks)
    # standard output belongs to the code of the cell while it runs
    console = Console(file=sys.stdout, highlight=False)
    print(f"{lesson.title}\n{'=' * len(lesson.title)}\n")
    play(lesson, ranks, show)
    if questions:
        print("Answers\n-------")
    for number, question in enumerate(questions, 1):
        print(format_text(f"{number}. {question.answer}"), end="")
    if (exercise := name_exercise(lesson.name)) is not None:
        print(f"\n{format_text(exercise.text)}", end="")


def write_html(lesson: LessonFile, ranks: int, path: Path) -> str:
    """Run a lesson and write it as an HTML file. Return a sentence about it. Raises SpecError."""
    check_target(path, SpecError)
    if find_spec("matplotlib") is None:
        raise SpecError(
            "cannot draw pictures: matplotlib is not installed; run: pip install 'paceline[plot]'"
        )
    blocks: list[Block] = []
    begin = time.perf_counter()
    play(lesson, ranks, blocks.append, has_pictures=True)
    duration_s = time.perf_counter() - begin
    if (exercise := name_exercise(lesson.name)) is not None:
        blocks.append(exercise)
    subtitle = f"A lesson of Paceline. The values below come from a run on {several(ranks, 'rank')}."
    write_whole(path, build_page(lesson.title, subtitle, blocks), SpecError)
    claims = sum(isinstance(block, LessonClaim) for block in blocks)
    pictures = sum(isinstance(block, LessonPicture) for block in blocks)
    return (
        f"{path}: {several(claims, 'claim')} checked on {several(ranks, 'rank')}, "
        f"{several(pictures, 'picture')}, {duration_s:.1f} s"
    )


def write_notebook(lesson: LessonFile, ranks: int, path: Path) -> str:
    """Write a lesson as a notebook, without running it. Return a sentence about it. Raises SpecError."""
    check_target(path, SpecError)
    from paceline.lesson.notebook import build_notebook

    write_whole(path, build_notebook(lesson, ranks), SpecError)
    return f"{path}: open it with: jupyter lab {path}"
