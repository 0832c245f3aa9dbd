"""Check of quotas: what the user already keeps where a run is written, by purpose."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Results
from paceline.run import RunFolder
from paceline.units import format_bytes

SCAN_S = 0.2  # to count the files of one purpose


@dataclass(frozen=True)
class FolderUsage:
    """The space and the files of folders. is_whole: whether all were counted in the time."""

    bytes: int
    files: int
    is_whole: bool

    def __str__(self) -> str:
        return f"{'' if self.is_whole else 'more than '}{format_bytes(self.bytes)} in {self.files:,} files"


def check_usage(context: PreflightContext) -> Results:
    """Report what environment, data, checkpoints and logs take on the file system of the run."""
    runs = next(path for path in context.run.absolute().parents if path.is_dir())
    parts = [
        f"{purpose} {usage}"
        for purpose, folders, left_out in find_purposes(context.data.training.dataset, runs)
        if (usage := measure_folders(folders, os.stat(runs).st_dev, left_out)).files
    ]
    if parts:
        yield "passes", f"on the file system of {runs}: {', '.join(parts)}"
    else:
        yield "passes", f"no environment, data or runs are on the file system of {runs}"


def find_purposes(dataset: Any, runs: Path) -> Iterator[tuple[str, list[Path], list[Path]]]:
    """Yield (purpose, folders, folders in these that have another purpose). runs: the folder of runs."""
    from paceline.data.cache.sizes import find_sources

    data = sorted({source.folder for source in find_sources(dataset)})
    found = [RunFolder(path.parent) for path in sorted(runs.glob("*/events.jsonl"))]
    checkpoints = [run.ckpt for run in found]
    environment = Path(sys.prefix)
    yield "environment", [environment], data
    yield "data", data, [environment]
    yield "checkpoints", checkpoints, []
    yield "logs", [run.path for run in found], checkpoints


def measure_folders(
    folders: list[Path], device: int, left_out: list[Path], seconds: float = SCAN_S
) -> FolderUsage:
    """Return the usage below folders on one device. Links are not followed."""
    end, size, count = time.monotonic() + seconds, 0, 0
    pending, excluded = [str(folder) for folder in folders], {str(path) for path in left_out}
    while pending:
        folder = pending.pop()
        try:
            if folder in excluded or os.stat(folder).st_dev != device:
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    size, count = size + 512 * status.st_blocks, count + 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:  # it was removed meanwhile, or cannot be read
            continue
        if time.monotonic() > end:
            return FolderUsage(size, count, False)
    return FolderUsage(size, count, True)
