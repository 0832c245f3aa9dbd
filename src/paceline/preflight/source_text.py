"""A phrase on where samples are: bytes, files, and the inodes that packing saves or would save."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.cluster.directories import Mount, find_mount
from paceline.units import format_bytes, several

if TYPE_CHECKING:
    from paceline.data.cache.sizes import SourceSize

SHARD_BYTES = 2**28  # of paceline pack
MANY_FILES = 1000


def describe_source(source: "SourceSize", mounts: Sequence[Mount]) -> str:
    """Return bytes, files and inodes: "1.2 GiB in 9 files of packed, … and saves 59,991 inodes".

    mounts: from `directories.list_mounts`.
    """
    text = f"{format_bytes(source.bytes)} in {several(source.files, 'file')} of {source.folder}"
    if source.packed:
        saved = source.packed - source.files
        return f"{text}, which is packed from {several(source.packed, 'file')}{_saves(saved)}"
    mount = find_mount(str(os.path.realpath(source.folder)), mounts) if source.is_loose else None
    if mount is not None and "squash" in mount.filesystem:
        return f"{text}, which is one SquashFS image{_saves(source.files - 1)}"
    saved = source.files - math.ceil(source.bytes / SHARD_BYTES) - 1
    return f"{text}; paceline pack would save {saved:,} inodes" if saved >= MANY_FILES else text


def _saves(inodes: int) -> str:
    return f" and saves {several(inodes, 'inode')}" if inodes > 0 else ""
