"""cluster.json: read, check and write a Cluster."""

import json
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from paceline.cluster.facts import FORMAT, VERSION, Cluster, Fact
from paceline.errors import ClusterError
from paceline.files import write_whole
from paceline.spec import explain, nearest

LINE = 120  # characters


def read(path: Path) -> Cluster:
    """Raises ClusterError for what is no cluster, or one of another version."""
    try:
        text = path.read_text("utf-8")
        tree = json.loads(text)
    except OSError as error:
        raise ClusterError(
            f"cannot read {path}: {error.strerror}; paceline bench writes one, and docs/machine.md tells how to"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{path} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ClusterError(f"{path} is no cluster: it holds {type(tree).__name__}, not a table")
    if tree.get("format", FORMAT) != FORMAT:
        raise ClusterError(f"{path} is no cluster: its format is {tree['format']!r}, not {FORMAT!r}")
    _check_version(path, tree.get("version"))
    try:
        return Cluster.model_validate_json(text)
    except ValidationError as error:
        raise ClusterError(f"{path}: {_explain(error)}") from error


def _check_version(path: Path, version: Any) -> None:
    if version == VERSION and not isinstance(version, bool):
        return
    if version is None:
        raise ClusterError(f'{path} does not say its version; write "version": {VERSION}')
    if isinstance(version, int) and version > VERSION:
        raise ClusterError(
            f"{path} is of version {version}, newer than this Paceline, which reads {VERSION}; use the Paceline that wrote it"
        )
    raise ClusterError(
        f"{path} is of version {version!r}, and this Paceline reads {VERSION}; write it again with paceline bench"
    )


def write(path: Path, cluster: Cluster) -> None:
    """Whole or not at all. Raises ClusterError where it cannot be written."""
    write_whole(path, layout(cluster.model_dump(mode="json")), ClusterError)


def layout(tree: Any) -> str:
    """JSON that people can read: a row on a line, and nothing that says nothing."""
    return _layout(_lean(tree), 0) + "\n"


def _lean(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _lean(value) for key, value in tree.items() if value not in (None, "", {}, [])}
    return [_lean(value) for value in tree] if isinstance(tree, list) else tree


def _layout(tree: Any, depth: int) -> str:
    short = json.dumps(tree, ensure_ascii=False)
    if not isinstance(tree, dict | list) or (len(short) + depth <= LINE and depth):
        return short
    inner = "\n" + " " * (depth + 1)
    if isinstance(tree, list):
        return "[" + ",".join(inner + _layout(value, depth + 1) for value in tree) + "\n" + " " * depth + "]"
    rows = (f"{inner}{json.dumps(key)}: {_layout(value, depth + 1)}" for key, value in tree.items())
    return "{" + ",".join(rows) + "\n" + " " * depth + "}"


def _explain(error: ValidationError) -> str:
    """One sentence: where, what, and for an unknown key the nearest one of its table."""
    first = min(
        error.errors(), key=lambda found: found["type"] != "extra_forbidden"
    )  # a key misspelt is also one missing
    *place, leaf = (str(part) for part in first["loc"] if part != "[key]")
    key = ".".join([*place, leaf])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{nearest(leaf, _model_at(place).model_fields)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "literal_error" and "[key]" in first["loc"]:
        return f"unknown key {key}; there is {first['ctx']['expected']}"
    if first["type"] == "model_type":
        what = "a number, or a table with its value" if _model_at([*place, leaf]) is Fact else "a table"
        return f"{key} must be {what}, got {first['input']!r}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}"
    return explain(error, [])


def _model_at(place: list[str]) -> type[BaseModel]:
    """Of the table that stands there in a Cluster."""
    model: type[BaseModel] = Cluster
    for name in place:
        if name in model.model_fields:
            model = _model_in(model.model_fields[name].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
