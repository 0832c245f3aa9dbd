"""The images of `Task.figures` in a report: the last one of each name, within the page."""

import base64
import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from paceline.files import open_regular
from paceline.inspect.report.run_record import Record
from paceline.plotting.png import SIGNATURE
from paceline.run import RunFolder
from paceline.units import without_controls

MAX_IMAGES = 12  # of a run
MAX_BYTES = 2**17  # of an image
MAX_ALL_BYTES = 600_000  # of all images of a report
FILE = re.compile(r"step_(\d{1,12})\.png", re.ASCII)


class RunImage(NamedTuple):
    name: str
    step: int
    png: bytes


def read_images(run: RunFolder) -> list[RunImage]:
    """Return the last image of each name. Links, other files and large images are left out."""
    found: list[RunImage] = []
    try:
        folders = sorted(path for path in run.figures.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []
    for folder in folders[:MAX_IMAGES]:
        try:
            steps = {int(match[1]): path for path in folder.iterdir() if (match := FILE.fullmatch(path.name))}
            if not steps or steps[last := max(steps)].is_symlink():
                continue
            with open_regular(steps[last]) as file:
                png = file.read(MAX_BYTES + 1)
        except OSError:
            continue
        if len(png) <= MAX_BYTES and png.startswith(SIGNATURE):
            name = without_controls(folder.name.encode(errors="replace").decode())
            found.append(RunImage(name, last, png))
    return found


def build_images(records: Sequence[Record], images: Sequence[Sequence[RunImage]]) -> str:
    """Return the images of all runs as HTML, each in the page itself; empty without images."""
    parts: list[str] = []
    left = MAX_ALL_BYTES
    for record, of_run in zip(records, images, strict=True):
        for image in of_run:
            left -= len(image.png)
            if left < 0:
                break
            run = f"{record['label']}: " if len(records) > 1 else ""
            caption = escape(f"{run}{image.name}, step {image.step}")
            data = base64.b64encode(image.png).decode()
            parts.append(
                f'<figure class="image"><img src="data:image/png;base64,{data}" alt="{caption}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
    return "\n".join(parts)
