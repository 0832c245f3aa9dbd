"""Exercises of lessons: write the file that a student completes, and check it."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.errors import SpecError
from paceline.files import check_target, write_whole
from paceline.launch.launchers import check_count
from paceline.lesson.blocks import LessonText
from paceline.lesson.catalogue import ORDER, find_exercise
from paceline.lesson.cells import LessonCell, LessonFile

CHECK_S = 300.0  # longest time of a check


def require_exercise(name: str) -> LessonFile:
    """Return the exercise of a lesson. Raises SpecError if it has none."""
    exercise = find_exercise(name)
    if exercise is None:
        names = ", ".join(name for name in ORDER if find_exercise(name) is not None)
        raise SpecError(f"the lesson {name} has no exercise; lessons with an exercise: {names}")
    return exercise


def read_cell(exercise: LessonFile, name: str) -> LessonCell:
    """Return the cell `exercise`, `solution` or `grade`."""
    return next(cell for cell in exercise.cells if cell.name == name)


def format_exercise(name: str) -> str:
    """Return the file that a student completes: the task as comments, and a function without its body."""
    exercise = require_exercise(name)
    cell = read_cell(exercise, "exercise")
    task = "\n".join(f"# {line}".rstrip() for line in cell.text.splitlines())
    hint = f"# Check it:  paceline lesson {name} --check FILE"
    return f'"""{exercise.title}."""\n\n{task}\n#\n{hint}\n\n{cell.code}\n'


def name_exercise(name: str) -> LessonText | None:
    """Return what the end of a lesson says about its exercise; None if it has none."""
    exercise = find_exercise(name)
    if exercise is None:
        return None
    title = exercise.title.removeprefix("Exercise: ")
    return LessonText(f"## Exercise: {title}\n\nWrite the file: `paceline lesson {name} --exercise my.py`")


def write_exercise(name: str, path: Path) -> None:
    """Write the exercise of a lesson. Raises SpecError if the file exists, which may be a student's work."""
    text = format_exercise(name)
    if path.exists():
        raise SpecError(f"{path} exists already; specify another file, or check it with --check {path}")
    check_target(path, SpecError)
    write_whole(path, text, SpecError)


def check_exercise(name: str, path: Path, ranks: int) -> tuple[list[str], str | None]:
    """Return the claims that are true of a student's file, and what is wrong, or None if it is right.

    The file runs in a process of its own: whatever it does, this function returns.

    Raises SpecError if there is no such file.
    """
    require_exercise(name)
    check_count(ranks)
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = ("-P", "-m", "paceline.lesson.grading", name, str(path), str(ranks), str(result))
        child = subprocess.Popen((sys.executable, *words), stdin=subprocess.DEVNULL)
        try:
            status = child.wait(CHECK_S)
        except subprocess.TimeoutExpired:
            return [], f"{path} did not end in {CHECK_S:.0f} s, and cannot be interrupted"
        finally:
            child.kill()
            child.wait()
        try:
            claims, mistake, is_readable = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return (
                [],
                f"{path} ended the check with exit status {status}; remove the call that ends the program",
            )
    if not is_readable:
        raise SpecError(mistake)
    return claims, mistake
