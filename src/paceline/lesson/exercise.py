"""Exercises of lessons: write the file that a student completes, and check it."""

import ast
from pathlib import Path
from typing import Any

from paceline.errors import Error, SpecError
from paceline.files import check_target, reason, write_whole
from paceline.lesson.blocks import Block, LessonClaim, LessonText
from paceline.lesson.catalogue import ORDER, find_exercise
from paceline.lesson.cells import LessonCell, LessonFile
from paceline.lesson.outputs import shown_by
from paceline.lesson.play import execute
from paceline.lesson.ranks import use_ranks
from paceline.user_code import describe_exception


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

    Raises SpecError if there is no such file, or it is not Python.
    """
    grade = read_cell(require_exercise(name), "grade")
    names = _run_file(path)
    skeleton = ast.parse(read_cell(require_exercise(name), "exercise").code)
    for node in skeleton.body:
        if isinstance(node, ast.FunctionDef) and not callable(names.get(node.name)):
            return (
                [],
                f"{path} must define the function {node.name}; write the exercise again with --exercise",
            )
    claims: list[str] = []

    def collect(block: Block) -> None:
        if isinstance(block, LessonClaim):
            claims.append(block.claim)

    with use_ranks(ranks), shown_by(collect, has_pictures=False):
        try:
            execute(grade, f"grade of {name}", names)
        except Exception as error:  # of the student's code
            if "NotImplementedError" in f"{type(error).__name__}: {error}":
                return claims, "the function is not written yet"
            is_message = isinstance(error, AssertionError | Error)
            return claims, str(error) if is_message else describe_exception(error)
    return claims, None


def _run_file(path: Path) -> dict[str, Any]:
    """Return the names that the student's file defines."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise SpecError(f"cannot read {path}: {reason(error)}; write it with --exercise") from None
    names: dict[str, Any] = {"__name__": "__exercise__", "__file__": str(path)}
    try:
        exec(compile(source, str(path), "exec"), names)
    except Exception as error:  # of the student's code
        raise SpecError(f"{path} cannot be run: {describe_exception(error)}") from error
    return names
