"""Figures drawn by matplotlib and written as SVG or PNG."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import BenchError
from paceline.files import replaced
from paceline.plotting.paths import check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")
COLOURS = ("#1f77b4", "#d9590d", "#2a9d5c", "#8b5cc4", "#c2a100", "#c23b75", "#12919c", "#7a6a53")


def check_picture(path: Path | None) -> None:
    """Raise BenchError if a picture cannot be written to `path`. Call it before measuring."""
    if path is None:
        return
    if path.suffix.lower() not in ENDINGS:
        raise BenchError(f"cannot draw {path}: its name must end in {' or '.join(ENDINGS)}")
    if find_spec("matplotlib") is None:
        raise BenchError(
            "cannot draw pictures: matplotlib is not installed; run: pip install 'paceline[plot]'"
        )
    check_path(path)


@contextmanager
def figure(path: Path, width: float = 9.0, height: float = 5.0) -> "Iterator[Figure]":
    """Yield an empty figure, and write it to `path` at the end. Equal figures give equal files."""
    check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    is_svg = path.suffix.lower() == ".svg"
    with matplotlib.rc_context({"svg.hashsalt": "paceline"}), replaced(path, BenchError) as temporary:
        drawn.savefig(temporary, dpi=150, metadata={"Date": None} if is_svg else None)
