"""References to tasks: my.py:Class, module:Class, or the name of a built-in task."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import TypeAdapter

from paceline.errors import TaskError
from paceline.spec import suggest
from paceline.task.importing import BUILT_IN, check_task_file, import_task_class, unknown_task
from paceline.task.interface import Task
from paceline.task.load import build_task
from paceline.task.values import field_values

if TYPE_CHECKING:
    pass


def resolve_reference(reference: str) -> str:
    """Return the reference in a form that works in any folder: a file with its absolute path and class.

    This imports the task if `reference` names no class. Raises TaskError.
    """
    place, _, name = reference.partition(":")
    if not place.endswith(".py"):
        return reference
    return f"{Path(place).resolve()}:{name or import_task_class(reference).__name__}"


def check_reference(reference: str) -> str:
    """Return the absolute form of a reference without importing the task or torch: the file is only parsed.

    Raises TaskError for errors that show without running the file.
    """
    place, _, name = reference.partition(":")
    if not place.endswith(".py"):
        if ":" not in BUILT_IN.get(reference, reference):
            raise unknown_task(reference)
        return reference
    path = Path(place)
    check_task_file(path)
    try:
        names = list(_find_names(ast.parse(path.read_bytes())))
    except SyntaxError as error:
        raise TaskError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not Python: {error}") from error
    if name and name not in names and "*" not in names:
        raise TaskError(f"{place} has no class {name}{suggest(name, names)}")
    return f"{path.resolve()}:{name}" if name else str(path.resolve())


def _find_names(module: ast.Module) -> Iterator[str]:
    """Yield the names that the module may bind at its top level."""
    for node in ast.walk(module):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name


def reference_to(task: Task) -> str:
    """Return the reference `module:Class` of a task."""
    return f"{type(task).__module__}:{type(task).__qualname__}"


def portable_reference_to(task: Task) -> str:
    """Return the reference of a task, with the file in place of the module `__main__` if there is a file."""
    module, _, name = reference_to(task).partition(":")
    file = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
    is_importable = file is not None and file.endswith(".py") and os.path.isfile(file)
    return f"{os.path.abspath(file)}:{name}" if file is not None and is_importable else f"{module}:{name}"


def storable_fields(task: Task) -> dict[str, Any] | None:
    """Return the fields of a task as a request stores them, or None if TOML cannot represent one of them."""
    kind = type(task)
    try:
        fields = TypeAdapter(kind).dump_python(task, mode="json", warnings="none", exclude_none=True)
        tomli_w.dumps(fields)
        loaded = build_task(kind, kind.__name__, fields)
    except Exception:  # a value of any class, whose methods are the user's
        return None
    return fields if repr(field_values(loaded)) == repr(field_values(task)) else None
