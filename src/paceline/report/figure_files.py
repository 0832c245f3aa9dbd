"""The images of `Task.figures` in the folder of a run. Another user may have written them."""

import re
from pathlib import Path
from typing import NamedTuple

from paceline.files import open_regular
from paceline.plotting.png import SIGNATURE
from paceline.run import RunFolder
from paceline.units import without_controls

MAX_FIGURES = 32  # of a run
FILE = re.compile(r"step_(\d{1,12})\.png", re.ASCII)


class FigureFiles(NamedTuple):
    """The files of one figure by step, in the order of the steps."""

    name: str
    steps: dict[int, Path]


def list_folders(run: RunFolder) -> list[Path]:
    """Return the folders of the figures by name, without links."""
    try:
        found = sorted(path for path in run.figures.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []
    return found[:MAX_FIGURES]


def list_steps(folder: Path) -> FigureFiles:
    """Return the files of the figure in a folder. Other files are left out."""
    try:
        found = {int(match[1]): path for path in folder.iterdir() if (match := FILE.fullmatch(path.name))}
    except OSError:
        found = {}
    name = without_controls(folder.name.encode(errors="replace").decode())
    return FigureFiles(name, dict(sorted(found.items())))


def list_figures(run: RunFolder) -> list[FigureFiles]:
    """Return the figures that have files."""
    return [figure for folder in list_folders(run) if (figure := list_steps(folder)).steps]


def read_png(path: Path, max_bytes: int) -> bytes | None:
    """Return a PNG file; None for a link, another kind of file, a larger one, and one that is missing."""
    try:
        if path.is_symlink():
            return None
        with open_regular(path) as file:
            png = file.read(max_bytes + 1)
    except OSError:
        return None
    return png if len(png) <= max_bytes and png.startswith(SIGNATURE) else None
