"""Checks of resources: memory per rank, time until the job must end."""

import math
import os
import re
from pathlib import Path

from paceline.cluster.facts import Cluster
from paceline.errors import Error
from paceline.launch.slurm.client import format_clock
from paceline.plan.cost_model.defaults import add_assumptions
from paceline.plan.cost_model.optimizer_state import recipe_of_request
from paceline.plan.search.search import MARGIN, search_plans
from paceline.preflight.cache_check import find_disk
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Results, Verdict
from paceline.preflight.site_checks import can_requeue, find_time_limit_s
from paceline.task import has_own_optimizer
from paceline.units import format_bytes, format_seconds, several

START_S = 30.0  # rounded: start the ranks of a job, import torch, build the model
SLURM_BYTES = {"K": 2**10, "M": 2**20, "": 2**20, "G": 2**30, "T": 2**40}


def check_memory(context: PreflightContext) -> Results:
    """Compare the predicted peak memory of the rank that needs most with the limit."""
    cluster, job = context.cluster, context.job
    if cluster.device.kind != "cpu" and (
        job.ranks_per_node > cluster.devices_per_node or job.nodes > cluster.nodes
    ):
        # Without --cluster, the job may run on another kind of node than this machine.
        verdict: Verdict = "fails" if context.target is not None else "warns"
        yield (
            verdict,
            f"nodes × ranks must be at most {cluster.nodes} × {cluster.devices_per_node}, "
            f"the nodes × devices of {cluster.name}, got {job.nodes} × {job.ranks_per_node}; "
            "use fewer, or another --cluster",
        )
        return
    try:
        predicted = context.cost.memory
    except Error as error:
        yield "warns", f"not predicted: {error}"
        return
    limit_bytes, source = predicted.limit_bytes, cluster.name or cluster.device.name
    if cluster.device.kind == "cpu" and context.site.memory is not None:
        requested_bytes = parse_slurm_bytes(context.site.memory) / job.ranks_per_node
        if requested_bytes < limit_bytes:
            limit_bytes, source = requested_bytes, f"memory={context.site.memory!r}"
    largest = max(predicted.parts, key=lambda part: part.value).name
    peak = f"{format_bytes(predicted.peak_bytes)} (± {predicted.error:.0%}) predicted, most of it {largest}"
    comparison = f"{peak}; the limit of {source} per rank is {format_bytes(limit_bytes)}"
    if predicted.peak_bytes <= limit_bytes * (1 - MARGIN):
        yield "passes", comparison
        return
    verdict = "fails" if predicted.peak_bytes > limit_bytes else "warns"
    yield verdict, f"{comparison}; {_suggest_plan(context, limit_bytes)}"


def _suggest_plan(context: PreflightContext, limit_bytes: float) -> str:
    from paceline.training.planning.auto_plan import shorten_plan

    count = context.job.ranks
    matches = search_plans(
        context.facts,
        add_assumptions(context.cluster)[0],
        context.spec.batch,
        MARGIN,
        recipe_of_request(context.spec, context.facts, has_own_optimizer(context.task)),
        count,
    )
    fitting = [
        (plan, cost) for plan, cost in matches.fitting if cost.peak_bytes <= limit_bytes * (1 - MARGIN)
    ]
    if not fitting:
        return "no plan fits on this number of ranks; use more ranks or a smaller --batch"
    plan, cost = fitting[0]
    return f"use plan {shorten_plan(plan, count)}, which needs {format_bytes(cost.peak_bytes)}"


def parse_slurm_bytes(text: str) -> float:
    """Return the bytes of a size such as `64G`, as sbatch reads it: MiB without a unit; 0 is all memory."""
    match = re.fullmatch(r"([0-9]{1,18})([KMGT]?)B?", text.strip(), re.I)
    return (int(match[1]) * SLURM_BYTES[match[2].upper()] if match else 0) or math.inf


def check_time(context: PreflightContext) -> Results:
    """Compare the predicted time of steps and saves with the time until a job must save and stop."""
    limit_s = find_time_limit_s(context)
    try:
        step_s, error = context.cost.step_s, context.cost.time.error
    except Error as unknown:
        yield "warns", f"not predicted: {unknown}"
        return
    steps = context.spec.total_steps(context.data.samples)
    saves, save_s = _predict_saves(context, steps, steps * step_s)
    work_s = steps * step_s + saves * save_s
    parts = [f"{START_S:.0f} s to start", f"{steps:,} steps of {format_seconds(step_s)}"]
    parts += [f"{saves} saves of {format_seconds(save_s)}"] if save_s else []
    prediction = f"{format_seconds(START_S + work_s)} predicted (± {error:.0%}): {', '.join(parts)}"
    if limit_s is None:
        yield "passes", f"{prediction}; no limit is known"
        return
    usable_s = limit_s - context.site.notice_s - START_S
    limit = (
        f"the limit of the {'job' if context.time is not None else 'partition'} is {format_clock(limit_s)}"
    )
    if work_s <= usable_s:
        yield "passes", f"{prediction}; {limit}"
    elif usable_s < step_s + save_s:
        yield (
            "fails",
            f"{prediction}; {limit}, and no step can be done and saved {context.site.notice_s} s before it; "
            "request more time",
        )
    elif not can_requeue(context.site, os.environ):
        yield (
            "fails",
            f"{prediction}; {limit}, and --no-requeue ends the training there; "
            "request more time, or allow requeueing",
        )
    else:
        count = math.ceil(work_s / usable_s) - 1
        yield "warns", f"{prediction}; {limit}: the job will be requeued {several(count, 'time')}"


def _predict_saves(context: PreflightContext, steps: int, steps_s: float) -> tuple[int, float]:
    """Return the number of saves, and the seconds of each save; 0 if the disk was not measured."""
    save, rate = context.spec.save, _find_write_rate_Bps(context.cluster, context.run.absolute())
    saves = max(1, steps // save.every if save.every is not None else 0, int(steps_s / (60 * save.minutes)))
    return saves, context.checkpoint_bytes / rate if rate else 0.0


def _find_write_rate_Bps(cluster: Cluster, run: Path) -> float | None:
    """Return the write rate of the innermost measured directory around the run; None if there is none."""
    disk = find_disk(cluster, run)
    fact = (disk.checkpoint_Bps or disk.write_Bps) if disk is not None else None
    return fact.value if fact else None
