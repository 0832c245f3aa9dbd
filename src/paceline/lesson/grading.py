"""Check a student's file, in a process of its own.

python -m paceline.lesson.grading NAME FILE RANKS RESULT
"""

import ast
import builtins
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import SpecError
from paceline.files import reason
from paceline.lesson import attempts, outputs
from paceline.lesson.attempts import NoEndError, describe_failure, time_limit
from paceline.lesson.blocks import Block, LessonClaim
from paceline.lesson.exercise import read_cell, require_exercise
from paceline.lesson.outputs import shown_by
from paceline.lesson.play import execute
from paceline.lesson.ranks import use_ranks
from paceline.user_code import describe_exception


def grade_file(name: str, path: Path, ranks: int) -> tuple[list[str], str | None]:
    """Return the claims that are true of a student's file, and what is wrong, or None if it is right.

    Raises SpecError if the file cannot be read.
    """
    exercise = require_exercise(name)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise SpecError(f"cannot read {path}: {reason(error)}; write it with --exercise") from None
    before = _list_functions()
    try:
        with time_limit(attempts.STUCK_S):
            names = _run_file(path, source)
    except NoEndError as error:
        return [], f"{path} cannot be run: {describe_failure(error)}"
    except BaseException as error:  # of the student's code
        return [], f"{path} cannot be run: {describe_exception(error)}"
    given, claims = {}, []
    for node in ast.parse(read_cell(exercise, "exercise").code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not callable(names.get(node.name)):
                return [], f"{path} must define {node.name}; write the exercise again with --exercise"
            given[node.name] = names[node.name]

    def collect(block: Block) -> None:
        if isinstance(block, LessonClaim):
            claims.append(block.claim)

    mistake = None
    with use_ranks(ranks), shown_by(collect, has_pictures=False):
        try:
            with time_limit(attempts.STUCK_S):
                execute(read_cell(exercise, "grade"), "<check>", {"__name__": "__check__", **given})
        except BaseException as error:  # of the student's code
            mistake = describe_failure(error)
    if replaced := _find_replaced(before):
        return [], f"{path} replaces {replaced}, which the check needs; leave it as it is"
    return claims, mistake


def _run_file(path: Path, source: str) -> dict[str, Any]:
    """Return the names that the student's file defines."""
    names: dict[str, Any] = {"__name__": "__exercise__", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), names)
    return names


def _list_functions() -> dict[tuple[ModuleType, str], Any]:
    """Return the functions that checks call, by module and name."""
    import torch
    import torch.distributed as dist

    import paceline.lesson

    modules = (paceline.lesson, attempts, outputs, torch, dist, builtins, math, time)
    return {
        (module, name): value for module in modules for name, value in vars(module).items() if callable(value)
    }


def _find_replaced(before: dict[tuple[ModuleType, str], Any]) -> str | None:
    """Return the name of a function that was replaced, or None."""
    for (module, name), value in before.items():
        if vars(module).get(name) is not value:
            vars(module)[name] = value
            return f"{module.__name__}.{name}"
    return None


def main() -> None:
    """Write the claims, the mistake, and whether the file could be read, as JSON."""
    name, path, ranks, result = sys.argv[1:]
    sys.path.append(str(Path(path).resolve().parent))  # for modules beside the file
    try:
        claims, mistake = grade_file(name, Path(path), int(ranks))
        is_readable = True
    except SpecError as error:
        claims, mistake, is_readable = [], str(error), False
    Path(result).write_text(json.dumps([claims, mistake, is_readable]), encoding="utf-8")


if __name__ == "__main__":
    main()
