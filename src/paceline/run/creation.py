"""Choose, reserve and create the folder of a new run."""

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.run.folder import RUNS, RunFolder
from paceline.run.provenance import collect_provenance
from paceline.spec import Launch, Spec

MAX_NAME_BYTES = 200  # of a run folder's name: longer names are derived from it, and file systems limit those


def choose_path(path: str | None, task: str) -> Path:
    """Return the path of a new run: `path`, or runs/TASK-TIME. Raises RunError if `path` exists."""
    if path is not None:
        given_path = Path(path)
        if len(os.fsencode(given_path.name)) > MAX_NAME_BYTES:
            raise RunError(
                f"the name of the run folder {given_path.name[:20]}… must be shorter, got"
                f" {len(given_path.name)} characters; choose another --run-dir"
            )
        if str(given_path).startswith("-"):
            raise RunError(
                f"the name of a run folder must not begin with a dash, got {given_path}: programs would take "
                "it for an option; choose another --run-dir"
            )
        if os.path.lexists(given_path):
            raise _exists(given_path)
        return given_path
    name = re.sub(r"\W+", "-", task.rpartition(":")[2]).strip("-").lower()
    stem = f"{RUNS}/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (Path(stem + (f"-{k}" if k > 1 else "")) for k in itertools.count(1))
    return next(
        candidate
        for candidate in candidates
        if not candidate.exists() and not _reservation(candidate).exists()
    )


def reserve(path: str | None, task: str) -> Path:
    """Return the path of a new run, as `choose_path` does, and reserve a default path for this process.

    The reservation ends when `create` makes the folder, or at `release`. Raises RunError if writing fails.
    """
    run_path = choose_path(path, task)
    if path is not None:
        return run_path
    try:
        run_path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise _cannot_create(run_path, error) from error
    try:
        _reservation(run_path).touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):  # another process reserved it, or deleted `runs` meanwhile
        return reserve(path, task)
    except OSError as error:
        raise _cannot_create(run_path, error) from error
    if run_path.exists():  # created after choose_path looked
        release(run_path)
        return reserve(path, task)
    return run_path


def release(path: Path) -> None:
    """Remove the reservation of a path, if it exists."""
    with contextlib.suppress(OSError):  # it was not reserved, or `runs` contains other runs
        _reservation(path).unlink()
        path.parent.rmdir()


def _reservation(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def create(path: Path, spec: Spec, launch: Launch, provenance: Mapping[str, Any] | None = None) -> RunFolder:
    """Create a run folder with its request and its provenance.

    provenance: from `collect_provenance`, for a process that creates many runs [default: collect it].
    Raises RunError if the folder exists or cannot be created.
    """
    create_folder(path)
    release(path)
    run = RunFolder(path)
    run.write_request(spec, launch.model_copy(update={"run": None}))
    facts = collect_provenance() if provenance is None else provenance
    run.provenance.write_text(json.dumps(facts, indent=2) + "\n")
    return run


def create_folder(path: Path) -> None:
    """Create a folder for a run, with its parents. Raises RunError if it exists or cannot be created."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise _cannot_create(path, error) from error


def _cannot_create(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot create the run folder {path}: {error.strerror}")


def _exists(path: Path) -> RunError:
    hint = "it is not a run"
    if (path / "spec.toml").exists():
        hint = f"to continue it: paceline resume {path}"
    elif (path / "study.toml").exists():
        hint = f"to continue it: paceline tune {path} --resume"
    return RunError(f"{path} already exists; choose another --run-dir ({hint})")
