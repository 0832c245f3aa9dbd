"""What this process may use of the machine: cores and memory, as its affinity and its control group have them."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(_own_cores())
    quotas = [cpu_quota(group) for group in groups(_own_groups(), CGROUPS)]
    return min([cores, *(max(1, int(quota)) for quota in quotas if quota is not None)])


def free_cores(busy: float) -> float:
    """Of the cores that this process may use those that are left where so many are busy."""
    return min(float(usable_cores()), max(0.0, len(_own_cores()) - busy))


def busy_cores(seconds: float) -> float | None:
    """Return how many of the cores of its affinity are busy, counted for so many seconds; None where the system does not tell."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    own = [
        (after[core][0] - before[core][0], after[core][1] - before[core][1])
        for core in _own_cores()
        if core in before and core in after
    ]
    return sum(busy / (busy + idle) for busy, idle in own if busy + idle > 0) if own else None


def _own_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _ticks() -> dict[int, tuple[int, int]]:
    """Of each core those that it was busy and idle since the start of the machine."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name != "cpu":
                user, nice, system, idle, waiting, *others = map(
                    int, words[:8]
                )  # what guests take is in user too
                found[int(name[3:])] = (user + nice + system + sum(others), idle + waiting)
    return found


def memory_limit() -> int | None:
    """Bytes, where a control group sets a limit."""
    limits = [memory_of(group) for group in groups(_own_groups(), CGROUPS)]
    return min((limit for limit in limits if limit is not None), default=None)


def _own_groups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def groups(own: str, root: Path) -> Iterator[Path]:
    """Control groups that this process is in, with those above them, of both versions. `own`: /proc/self/cgroup.

    In a container the path is often that of the host, which is not there; then the root is what counts.
    """
    found = {root: None, root / "cpu": None, root / "memory": None}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        top = root
        if controllers:  # version 1
            if not {"cpu", "memory"} & {*controllers.split(",")}:
                continue
            top = root / controllers
        inner = top / path.strip("/")
        found |= {folder: None for folder in (inner, *inner.parents) if folder.is_relative_to(top)}
    yield from (folder for folder in found if folder.is_dir())


def cpu_quota(group: Path) -> float | None:
    """CPUs."""
    both = _words(group / "cpu.max") or [
        *_words(group / "cpu.cfs_quota_us"),
        *_words(group / "cpu.cfs_period_us"),
    ]
    if len(both) != 2 or not all(word.isdigit() for word in both) or not int(both[1]):
        return None  # `max`, or -1 in version 1
    return int(both[0]) / int(both[1])


def memory_of(group: Path) -> int | None:
    """Bytes."""
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    if not words or not words[0].isdigit():
        return None
    limit = int(words[0])
    return limit if limit < 2**60 else None  # version 1 says no limit as nearly 2^63


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
