"""Result: what a bench measured, how, and on what machine; a JSON file that says its format and version."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import BenchError

FORMAT: Literal["paceline.bench"] = "paceline.bench"
VERSION: Literal[1] = 1
TIMES = ("median_s", "min_s", "p95_s", "spread", "n")  # of a Timing, in every row that was timed

Value = str | int | float | bool | None
Row = Mapping[str, Value]  # flat; names carry units; those of `Result.keys` say what was measured, TIMES and the rest what came out


class Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["paceline.bench"] = FORMAT
    version: Literal[1] = VERSION
    kind: str  # collectives, compute, overlap, storage, input
    when: str = Field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    machine: dict[str, Value] = Field(default_factory=lambda: machine())
    torch: str | None = Field(default_factory=lambda: _torch())
    settings: dict[str, Any] = {}  # what was asked for
    keys: tuple[str, ...] = Field((), strict=False)  # names of the fields by which a row is told from all others
    rows: tuple[dict[str, Value], ...] = Field((), strict=False)
    notes: tuple[str, ...] = Field((), strict=False)  # what was left out, and why; what a reader should know

    def key(self, row: Row) -> tuple[Value, ...]:
        return tuple(row.get(name) for name in self.keys)


def write(result: Result, path: Path) -> None:
    """Whole or not at all. Raises BenchError where it cannot be written."""
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(result.model_dump_json(indent=1) + "\n")
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path, kind: str | None = None) -> Result:
    """A result from its file. Raises BenchError for one that cannot be read, is of another format, version or kind."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise BenchError(f"{path} is no JSON, and no result of paceline bench") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BenchError(f"{path} is no result of paceline bench: it does not say format {FORMAT!r}")
    if found.get("version") != VERSION:
        way_out = "measure again" if str(found.get("version")) < str(VERSION) else "use the paceline that wrote it"
        raise BenchError(f"{path} has version {found.get('version')} of the format, and this paceline reads {VERSION}; {way_out}")
    try:
        result = Result.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise BenchError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if kind is not None and result.kind != kind:
        raise BenchError(f"{path} is of bench {result.kind}, not of bench {kind}")
    return result


def check_path(path: Path | None) -> None:
    """Before anything is measured. Raises BenchError where a file could not be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BenchError(f"there is no folder {path.parent} for {path.name}; make it first")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise BenchError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'its folder is read-only'}")


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
