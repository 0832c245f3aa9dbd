"""Directories: the file system of each, its free space and its quota."""

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from paceline.cluster.machine import Directory, Quota
from paceline.cluster.quota import find_quota, parse
from paceline.cluster.run_tool import run
from paceline.errors import ClusterError
from paceline.units import format_bytes, is_whole_number

# Environment variables with which sites name the directories of a user.
NAMES = (
    "HOME",
    "STORE",
    "WORK",
    "PROJECT",
    "DATA",
    "SCRATCH",
    "LUSTRE",
    "LUSTRE_SCRATCH",
    "FSCRATCH",
    "TMPDIR",
    "SLURM_TMPDIR",
    "LOCAL_SCRATCH",
)
ALWAYS = ("/tmp", "/dev/shm")


class Mount(NamedTuple):
    """A mounted file system: its mount point, device and type."""

    point: str
    device: str
    filesystem: str


def list_usual(env: Mapping[str, str], folder: Path) -> dict[Path, tuple[str, ...]]:
    """Return the directories in which people keep data, each with the variables that name it.

    env: the environment. folder: the working directory, which is included. They may not exist: a file server
    that does not answer would block the question.
    """
    names_by_path: dict[Path, tuple[str, ...]] = {}
    for name in NAMES:
        if os.path.isabs(value := env.get(name, "")):
            names_by_path[Path(value)] = (*names_by_path.get(Path(value), ()), name)
    for path in (folder, *map(Path, ALWAYS)):
        names_by_path.setdefault(path, ())
    return names_by_path


def list_mounts() -> list[Mount]:
    """Return all mounted file systems, in the order in which they were mounted."""
    return [Mount(row.mountpoint, row.device, row.fstype) for row in psutil.disk_partitions(all=True)]


def find_mount(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the innermost mount that contains a path.

    Of several mounts on the same mount point, only the last is visible.
    """
    parents = [row for row in mounts if path == row.point or path.startswith(row.point.rstrip("/") + "/")]
    return max(reversed(parents), key=lambda row: len(row.point), default=None)


def examine(
    path: Path, names: tuple[str, ...], quotas: list[tuple[str, Quota]], mounts: Sequence[Mount]
) -> Directory:
    """Return the facts of a directory. This may block until a file server answers.

    names: variables that name it. quotas: from `read_quotas`. mounts: from `list_mounts`. Raises OSError.
    """
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    real_path = str(path.resolve())
    mount = find_mount(real_path, mounts)
    stats = os.statvfs(path)
    quota, stripes, notes = None, Stripes(), []
    if mount is not None and mount.filesystem == "lustre":
        try:
            output = run("lfs", "quota", "-u", str(os.getuid()), real_path)
            quota = next((row for _, row in parse(output, "lfs quota")), None)
            if quota is not None and "[" in output:
                notes.append("the amounts of its quota are too small: some servers of Lustre did not answer")
            stripes = parse_stripes(run("lfs", "getstripe", "-d", real_path))
        except ClusterError as error:
            notes.append(str(error))
    return Directory(
        path=str(path),
        names=names,
        filesystem=mount.filesystem if mount else None,
        mount=mount.point if mount else None,
        size_bytes=stats.f_blocks * stats.f_frsize,
        free_bytes=stats.f_bavail * stats.f_frsize,
        free_files=stats.f_favail if stats.f_files else None,  # some file systems do not count files
        stripes=stripes.num_stripes,
        stripe_bytes=stripes.size_bytes,
        pool=stripes.pool,
        quota=quota
        or find_quota(real_path, mount.point if mount else None, mount.device if mount else None, quotas),
        note="; ".join(notes),
    )


def find_shortages(directory: Directory, size_bytes: float, files: int) -> Iterator[str]:
    """Yield what a directory lacks for more bytes and files, on its file system and of its quota."""
    if directory.free_bytes is not None and size_bytes > directory.free_bytes:
        yield f"{format_bytes(directory.free_bytes)} free"
    if directory.free_files is not None and files > directory.free_files:
        yield f"space for {directory.free_files:,} files"
    quota = directory.quota
    if quota is None:
        return
    left = max(0, (quota.limit_bytes or 0) - quota.used_bytes)
    if quota.limit_bytes is not None and size_bytes > left:
        yield f"{format_bytes(left)} left of a quota of {format_bytes(quota.limit_bytes)}"
    if (
        quota.limit_files is not None
        and quota.used_files is not None
        and files > (files_left := max(0, quota.limit_files - quota.used_files))
    ):
        yield f"{files_left:,} files left of a quota of {quota.limit_files:,}"


class Stripes(NamedTuple):
    """How Lustre divides a new file over its targets. A number of -1 means all of them."""

    num_stripes: int | None = None
    size_bytes: int | None = None
    pool: str | None = None


def parse_stripes(text: str) -> Stripes:
    """Return the default layout of a directory, from `lfs getstripe -d`.

    Of a layout with several components, that of the first extent counts.
    """

    def find(name: str) -> str | None:
        match = re.search(rf"\b(?:lmm_)?{name}:[ \t]+(\S+)", text)
        return match[1] if match is not None else None

    count, size = find("stripe_count"), find("stripe_size")
    return Stripes(
        int(count) if count is not None and re.fullmatch(r"-1|[1-9]\d{0,5}", count, re.ASCII) else None,
        int(size) if size is not None and is_whole_number(size) and int(size) else None,
        find("pool"),
    )


def read_quotas() -> list[tuple[str, Quota]]:
    """Return the quotas of all file systems, by the name of the file system. Raises ClusterError."""
    # `quota` exits with status 1 if a quota is exceeded.
    outputs = {"quota": run("quota", "-w", "-p", good=frozenset({0, 1})), "myquota": run("myquota")}
    return [row for tool, text in outputs.items() for row in parse(text, tool)]
