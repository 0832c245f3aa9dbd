"""What a directory lacks for more bytes and files: in its file system and its quota."""

from collections.abc import Iterator

from paceline.cluster.machine import Directory, Quota
from paceline.units import format_bytes


def find_shortages(directory: Directory, size_bytes: float, files: int) -> Iterator[str]:
    """Yield what is too little in a directory for so many bytes and files."""
    if directory.free_bytes is not None and size_bytes > directory.free_bytes:
        yield f"{format_bytes(directory.free_bytes)} free"
    if directory.free_files is not None and files > directory.free_files:
        yield f"space for {directory.free_files:,} files"
    quota = directory.quota
    if quota is None:
        return
    if quota.limit_bytes is not None and size_bytes > (left := max(0, quota.limit_bytes - quota.used_bytes)):
        yield f"{format_bytes(left)} left of a quota of {format_bytes(quota.limit_bytes)}"
    if (
        quota.limit_files is not None
        and quota.used_files is not None
        and files > (files_left := max(0, quota.limit_files - quota.used_files))
    ):
        yield f"{files_left:,} files left of a quota of {quota.limit_files:,}"


def find_soft_limits(quota: Quota, size_bytes: float, files: int) -> Iterator[str]:
    """Yield the soft limits that so many more bytes and files exceed."""
    if quota.soft_bytes is not None and quota.used_bytes + size_bytes > quota.soft_bytes:
        yield f"a quota of {format_bytes(quota.soft_bytes)}"
    if (
        quota.soft_files is not None
        and quota.used_files is not None
        and quota.used_files + files > quota.soft_files
    ):
        yield f"a quota of {quota.soft_files:,} files"
