"""cluster.json: read, check and write a Cluster."""

import json
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from paceline.cluster.facts import FORMAT, VERSION, Cluster, Fact
from paceline.errors import ClusterError
from paceline.files import write_whole
from paceline.spec import describe_error, suggest

MAX_LINE = 120  # characters


def read(path: Path) -> Cluster:
    """Return the cluster in a file. Raises ClusterError if it is unreadable or of another version."""
    try:
        text = path.read_text("utf-8")
        tree = json.loads(text)
    except OSError as error:
        raise ClusterError(
            f"cannot read {path}: {error.strerror}; paceline bench writes this file, and docs/machine.md"
            " describes how to write it by hand"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{path} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ClusterError(f"{path} is not a cluster: it must contain an object, got {type(tree).__name__}")
    if tree.get("format", FORMAT) != FORMAT:
        raise ClusterError(f"{path} is not a cluster: format must be {FORMAT!r}, got {tree['format']!r}")
    _check_version(path, tree.get("version"))
    try:
        return Cluster.model_validate_json(text)
    except ValidationError as error:
        raise ClusterError(f"{path}: {_explain(error)}") from error


def _check_version(path: Path, version: Any) -> None:
    if version == VERSION and not isinstance(version, bool):
        return
    if version is None:
        raise ClusterError(f'{path} has no version; write "version": {VERSION}')
    if isinstance(version, int) and version > VERSION:
        raise ClusterError(
            f"{path} has version {version}, but this Paceline reads {VERSION};"
            " use the newer Paceline that wrote it"
        )
    raise ClusterError(
        f"{path} has version {version!r}, but this Paceline reads {VERSION};"
        " write it again with paceline bench"
    )


def write(path: Path, cluster: Cluster) -> None:
    """Write a cluster atomically. Raises ClusterError if it cannot be written."""
    write_whole(path, format_json(cluster.model_dump(mode="json")), ClusterError)


def format_json(tree: Any) -> str:
    """Return readable JSON: one row per line, without empty values."""
    return _format(_drop_empty(tree), 0) + "\n"


def _drop_empty(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _drop_empty(value) for key, value in tree.items() if value not in (None, "", {}, [])}
    return [_drop_empty(value) for value in tree] if isinstance(tree, list) else tree


def _format(tree: Any, depth: int) -> str:
    line = json.dumps(tree, ensure_ascii=False)
    if not isinstance(tree, dict | list) or (len(line) + depth <= MAX_LINE and depth):
        return line
    inner = "\n" + " " * (depth + 1)
    if isinstance(tree, list):
        return "[" + ",".join(inner + _format(value, depth + 1) for value in tree) + "\n" + " " * depth + "]"
    rows = (f"{inner}{json.dumps(key)}: {_format(value, depth + 1)}" for key, value in tree.items())
    return "{" + ",".join(rows) + "\n" + " " * depth + "}"


def _explain(error: ValidationError) -> str:
    """Return one sentence about the first error, with the nearest known key for an unknown key."""
    # A misspelt key causes a second error, about the missing key.
    first = min(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
    *place, leaf = (str(part) for part in first["loc"] if part != "[key]")
    key = ".".join([*place, leaf])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{suggest(leaf, _model_at(place).model_fields)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "literal_error" and "[key]" in first["loc"]:
        return f"unknown key {key}; available: {first['ctx']['expected']}"
    if first["type"] == "model_type":
        what = "a number, or a table with its value" if _model_at([*place, leaf]) is Fact else "a table"
        return f"{key} must be {what}, got {first['input']!r}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}"
    return describe_error(error, [])


def _model_at(place: list[str]) -> type[BaseModel]:
    """Return the model of the table at this place in a Cluster."""
    model: type[BaseModel] = Cluster
    for name in place:
        if name in model.model_fields:
            model = _model_in(model.model_fields[name].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
