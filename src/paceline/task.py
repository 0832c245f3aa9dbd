"""Task and Layout: what a user writes. Not a word of ranks, devices or plans."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError

from paceline.errors import TaskError
from paceline.spec import KEYS, TABLES, explain, nearest, set_key, shown
from paceline.user_code import UserCode, described, passes, place_of, shown_path

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

BUILT_IN = {
    "digits": "paceline.tasks.digits:Digits",
    "mnist": "paceline.tasks.mnist:Mnist",
    "text": "paceline.tasks.text:Text",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model may be cut: a value beside the model, so that a stock module is used as it is."""

    blocks: tuple[str, ...] | None = (
        None  # paths of modules whose children are the units of sharding; None: the longest list found
    )
    tensor: Mapping[str, str] | None = (
        None  # path of a module, * for any part of it -> how tp splits it, in place of what is found:
    )
    # "column", "row", "gather" (by columns, output gathered), "vocabulary" (an embedding), "whole"


class MapDataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Task:
    """Subclass it, give it fields with defaults, and write `model`, `dataset` and `loss`.

    A subclass is a frozen dataclass: its fields are the hyper-parameters, set by `--set name=value`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, arbitrary_types_allowed=True)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def model(self) -> nn.Module:
        """The model. Called while its tensors are only recorded, so that no rank ever holds more than its share;
        initialize them here as you like, and it is done so."""
        raise NotImplementedError

    def dataset(self, split: str) -> MapDataset | None:
        """Samples of "train" or "validation": whatever has `len()` and `[i]`; None where there is no such split.

        With `batch_of(indices)` a whole batch is fetched at once, collated; what that draws at random depends on the number of ranks.
        """
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Tensor:
        """Losses by item, of any shape beginning with the samples of the batch; a scalar is taken as their mean.
        The mean over the whole global batch is minimized."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> Any:
        """What the model is called with: a tensor, a tuple or list of arguments, or a dict of keyword arguments."""
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def weights(self, batch: Any) -> Tensor | None:
        """Weights of the items of `loss` (same shape); None where all weigh the same. They weigh `metrics` of the same shape too."""
        return None

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Tensor]:
        """Values by item, averaged over the validation split, each sample counted once. `loss` is always among them."""
        return {}

    def layout(self) -> Layout:
        return Layout()

    def optimizer(self, params: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        """An optimizer over the named parameters; None for the one that the spec asks for. The schedule scales its learning rates."""
        return None

    def pretrained(self) -> str | Path | None:
        """A safetensors file with initial weights, or a folder with `model.safetensors` or an index of several files.

        They hold whole tensors under the names of the model's parameters. Names that they lack keep their own initialization;
        a name that the model lacks is an error."""
        return None


REQUIRED = ("model", "dataset", "loss")
METHODS = frozenset(name for name in vars(Task) if not name.startswith("_"))


def load_task(reference: str, fields: Mapping[str, Any]) -> Task:
    """The task that `reference` names, with these fields. Raises TaskError."""
    kind = load_kind(reference)
    known = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise TaskError(f"{reference} has no field {shown(name, str)}{_instead(name, known)}")
    with UserCode(kind.__name__, kind.__init__):  # its fields may have validators of their own
        try:
            return TypeAdapter(kind).validate_json(
                json.dumps(dict(fields), default=str)
            )  # as JSON, a list may be a tuple
        except ValidationError as error:
            own = error.errors()[0].get("ctx", {}).get("error")  # raised by a validator of the task
            why = (
                described(own)
                if isinstance(own, Exception) and place_of(own) is not None
                else explain(error, known, "field")
            )
            raise TaskError(f"{reference}: {why}") from error


def load_kind(reference: str) -> type[Task]:
    """The class that `reference` names, whole and without contradiction. Raises TaskError."""
    kind = find_task(reference)
    if missing := [name for name in REQUIRED if getattr(kind, name) is getattr(Task, name)]:
        raise TaskError(f"{reference} has no method {missing[0]}; a task needs {', '.join(REQUIRED)}")
    if clashing := [field.name for field in dataclasses.fields(kind) if field.name in METHODS]:
        raise TaskError(
            f"{reference} has a field {clashing[0]!r}, and a task has a method of that name; rename the field"
        )
    return kind


def _instead(name: str, fields: list[str]) -> str:
    """Another field that may be meant, or a key of the request."""
    near = nearest(name, fields)
    keys = [set_key(key) for key in KEYS if key.rpartition(".")[2] == name and key not in TABLES]
    return (
        f"; a key of the request is set by --set {keys[0]}=VALUE"
        if keys and not near.startswith("; did")
        else near
    )


def find_task(reference: str) -> type[Task]:
    place, _, name = BUILT_IN.get(reference, reference).partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, reference)
    tasks = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Task) and value is not Task
    ]
    if not name:
        own = [key for key in tasks if getattr(module, key).__module__ == module.__name__]
        if len(own) != 1:
            raise TaskError(
                f"{place} has {len(own)} tasks ({', '.join(own) or 'none'}); say which: {place}:NAME"
            )
        name = own[0]
    kind = getattr(module, name, None)
    if kind is None:
        raise TaskError(f"there is no {name} in {place}{nearest(name, tasks)}")
    if not (inspect.isclass(kind) and issubclass(kind, Task)):
        raise TaskError(f"{name} in {place} is no subclass of paceline.Task")
    return kind


def resolve(reference: str) -> str:
    """The reference as it can be found from any folder: a file by its whole path, and its class by name."""
    place, _, name = reference.partition(":")
    if not place.endswith(".py"):
        return reference
    return f"{Path(place).resolve()}:{name or find_task(reference).__name__}"


def locate(reference: str) -> str:
    """What `resolve` says, of a file that is read and not run: without torch. Raises TaskError for what can be seen to be wrong."""
    place, _, name = reference.partition(":")
    if not place.endswith(".py"):
        if ":" not in BUILT_IN.get(reference, reference):
            raise _unknown(reference)
        return reference
    path = Path(place)
    if not path.is_file():
        raise TaskError(f"there is no file {path}{_similar(path)}")
    try:
        found = list(_names(ast.parse(path.read_bytes())))
    except SyntaxError as error:
        raise TaskError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not Python: {error}") from error
    if name and name not in found and "*" not in found:
        raise TaskError(f"there is no {name} in {place}{nearest(name, found)}")
    return f"{path.resolve()}:{name}" if name else str(path.resolve())


def _names(module: ast.Module) -> Iterator[str]:
    """Those that may be bound at the top of a module."""
    for node in ast.walk(module):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name


def layout_of(task: Task) -> Layout:
    """Return the task's layout. Raises TaskError."""
    with UserCode("layout()", task.layout):
        found = task.layout()
    if not isinstance(found, Layout):
        raise TaskError(f"layout() must return a paceline.Layout, got {type(found).__name__}")
    return found


def fields_of(task: Task) -> dict[str, Any]:
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}


def reference_to(task: Task) -> str:
    return f"{type(task).__module__}:{type(task).__qualname__}"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"there is no file {path}{_similar(path)}")
    asked, path = path, path.resolve()
    name = path.stem if importlib.util.find_spec(path.stem) is None else f"task_{path.stem}"
    for module in (sys.modules.get(path.stem), sys.modules.get(name)):
        if module is not None and getattr(module, "__file__", None) == str(path):
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(
            0, str(path.parent)
        )  # its neighbours may be imported, also by the workers of its data loader
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if passes(error):
            raise
        raise _not_imported(f"{asked} cannot be imported", error) from error
    return module


def _similar(path: Path) -> str:
    beside = [str(found) for found in path.parent.glob("*.py")]
    return nearest(str(path), beside[:50]) if beside else ""


def _unknown(reference: str) -> TaskError:
    return TaskError(
        f"there is no task {reference!r}: say {', '.join(BUILT_IN)}, a file my.py:Class or a module package.module:Class"
        + (nearest(reference, BUILT_IN) if nearest(reference, BUILT_IN).startswith("; did") else "")
    )


def _load_module(name: str, reference: str) -> ModuleType:
    if ":" not in BUILT_IN.get(reference, reference):
        raise _unknown(reference)
    try:
        return importlib.import_module(name)
    except BaseException as error:
        if passes(error):
            raise
        raise _not_imported(f"cannot import {name!r}, named by {reference}", error) from error


def _not_imported(what: str, error: BaseException) -> TaskError:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return TaskError(f"{shown_path(error.filename)}, line {error.lineno}: {error.msg}")
    if place_of(error) is None and isinstance(error, (ImportError, ValueError, SyntaxError)):
        return TaskError(f"{what}: {error}")
    if isinstance(error, ImportError):
        return TaskError(f"{what}: {error} ({place_of(error)})")
    return TaskError(f"{what}: {described(error)}")
