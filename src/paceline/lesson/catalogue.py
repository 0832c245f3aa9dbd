"""The lessons in the order of a course."""

import difflib
from dataclasses import dataclass
from functools import cache

from paceline.errors import SpecError
from paceline.lesson.cells import COURSE, EXERCISES, LessonFile, read_lesson


@dataclass(frozen=True)
class Chapter:
    """A chapter of the course: its folder in `lesson/course`, and the names of its lessons in order."""

    title: str
    folder: str
    names: tuple[str, ...]


CHAPTERS = (
    Chapter("Why training is distributed", "motivation", ("growth", "machine")),
    Chapter(
        "Processes and messages",
        "communication",
        ("ranks", "point-to-point", "collectives", "ring-all-reduce", "bandwidth", "overlap", "streams"),
    ),
    Chapter("Which computations parallelize", "dependencies", ("products", "recurrent")),
    Chapter(
        "Data parallelism",
        "data_parallelism",
        ("data-parallel", "mistakes", "start-mistakes", "large-batch", "mixed-precision"),
    ),
    Chapter(
        "Models that do not fit on one device",
        "model_parallelism",
        ("zero", "tensor-parallel", "pipeline", "context-parallel", "mesh", "split-mistakes"),
    ),
    Chapter(
        "Training that waits less",
        "asynchronous",
        ("local-sgd", "rpc", "parameter-server"),
    ),
    Chapter(
        "Running it",
        "operation",
        ("planning", "data-loading", "profiling", "checkpoint", "scaling"),
    ),
)
FOLDERS = {name: chapter.folder for chapter in CHAPTERS for name in chapter.names}
ORDER = tuple(FOLDERS)
# Names of plans and their keys
SHORT_NAMES = {
    "ddp": "data-parallel",
    "tp": "tensor-parallel",
    "pp": "pipeline",
    "cp": "context-parallel",
}


@cache
def find_lesson(name: str) -> LessonFile:
    """Return a lesson by its name, its short name, or its number in the list.

    Raises SpecError, with the nearest name, if there is none.
    """
    if name.isascii() and name.isdigit() and 1 <= int(name[:9]) <= len(ORDER):
        name = ORDER[int(name[:9]) - 1]
    name = SHORT_NAMES.get(name, name)
    if name not in ORDER:
        near = difflib.get_close_matches(name, ORDER, 1)
        hint = f"did you mean {near[0]}?" if near else "run: paceline lesson"
        raise SpecError(f"no such lesson: {name!r:.60}; {hint}")
    return read_lesson(COURSE / FOLDERS[name] / f"{name.replace('-', '_')}.py")


@cache
def find_exercise(name: str) -> LessonFile | None:
    """Return the exercise of a lesson, or None: its cells are `exercise`, `solution` and `grade`."""
    path = EXERCISES / f"{find_lesson(name).path.name}"
    return read_lesson(path) if path.exists() else None


def format_list() -> str:
    """Return the list of lessons, by chapter, with their numbers and titles."""
    width = max(map(len, ORDER))
    lines, number = [], 0
    for chapter in CHAPTERS:
        lines.append(chapter.title)
        for name in chapter.names:
            number += 1
            mark = " " if find_exercise(name) is None else "*"
            lines.append(f"  {number:2} {mark} {name:{width}}  {find_lesson(name).title}")
        lines.append("")
    return "\n".join([*lines, END])


END = """\
* has an exercise

Run a lesson:        paceline lesson collectives --ranks 4
Write it as a page:  paceline lesson collectives --html lesson.html
Do an exercise:      paceline lesson data-parallel --exercise my.py
Check your solution: paceline lesson data-parallel --check my.py

A lesson runs its code on processes of this machine. Its questions are answered
at its end. A number works as a name. To begin with: ranks, point-to-point,
collectives, data-parallel."""
