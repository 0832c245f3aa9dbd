"""Check of quotas: what the user already keeps where a run is written, by purpose."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster import directories
from paceline.errors import ClusterError
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
    """Report what environment, data, runs and Ray take on the file system of the run."""
    runs = next(path for path in context.run.absolute().parents if path.is_dir())
    datasets = [
        samples.dataset
        for samples in (context.data.training, context.data.validation, *context.data.others)
        if samples is not None
    ]
    found = {
        purpose: usage
        for purpose, folders, left_out in find_purposes(datasets, runs)
        if (usage := measure_folders(folders, os.stat(runs).st_dev, left_out)).files
    }
    if not found:
        yield "passes", f"no environment, data or runs are on the file system of {runs}"
        return
    parts = ", ".join(f"{purpose} {usage}" for purpose, usage in found.items())
    yield "passes", f"on the file system of {runs}: {parts}{_compare_with_quota(found.values(), runs)}"


def _compare_with_quota(found: Iterable[FolderUsage], runs: Path) -> str:
    """Return a phrase on how much of a quota is used, and how much of that was found; empty without one."""
    try:
        quotas = directories.read_quotas()
    except ClusterError:  # the check of room reports it
        return ""
    quota = directories.examine(runs, (), quotas, directories.list_mounts()).quota
    if quota is None:
        return ""
    total = FolderUsage(
        sum(usage.bytes for usage in found),
        sum(usage.files for usage in found),
        all(usage.is_whole for usage in found),
    )
    limit = quota.limit_bytes or quota.soft_bytes
    of_limit = f" of {format_bytes(limit)}" if limit is not None else ""
    used_files = f" in {quota.used_files:,} files" if quota.used_files is not None else ""
    used = f"{format_bytes(quota.used_bytes)}{of_limit}{used_files}"
    return f"; together {total}, while the quota counts {used}"


def find_purposes(datasets: Sequence[Any], runs: Path) -> Iterator[tuple[str, list[Path], list[Path]]]:
    """Yield (purpose, folders, folders in these that have another purpose). runs: the folder of runs."""
    from paceline.data.cache.sizes import find_source_sizes

    data = sorted({source.folder for dataset in datasets for source in find_source_sizes(dataset)})
    found = [RunFolder(path.parent) for path in sorted(runs.glob("*/events.jsonl"))]
    checkpoints = [run.ckpt for run in found]
    environment = Path(sys.prefix)
    yield "environment", [environment], data
    yield "data", data, [environment]
    yield "checkpoints", checkpoints, []
    yield "logs", [run.path for run in found], checkpoints
    yield "temporary files of Ray", find_ray_sessions(), []


def find_ray_sessions() -> list[Path]:
    """Return the folders that Ray's sessions of this user left, with logs and spilled objects.

    Ray keeps them until somebody deletes them (ray 2.60, ray._common.utils.get_user_temp_dir).
    """
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    with contextlib.suppress(OSError):
        return sorted(
            Path(entry.path)
            for entry in os.scandir(folder)
            if entry.name.startswith("session_")
            and entry.is_dir(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        )
    return []


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
