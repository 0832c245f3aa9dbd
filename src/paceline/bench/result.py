"""Result: what a bench measured, how, and on what machine; a JSON file that says its schema and version."""

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
from paceline.spec import explain

SCHEMA = "paceline.bench"
VERSION = 1  # one more when an older Paceline would read a newer file wrongly
TIMES = ("median_s", "min_s", "p95_s", "spread", "n")  # of a Timing, in every row that was timed

Value = str | int | float | bool | None
Row = Mapping[
    str, Value
]  # flat; names carry units; those of `Result.keys` say what was measured, TIMES and the rest what came out


class Result(Frozen):
    version: Literal[1] = 1
    kind: str  # collectives, compute, overlap, storage, input
    when: str = Field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    machine: dict[str, Value] = Field(default_factory=lambda: machine())
    torch: str | None = Field(default_factory=lambda: _torch())
    settings: dict[str, Any] = Field({})  # what was asked for
    keys: tuple[str, ...] = ()  # names of the fields by which a row is told from all others
    rows: tuple[dict[str, Value], ...] = ()
    summary: tuple[dict[str, Value], ...] = ()  # what follows from the rows: fits, best figures, advice
    notes: tuple[str, ...] = ()  # what was left out, and why; what a reader should know

    def key(self, row: Row) -> tuple[Value, ...]:
        return tuple(row.get(name) for name in self.keys)


def write(result: Result, path: Path) -> None:
    """Whole or not at all. Raises BenchError where it cannot be written."""
    tree = {"schema": SCHEMA} | result.model_dump(mode="json")
    write_whole(path, json.dumps(tree, indent=1, allow_nan=False, ensure_ascii=False) + "\n", BenchError)


def read(path: Path, kind: str | None = None) -> Result:
    """A result from its file. Raises BenchError for one that cannot be read, or that is of another schema, version or kind."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path} is not JSON, and so no result of paceline bench: {error}") from error
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise BenchError(f"{path} is no result of paceline bench: its schema is not {SCHEMA!r}")
    if (written := found.get("version")) != VERSION:
        hint = (
            "use the Paceline that wrote it"
            if isinstance(written, int) and written > VERSION
            else "measure again"
        )
        raise BenchError(f"{path} is of version {written!r}, and this Paceline reads {VERSION}; {hint}")
    try:
        result = Result.model_validate_json(json.dumps(found))
    except ValidationError as error:
        raise BenchError(f"{path}: {explain(error, [*Result.model_fields])}") from error
    if kind is not None and result.kind != kind:
        raise BenchError(f"{path} is of bench {result.kind}, not of bench {kind}")
    return result


def machine() -> dict[str, Value]:
    """The machine in a few words, for whoever reads a result later."""
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
