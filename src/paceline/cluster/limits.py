"""The cores and the memory that this process may use, by its affinity and its control group."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
BUSY_SAMPLE_S = 0.25  # duration of the sample of what other processes use of the cores


def usable_cores() -> int:
    """Return the number of cores in the affinity of this process, limited by its control group's quota."""
    cores = len(affinity())
    quotas = [cpu_quota(group) for group in list_control_groups(_own_groups(), CGROUPS)]
    return min([cores, *(max(1, int(quota)) for quota in quotas if quota is not None)])


def free_cores(busy: float) -> float:
    """Return the number of cores that this process may use and that are free, if `busy` cores are busy."""
    return min(float(usable_cores()), max(0.0, len(affinity()) - busy))


def measure_free_cores() -> float:
    """Return the number of cores that other processes leave free, measured over BUSY_SAMPLE_S."""
    if usable_cores() == 1:
        return 1.0
    return free_cores(busy_cores(BUSY_SAMPLE_S) or 0.0)


def busy_cores(seconds: float) -> float | None:
    """Return the mean number of busy cores in the affinity of this process, measured over `seconds`.

    Returns None if the system does not report it.
    """
    before = core_ticks()
    time.sleep(seconds)
    after = core_ticks()
    ticks = [
        (after[core][0] - before[core][0], after[core][1] - before[core][1])
        for core in affinity()
        if core in before and core in after
    ]
    return sum(busy / (busy + idle) for busy, idle in ticks if busy + idle > 0) if ticks else None


def affinity() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def core_ticks() -> dict[int, tuple[int, int]]:
    """Return the busy and the idle ticks of each core since the machine started."""
    ticks = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name != "cpu":
                # The time of guests is part of user time.
                user, nice, system, idle, waiting, *others = map(int, words[:8])
                ticks[int(name[3:])] = (user + nice + system + sum(others), idle + waiting)
    return ticks


def memory_limit() -> int | None:
    """Return the bytes that this process may use, if a control group limits them."""
    group = find_memory_group()
    return group_memory_limit(group) if group is not None else None


def find_memory_group() -> Path | None:
    """Return the control group of this process with the lowest limit of memory; None if there is none."""
    groups = [
        (limit, group)
        for group in list_control_groups(_own_groups(), CGROUPS)
        if (limit := group_memory_limit(group)) is not None
    ]
    return min(groups)[1] if groups else None


def free_memory_bytes() -> int:
    """Return the memory that this process may still use, with what the file cache would give back."""
    import psutil

    available: int = psutil.virtual_memory().available
    limit, group = memory_limit(), find_memory_group()
    used = group_memory_used(group) if group is not None else None
    return min(available, limit - used) if limit is not None and used is not None else available


def group_memory_used(group: Path) -> int | None:
    """Return the bytes that a control group uses, without the file cache that the system can free at once."""
    words = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
    if not words or not words[0].isdigit():
        return None
    stat = _words(group / "memory.stat")
    cache = next(
        (
            int(stat[position + 1])
            for name in ("total_inactive_file", "inactive_file")  # version 1, version 2
            for position in range(0, len(stat) - 1, 2)
            if stat[position] == name and stat[position + 1].isdigit()
        ),
        0,
    )
    return max(0, int(words[0]) - cache)


def _own_groups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def list_control_groups(text: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups of this process and their parents, of versions 1 and 2.

    text: contents of /proc/self/cgroup. In a container, its paths are often paths of the host that do not
    exist; then only the root counts.
    """
    candidates = {root: None, root / "cpu": None, root / "memory": None}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        top = root
        if controllers:  # version 1
            if not {"cpu", "memory"} & {*controllers.split(",")}:
                continue
            top = root / controllers
        inner = top / path.strip("/")
        candidates |= {folder: None for folder in (inner, *inner.parents) if folder.is_relative_to(top)}
    yield from (folder for folder in candidates if folder.is_dir())


def cpu_quota(group: Path) -> float | None:
    """Return the number of CPUs that a control group may use, or None without a limit."""
    words = _words(group / "cpu.max") or [
        *_words(group / "cpu.cfs_quota_us"),
        *_words(group / "cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return None  # `max`, or -1 in version 1
    return int(words[0]) / int(words[1])


def group_memory_limit(group: Path) -> int | None:
    """Return the bytes that a control group may use, or None without a limit."""
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    if not words or not words[0].isdigit():
        return None
    limit = int(words[0])
    return limit if limit < 2**60 else None  # version 1 writes nearly 2^63 for no limit


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
