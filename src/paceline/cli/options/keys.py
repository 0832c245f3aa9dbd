"""The names that `--set` accepts: fields of a task, and keys of the request."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.spec import Value, keys
from paceline.task import Task


class RequestKey(NamedTuple):
    """A row of the table of `--keys`."""

    name: str  # as in --set NAME=VALUE
    type: str
    default: str
    meaning: str


def list_task_keys(kind: type[Task]) -> list[RequestKey]:
    """Return the fields of a task."""
    return [
        RequestKey(
            field.name,
            field.type if isinstance(field.type, str) else type_name(field.type),
            _default(field),
            "",
        )
        for field in dataclasses.fields(kind)
    ]


def list_request_keys() -> list[RequestKey]:
    """Return the keys of a request, such as `optimizer.lr`."""
    return [
        RequestKey(
            name,
            type_name(field.annotation),
            "none" if field.default is None else _format_value(field.default),
            field.description or "",
        )
        for name, field in keys()
    ]


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _format_value(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else _format_value(field.default)


def _format_value(value: Any) -> str:
    """Return the value as --set NAME=VALUE takes it."""
    if isinstance(value, tuple):
        return repr([*value])
    return (
        value
        if isinstance(value, str) and value
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )


def type_name(annotation: Any) -> str:
    """Return a type as text: `int`, `adamw | sgd`, `[float, float]`. None of an optional type is left out."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(inner[0])
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(kind) for kind in inner if kind is not type(None))
    if origin is tuple:
        return f"[{', '.join('…' if kind is Ellipsis else type_name(kind) for kind in inner)}]"
    if origin is dict:
        return f"{{{type_name(inner[0])}: {type_name(inner[1])}}}"
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return getattr(annotation, "__name__", str(annotation)) if not inner else str(annotation)


def format_keys(reference: str, kind: type[Task]) -> Iterator[str]:
    """Yield the lines of `paceline train REFERENCE --keys`."""
    tables = {
        f"fields of {reference}, by --set NAME=VALUE:": list_task_keys(kind),
        "keys of the request, by --set NAME=VALUE:": list_request_keys(),
    }
    for title, rows in tables.items():
        yield title
        columns = [RequestKey("name", "type", "default", "meaning"), *rows]
        widths = [max(len(row[at]) for row in columns) for at in range(3)]
        for row in columns if rows else []:
            yield "  ".join(
                ["", *(text.ljust(width) for text, width in zip(row, widths, strict=False)), row.meaning]
            ).rstrip()
        if not rows:
            yield "  none"
