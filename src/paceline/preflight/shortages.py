"""The soft limits of a quota that more bytes and files would exceed."""

from collections.abc import Iterator

from paceline.cluster.machine import Quota
from paceline.units import format_bytes


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
