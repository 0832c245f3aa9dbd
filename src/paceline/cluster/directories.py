"""Directories: on which file system each is, what is free there, and how much of it one may take."""

import getpass
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from paceline.cluster.machine import Directory, Quota
from paceline.cluster.quota import of_directory, parse
from paceline.cluster.run_tool import run

# Variables in which sites name the places that one may use.
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
    point: str
    device: str
    filesystem: str


def usual(env: Mapping[str, str], here: Path) -> dict[Path, tuple[str, ...]]:
    """Where people keep things, with the variables that say so: only what is there."""
    found: dict[Path, tuple[str, ...]] = {}
    for name in NAMES:
        if os.path.isabs(said := env.get(name, "")):
            found[Path(said)] = (*found.get(Path(said), ()), name)
    for path in (here, *map(Path, ALWAYS)):
        found.setdefault(path, ())
    return {path: names for path, names in found.items() if path.is_dir()}


def mounts() -> list[Mount]:
    return [Mount(row.mountpoint, row.device, row.fstype) for row in psutil.disk_partitions(all=True)]


def mount_of(path: str, among: Sequence[Mount]) -> Mount | None:
    """The innermost one; of several on one place the last, which hides the others."""
    holding = [row for row in among if path == row.point or path.startswith(row.point.rstrip("/") + "/")]
    return max(reversed(holding), key=lambda row: len(row.point), default=None)


def look(
    path: Path, names: tuple[str, ...], quotas: list[tuple[str, Quota]], among: Sequence[Mount]
) -> Directory:
    """May wait for as long as a server does not answer."""
    whole = str(path.resolve())
    mount = mount_of(whole, among)
    room = os.statvfs(path)
    quota = _of_lustre(whole) if mount is not None and mount.filesystem == "lustre" else None
    return Directory(
        path=str(path),
        names=names,
        filesystem=mount.filesystem if mount else None,
        mount=mount.point if mount else None,
        size_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,  # some file systems do not count them
        quota=quota
        or of_directory(whole, mount.point if mount else None, mount.device if mount else None, quotas),
    )


def quotas() -> list[tuple[str, Quota]]:
    """What the tools say that know all file systems; `quota` leaves with 1 when one is exceeded."""
    said = {"quota": run("quota", "-w", "-p", good=frozenset({0, 1})), "myquota": run("myquota")}
    return [row for tool, text in said.items() for row in parse(text, tool)]


def _of_lustre(path: str) -> Quota | None:
    rows = parse(run("lfs", "quota", "-u", getpass.getuser(), path), "lfs quota")
    return rows[0][1] if rows else None
