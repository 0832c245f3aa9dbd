"""The images of `Task.figures` as a panel, and the file of one of them, by identifiers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.report.figure_files import list_folders, list_steps, read_png
from paceline.units import is_whole_number
from paceline.web.runs import WatchedRun, sign

MAX_BYTES = 2**24  # of an image


def build_figures(run: WatchedRun) -> dict[str, Any] | None:
    """Return identifier, name and steps of each figure; None without figures. Read if a folder changed."""
    folders = list_folders(run.folder)
    return run.keep("figures", sign(run.folder.figures, *folders), lambda: _list_figures(run, folders))


def _list_figures(run: WatchedRun, folders: Sequence[Path]) -> dict[str, Any] | None:
    found = [(_identify(run, folder), list_steps(folder)) for folder in folders]
    rows = [{"id": key, "name": name, "steps": [*steps]} for key, (name, steps) in found if steps]
    return {"figures": rows} if rows else None


def read_figure(run: WatchedRun, figure: str, step: str) -> bytes | None:
    """Return an image; None if it was deleted, which happens to old ones, or is not a PNG of limited size.

    Raises RunError for an unknown identifier.
    """
    folder = next((path for path in list_folders(run.folder) if _identify(run, path) == figure), None)
    if folder is None or not is_whole_number(step):
        raise RunError("no such figure")
    path = list_steps(folder).steps.get(int(step))
    return read_png(path, MAX_BYTES) if path is not None else None


def _identify(run: WatchedRun, folder: Path) -> str:
    """Return the identifier of a figure, which depends on the random one of the run."""
    name = folder.name.encode(errors="surrogateescape")
    return hashlib.blake2b(name, key=run.id.encode(), digest_size=9).hexdigest()
