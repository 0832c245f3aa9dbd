"""Check of room: what a run will write, compared with the file system and its quota."""

import contextlib
import os
from pathlib import Path

from paceline.cluster import directories
from paceline.errors import ClusterError, Error
from paceline.plan.plan import AUTO, Plan, parse
from paceline.preflight.cache_check import estimate_cache
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Results
from paceline.preflight.shortages import find_soft_limits
from paceline.units import format_bytes

FILES_PER_RANK = 4  # log, heartbeat, and answers for the doctor
FILES_PER_NODE = 1  # samples
FILES_PER_RUN = 16
FILES_PER_CHECKPOINT = 2  # in addition to those of its ranks
# rounded up from runs of the built-in tasks
BYTES_PER_STEP = 400  # of events, log.txt and TensorBoard
BYTES_PER_SAMPLE = 400  # of a node, in monitor/
BYTES_PER_RANK = 2**12  # of its files in ranks/
BYTES_PER_RUN = 2**17  # of the report, and the files that do not grow
LOCAL_FILESYSTEMS = ("tmpfs", "ramfs")


def check_room(context: PreflightContext) -> Results:
    """Compare bytes and files that the run will have at once with file system and quota."""
    folder = next(path for path in (context.run, *context.run.absolute().parents) if path.is_dir())
    if not os.access(folder, os.W_OK):
        yield "fails", f"no permission to write to {folder}; use another --run-dir"
        return
    try:
        quotas = directories.read_quotas()
    except ClusterError as error:
        quotas = []
        yield "warns", f"quotas are not known: {error}"
    directory = directories.examine(folder, (), quotas, directories.list_mounts())
    usage, size_bytes, files = _predict_usage(context, folder)
    if shortages := [*directories.find_shortages(directory, size_bytes, files)]:
        yield (
            "fails",
            f"{usage} do not fit: {folder} has {' and '.join(shortages)}; "
            "use another --run-dir, free some space, or use a smaller --keep",
        )
        return
    free = format_bytes(directory.free_bytes or 0)
    if directory.free_files:
        free += f" and {directory.free_files:,} files"
    yield "passes", f"{usage}; {folder} ({directory.filesystem or 'unknown'}) has {free} free"
    if context.site.is_backed_up(folder) is False:
        places = ", ".join(context.site.backups or ()) or "another site"
        yield "passes", f"{folder} is not backed up: copy what you keep to {places}"
    if directory.quota is not None and (exceeded := [*find_soft_limits(directory.quota, size_bytes, files)]):
        yield "warns", f"they exceed {' and '.join(exceeded)}, which is permitted only for a while"
    if directory.filesystem in LOCAL_FILESYSTEMS and context.job.nodes > 1:
        yield (
            "warns",
            f"{folder} is {directory.filesystem}, which other nodes cannot read; "
            "use a --run-dir on a shared file system",
        )


def _predict_usage(context: PreflightContext, folder: Path) -> tuple[str, int, int]:
    """Return a phrase on what the run will have in a folder, and its bytes and files."""
    keep = context.spec.save.keep
    count = keep + 2  # the best, and the checkpoint that is being written
    size_bytes, files = estimate_usage(context, count)
    checkpoints = (
        f"{count} checkpoints of {format_bytes(size_bytes / count)} (--keep {keep}, the best and the next)"
    )
    logs_bytes = estimate_log_bytes(context)
    parts, size_bytes = [f"logs of up to {format_bytes(logs_bytes)}"], size_bytes + logs_bytes
    with contextlib.suppress(Error):  # the check of the cache reports it
        cache = estimate_cache(context)
        if cache is not None and os.stat(cache.place).st_dev == os.stat(folder).st_dev:
            used = min(cache.bytes, cache.limit_bytes)
            parts.append(f"a cache of {format_bytes(used)}")
            size_bytes, files = size_bytes + used, files + cache.files
    phrase = " and ".join([", ".join([checkpoints, *parts[:-1]]), parts[-1]])
    return f"{phrase}, {format_bytes(size_bytes)} in {files:,} files", size_bytes, files


def estimate_usage(context: PreflightContext, count: int) -> tuple[int, int]:
    """Return the bytes of `count` checkpoints of a run, and the number of all its files."""
    ranks, text = context.job.ranks, context.launch.plan
    plan = parse(text) if text not in (None, AUTO) else Plan()
    writers = 1 if plan.servers else ranks
    states = 1 + ranks if plan.period is not None else 1  # local SGD saves each rank's state as well
    files = count * (writers + FILES_PER_CHECKPOINT) + writers + FILES_PER_RANK * ranks + FILES_PER_RUN
    files += FILES_PER_NODE * context.launch.nodes
    return count * states * context.checkpoint_bytes, files


def estimate_log_bytes(context: PreflightContext) -> int:
    """Return the bytes of events, report, files of the ranks, and samples of the nodes if time is known."""
    size = BYTES_PER_RUN + BYTES_PER_RANK * context.job.ranks
    with contextlib.suppress(Error):  # of the data or the plan, which other checks report
        steps = context.spec.total_steps(context.data.samples)
        size += steps * BYTES_PER_STEP
        if context.launch.monitor != "off":
            samples = steps * context.cost.step_s / context.launch.monitor
            size += round(samples * context.launch.nodes * BYTES_PER_SAMPLE)
    return size
