"""Result: what a bench measured, how, and on which machine; written as JSON with its schema and version."""

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field, ValidationError

from paceline.errors import BenchError
from paceline.files import write_whole
from paceline.spec import Value as Frozen
from paceline.spec import describe_error

SCHEMA = "paceline.bench"
VERSION = 1  # incremented when an older Paceline would misread a newer file
TIMES = ("median_s", "min_s", "p95_s", "spread", "n")  # fields of a Timing, in every timed row

Value = str | int | float | bool | None
# Flat; names carry units. The fields named in `Result.keys` say what was measured; TIMES and the other fields
# are the outcome.
Row = Mapping[str, Value]


class Result(Frozen):
    """What a bench measured, how, and on which machine."""

    version: Literal[1] = 1
    kind: str  # collectives, compute, hierarchy, host, overlap, storage, data
    when: str = Field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    machine: dict[str, Value] = Field(default_factory=lambda: machine())
    torch: str | None = Field(default_factory=lambda: _torch())
    settings: dict[str, Any] = Field({})  # the request
    keys: tuple[str, ...] = ()  # names of the fields that identify a row
    rows: tuple[dict[str, Value], ...] = ()
    summary: tuple[dict[str, Value], ...] = ()  # derived from the rows: fits, best rates, advice
    notes: tuple[str, ...] = ()  # what was left out and why; what a reader should know

    def key(self, row: Row) -> tuple[Value, ...]:
        """Return the values that identify a row."""
        return tuple(row.get(name) for name in self.keys)


def write(result: Result, path: Path) -> None:
    """Write a result as JSON, completely or not at all. Raises BenchError if the file cannot be written."""
    tree = {"schema": SCHEMA} | result.model_dump(mode="json")
    write_whole(path, json.dumps(tree, indent=1, allow_nan=False, ensure_ascii=False) + "\n", BenchError)


def read(path: Path, kind: str | None = None) -> Result:
    """Return the result in a file.

    Raises BenchError if the file cannot be read, or has a different schema, version or kind.
    """
    try:
        tree = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path} is not JSON, so it is not a result of paceline bench: {error}") from error
    if not isinstance(tree, dict) or tree.pop("schema", None) != SCHEMA:
        raise BenchError(f"{path} is not a result of paceline bench: its schema must be {SCHEMA!r}")
    if (written := tree.get("version")) != VERSION:
        hint = (
            "use the Paceline that wrote it"
            if isinstance(written, int) and written > VERSION
            else "measure again"
        )
        raise BenchError(f"{path} has version {written!r}, but this Paceline reads version {VERSION}; {hint}")
    try:
        result = Result.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise BenchError(f"{path}: {describe_error(error, [*Result.model_fields])}") from error
    if kind is not None and result.kind != kind:
        raise BenchError(f"{path} is a result of bench {result.kind}, but bench {kind} is required")
    return result


def machine() -> dict[str, Value]:
    """Describe this machine in a few words, for readers of a result."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }


def _torch() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
