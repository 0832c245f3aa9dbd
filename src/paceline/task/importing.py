"""Import the file or module of a task."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from paceline.errors import TaskError
from paceline.spec import suggest
from paceline.task.interface import Task
from paceline.user_code import (
    describe_exception,
    find_user_line,
    is_passed_through,
    relative_path,
)

if TYPE_CHECKING:
    pass


BUILT_IN = {
    "bigearthnet": "paceline.tasks.bigearthnet:BigEarthNet",
    "cifar10": "paceline.tasks.cifar:Cifar10",
    "cifar100": "paceline.tasks.cifar:Cifar100",
    "digits": "paceline.tasks.digits:Digits",
    "imagefolder": "paceline.tasks.imagefolder:ImageFolder",
    "lm": "paceline.tasks.lm:Lm",
    "mnist": "paceline.tasks.mnist:Mnist",
    "text": "paceline.tasks.text:Text",
}


def import_task_class(reference: str) -> type[Task]:
    """Import the file or module of `reference` and return the class of the task. Raises TaskError."""
    place, _, name = BUILT_IN.get(reference, reference).partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, reference)
    tasks = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Task) and value is not Task
    ]
    if not name:
        defined = [key for key in tasks if getattr(module, key).__module__ == module.__name__]
        if not defined:
            raise TaskError(f"{place} has no task; define a subclass of paceline.Task there")
        if len(defined) > 1:
            raise TaskError(
                f"{place} has {len(defined)} tasks ({', '.join(defined)}); specify the class: {place}:NAME"
            )
        name = defined[0]
    kind = getattr(module, name, None)
    if kind is None and place == "__main__":
        raise TaskError(
            f"the task {name} was defined in a notebook or an interactive session, which this process cannot "
            "import; save it in a file"
        )
    if kind is None:
        raise TaskError(f"{place} has no class {name}{suggest(name, tasks)}")
    if not (inspect.isclass(kind) and issubclass(kind, Task)):
        raise TaskError(f"{name} in {place} is not a subclass of paceline.Task")
    return kind


def _load_file(path: Path) -> ModuleType:
    """Import a Python file, or return the module if it is imported already."""
    check_task_file(path)
    given_path, path = path, path.resolve()
    name = path.stem if importlib.util.find_spec(path.stem) is None else f"task_{path.stem}"
    for module in (sys.modules.get("__main__"), sys.modules.get(path.stem), sys.modules.get(name)):
        file = getattr(module, "__file__", None)
        if module is not None and file is not None and os.path.realpath(file) == str(path):
            return module
    if str(path.parent) not in sys.path:
        # The task may import files from its folder, in the workers of the data loader as well.
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing(str(given_path)):
            spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if is_passed_through(error):
            raise
        raise _import_error(f"cannot import {given_path}", error) from error
    return module


_imports: list[str] = []  # files and modules of tasks that are being imported


@contextlib.contextmanager
def _importing(place: str) -> Iterator[None]:
    _imports.append(place)
    try:
        yield
    finally:
        _imports.pop()


def check_not_importing(function: str) -> None:
    """Raise TaskError while the module of a task is imported, which must not call `function`."""
    if _imports:
        raise TaskError(
            f"{_imports[-1]} calls {function} when it is imported; put the call below "
            "'if __name__ == \"__main__\":', because other processes import the file for its task"
        )


def check_task_file(path: Path) -> None:
    """Raise TaskError unless the path is that of a file."""
    if path.is_dir():
        raise TaskError(f"{path} is a folder; specify a Python file")
    if not path.is_file():
        neighbours = [str(file) for file in path.parent.glob("*.py") if file.is_file()]
        raise TaskError(f"no such file: {path}{suggest(str(path), neighbours[:50])}")


def unknown_task(reference: str) -> TaskError:
    hint = suggest(reference, BUILT_IN)
    return TaskError(
        f"no such task: {reference!r}; expected {', '.join(BUILT_IN)}, a file my.py:Class, a module "
        "package.module:Class or a Hugging Face model hf:FOLDER"
        f"{hint if hint.startswith('; did') else ''}"
    )


def _load_module(name: str, reference: str) -> ModuleType:
    if ":" not in BUILT_IN.get(reference, reference):
        raise unknown_task(reference)
    try:
        with _importing(name):
            return importlib.import_module(name)
    except BaseException as error:
        if is_passed_through(error):
            raise
        raise _import_error(f"cannot import {name!r}, named by {reference}", error) from error


def _import_error(what: str, error: BaseException) -> TaskError:
    """Return a TaskError for an exception of an import, with file and line if the user's code raised it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return TaskError(f"{relative_path(error.filename)}, line {error.lineno}: {error.msg}")
    if find_user_line(error) is None and isinstance(error, (ImportError, ValueError, SyntaxError)):
        return TaskError(f"{what}: {error}")
    if isinstance(error, ImportError):
        return TaskError(f"{what}: {error} ({find_user_line(error)})")
    return TaskError(f"{what}: {describe_exception(error)}")
