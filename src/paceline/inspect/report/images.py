"""The images of `Task.figures` in a report: the last one of each name, within the page."""

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from paceline.inspect.report.run_record import Record
from paceline.report.figure_files import list_figures, read_png
from paceline.run import RunFolder

MAX_IMAGES = 12  # of a run
MAX_BYTES = 2**17  # of an image
MAX_ALL_BYTES = 600_000  # of all images of a report


class RunImage(NamedTuple):
    name: str
    step: int
    png: bytes


def read_images(run: RunFolder) -> list[RunImage]:
    """Return the last image of each name. Links, other files and large images are left out."""
    found = []
    for figure in list_figures(run)[:MAX_IMAGES]:
        step, path = [*figure.steps.items()][-1]
        png = read_png(path, MAX_BYTES)
        if png is not None:
            found.append(RunImage(figure.name, step, png))
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
