"""The lessons in the order of a course."""

import difflib
from functools import cache

from paceline.errors import SpecError
from paceline.lesson.cells import COURSE, EXERCISES, LessonFile, read_lesson

# names in the order of a course, by part
PARTS = {
    "Why": ("growth", "machine"),
    "Processes and communication": (
        "ranks",
        "point-to-point",
        "collectives",
        "ring-all-reduce",
        "bandwidth",
        "overlap",
    ),
    "Training on several ranks": (
        "data-parallel",
        "mistakes",
        "zero",
        "tensor-parallel",
        "pipeline",
        "context-parallel",
        "mesh",
        "local-sgd",
        "parameter-server",
        "rpc",
        "large-batch",
    ),
    "Numbers and dependencies": (
        "mixed-precision",
        "products",
        "recurrent",
    ),
    "Running it": (
        "planning",
        "data-loading",
        "profiling",
        "checkpoint",
        "scaling",
    ),
}
ORDER = tuple(name for names in PARTS.values() for name in names)


@cache
def find_lesson(name: str) -> LessonFile:
    """Return a lesson by its name, or by its number in the list.

    Raises SpecError, with the nearest name, if there is none.
    """
    if name.isascii() and name.isdigit() and 1 <= int(name[:9]) <= len(ORDER):
        name = ORDER[int(name[:9]) - 1]
    if name not in ORDER:
        near = difflib.get_close_matches(name, ORDER, 1)
        hint = f"did you mean {near[0]}?" if near else "run: paceline lesson"
        raise SpecError(f"no such lesson: {name!r:.60}; {hint}")
    return read_lesson(COURSE / f"{name.replace('-', '_')}.py")


@cache
def find_exercise(name: str) -> LessonFile | None:
    """Return the exercise of a lesson, or None: its cells are `exercise`, `solution` and `grade`."""
    path = EXERCISES / f"{find_lesson(name).path.name}"
    return read_lesson(path) if path.exists() else None


def format_list() -> str:
    """Return the list of lessons, by part, with their numbers and titles."""
    width = max(map(len, ORDER))
    lines, number = [], 0
    for part, names in PARTS.items():
        lines.append(f"{part}")
        for name in names:
            number += 1
            mark = "exercise" if find_exercise(name) is not None else ""
            lines.append(
                f"  {number:2}  {name:{width}}  {find_lesson(name).title}{f' [{mark}]' * bool(mark)}"
            )
        lines.append("")
    lines.append("Run a lesson:        paceline lesson collectives --ranks 4")
    lines.append("Write it as a page:  paceline lesson collectives --html lesson.html")
    lines.append("Do an exercise:      paceline lesson data-parallel --exercise my.py")
    lines.append("Check your solution: paceline lesson data-parallel --check my.py")
    lines.append("")
    lines.append(
        "A lesson runs its code on processes of this machine. The answers to its questions are at its end."
    )
    lines.append(
        "To begin with: ranks, point-to-point, collectives, data-parallel. A number works as a name."
    )
    return "\n".join(lines)
