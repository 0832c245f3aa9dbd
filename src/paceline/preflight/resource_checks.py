"""Whether there is enough for the training: memory of a rank, room for checkpoints, time until the job must end."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.cluster import directories
from paceline.cluster.facts import Cluster
from paceline.cluster.machine import Directory, Quota
from paceline.errors import ClusterError, Error
from paceline.launch.slurm.client import format_clock
from paceline.plan.cost_model.defaults import add_assumptions
from paceline.plan.cost_model.framework_profiles import recipe_of_precision
from paceline.plan.plan import AUTO, Plan, parse
from paceline.plan.search.search import MARGIN, search_plans
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Says, Verdict
from paceline.preflight.site_checks import is_queued_again, limit_s
from paceline.units import format_bytes, format_seconds, several

FILES_OF_A_RANK = 4  # log, heartbeat, and what a doctor asks for
FILES_OF_A_RUN = 16
FILES_OF_A_CHECKPOINT = 2  # besides those of its ranks
HERE_ONLY = ("tmpfs", "ramfs")
START_S = 30.0  # to start the ranks of a job, to import torch and to build the model, in round figures
SLURM_BYTES = {"K": 2**10, "M": 2**20, "": 2**20, "G": 2**30, "T": 2**40}


def memory(flight: PreflightContext) -> Says:
    """Of the rank that needs most."""
    where, job = flight.cluster, flight.job
    if where.device.kind != "cpu" and (
        job.ranks_per_node > where.devices_per_node or job.nodes > where.nodes
    ):
        asked, has = f"{job.nodes} × {job.ranks_per_node}", f"{where.nodes} × {where.devices_per_node}"
        verdict: Verdict = (
            "fails" if flight.target is not None else "warns"
        )  # who queues a job may be on another kind of node
        yield (
            verdict,
            f"nodes × ranks are {asked}, nodes × devices of {where.name} {has}; ask for no more, or say another --cluster",
        )
        return
    try:
        predicted = flight.cost.memory
    except Error as error:
        yield "warns", f"not predicted: {error}"
        return
    limit, why = predicted.limit_bytes, f"a rank has on {where.name or where.device.name}"
    if where.device.kind == "cpu" and flight.site.memory is not None:
        asked_bytes = slurm_bytes(flight.site.memory) / job.ranks_per_node
        limit, why = (
            (asked_bytes, f"memory={flight.site.memory!r} leaves a rank")
            if asked_bytes < limit
            else (limit, why)
        )
    largest = max(predicted.parts, key=lambda part: part.value).name
    peak = f"{format_bytes(predicted.peak_bytes)} (± {predicted.error:.0%}) predicted, most of it {largest}"
    said = f"{peak}; {format_bytes(limit)} is what {why}"
    if predicted.peak_bytes <= limit * (1 - MARGIN):
        yield "passes", said
    else:
        yield "fails" if predicted.peak_bytes > limit else "warns", f"{said}: {_leaner(flight, limit)}"


def _leaner(flight: PreflightContext, limit_bytes: float) -> str:
    from paceline.training.auto_plan import shorten_plan

    count = flight.job.ranks
    found = search_plans(
        flight.facts,
        add_assumptions(flight.cluster)[0],
        flight.spec.batch,
        MARGIN,
        recipe_of_precision(flight.spec.precision),
        count,
    )
    fitting = [(plan, cost) for plan, cost in found.fitting if cost.peak_bytes <= limit_bytes * (1 - MARGIN)]
    if not fitting:
        return "no plan needs so little on as many ranks; use more of them, or a smaller --batch"
    plan, cost = fitting[0]
    return f"plan {shorten_plan(plan, count)} needs {format_bytes(cost.peak_bytes)}"


def slurm_bytes(text: str) -> float:
    """`64G`, as sbatch has it: MiB without a unit, and 0 is all there is."""
    found = re.fullmatch(r"([0-9]{1,18})([KMGT]?)B?", text.strip(), re.I)
    return (int(found[1]) * SLURM_BYTES[found[2].upper()] if found else 0) or math.inf


def room(flight: PreflightContext) -> Says:
    """Bytes and files of all checkpoints that are there at once, against what the file system and its quota leave."""
    there = next(folder for folder in (flight.run, *flight.run.absolute().parents) if folder.is_dir())
    if not os.access(there, os.W_OK):
        yield "fails", f"you may not write to {there}; say another --run-dir"
        return
    try:
        quotas = directories.read_quotas()
    except ClusterError as error:
        quotas = []
        yield "warns", f"quotas are not known: {error}"
    found = directories.examine(there, (), quotas, directories.list_mounts())
    kept = flight.spec.save.keep + 2  # the best, and the one that is written
    size, files = needed(flight, kept)
    wanted = f"{kept} checkpoints of {format_bytes(size / kept)} (--keep {flight.spec.save.keep}, the best and the next) in {files:,} files"
    if short := [*_short(found, size, files)]:
        yield (
            "fails",
            f"{wanted} do not fit: {there} has {' and '.join(short)}; say another --run-dir, or make room, or --keep fewer",
        )
        return
    free = " and ".join(
        [format_bytes(found.free_bytes or 0), *([f"{found.free_files:,} files"] if found.free_files else [])]
    )
    yield "passes", f"{wanted}; {there} ({found.filesystem or 'unknown'}) has {free} free"
    if found.quota is not None and (over := [*_above_soft(found.quota, size, files)]):
        yield "warns", f"with them {' and '.join(over)} exceeded, which is allowed for a while only"
    if found.filesystem in HERE_ONLY and flight.job.nodes > 1:
        yield (
            "warns",
            f"{there} is {found.filesystem}, which other nodes do not see; say a --run-dir on a shared file system",
        )


def needed(flight: PreflightContext, kept: int) -> tuple[int, int]:
    """Bytes and files of a run with so many checkpoints."""
    ranks, said = flight.job.ranks, flight.launch.plan
    plan = parse(said) if said not in (None, AUTO) else Plan()
    writers = 1 if plan.servers else ranks
    states = 1 + ranks if plan.period is not None else 1  # local SGD has each rank's own besides
    files = kept * (writers + FILES_OF_A_CHECKPOINT) + writers + FILES_OF_A_RANK * ranks + FILES_OF_A_RUN
    return kept * states * flight.checkpoint_bytes, files


def _short(found: Directory, size: float, files: int) -> Iterator[str]:
    if found.free_bytes is not None and size > found.free_bytes:
        yield f"{format_bytes(found.free_bytes)} free"
    if found.free_files is not None and files > found.free_files:
        yield f"room for {found.free_files:,} files"
    quota = found.quota
    if quota is None:
        return
    if quota.limit_bytes is not None and size > (left := max(0, quota.limit_bytes - quota.used_bytes)):
        yield f"{format_bytes(left)} left of a quota of {format_bytes(quota.limit_bytes)}"
    if (
        quota.limit_files is not None
        and quota.used_files is not None
        and files > (more := max(0, quota.limit_files - quota.used_files))
    ):
        yield f"{more:,} files left of a quota of {quota.limit_files:,}"


def _above_soft(quota: Quota, size: float, files: int) -> Iterator[str]:
    if quota.soft_bytes is not None and quota.used_bytes + size > quota.soft_bytes:
        yield f"a quota of {format_bytes(quota.soft_bytes)} is"
    if (
        quota.soft_files is not None
        and quota.used_files is not None
        and quota.used_files + files > quota.soft_files
    ):
        yield f"a quota of {quota.soft_files:,} files is"


def time(flight: PreflightContext) -> Says:
    """All steps and saves, against the time until a job is told to save and stop."""
    asked_s = limit_s(flight)
    try:
        step_s, error = flight.cost.step_s, flight.cost.time.error
    except Error as unknown:
        yield "warns", f"not predicted: {unknown}"
        return
    steps = flight.spec.total_steps(flight.data.samples)
    saves, save_s = _saving(flight, steps, steps * step_s)
    work_s = steps * step_s + saves * save_s
    parts = [f"{START_S:.0f} s to start", f"{steps:,} steps of {format_seconds(step_s)}"]
    parts += [f"{saves} saves of {format_seconds(save_s)}"] if save_s else []
    said = f"{format_seconds(START_S + work_s)} predicted (± {error:.0%}): {', '.join(parts)}"
    if asked_s is None:
        yield "passes", f"{said}; no limit is said"
        return
    usable_s = asked_s - flight.site.notice_s - START_S
    limit = (
        f"{format_clock(asked_s)} {'asked' if flight.time is not None else 'is the limit of the partition'}"
    )
    if work_s <= usable_s:
        yield "passes", f"{said}; {limit}"
    elif usable_s < step_s + save_s:
        yield (
            "fails",
            f"{said}; {limit}, and {flight.site.notice_s} s before no step would be done and saved: ask for more time",
        )
    elif not is_queued_again(flight.site, os.environ):
        yield (
            "fails",
            f"{said}; {limit}, and --no-requeue, so that it would not be done: ask for more time, or let it be queued again",
        )
    else:
        again = math.ceil(work_s / usable_s) - 1
        yield "warns", f"{said}; {limit}: it will be queued again {several(again, 'time')}"


def _saving(flight: PreflightContext, steps: int, steps_s: float) -> tuple[int, float]:
    """How often, and how long it takes where that was measured on this disk."""
    save, rate = flight.spec.save, _rate(flight.cluster, flight.run.absolute())
    saves = max(1, steps // save.every if save.every is not None else 0, int(steps_s / (60 * save.minutes)))
    return saves, flight.checkpoint_bytes / rate if rate else 0.0


def _rate(cluster: Cluster, run: Path) -> float | None:
    """Bytes/s of the innermost directory that was measured."""
    disks = [disk for disk in cluster.disks if run.is_relative_to(Path(disk.path).absolute())]
    if not disks:
        return None
    found = max(disks, key=lambda disk: len(disk.path))
    fact = found.checkpoint_Bps or found.write_Bps
    return fact.value if fact else None
