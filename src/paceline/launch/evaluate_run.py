"""`paceline.evaluate`: the metrics of a checkpoint of a run, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import spec as specs
from paceline import task as tasks
from paceline.distributed.world import World, read_world
from paceline.errors import LaunchError
from paceline.run import RunFolder, open_run

if TYPE_CHECKING:
    from paceline.training.evaluation.evaluate_checkpoint import CheckpointRequest, Evaluation

MAX_S = 14 * 86400.0  # that ranks of this machine may take; a rank that ends is noticed at once


def evaluate(
    run: RunFolder | Path | str,
    split: str = "validation",
    checkpoint: str | int = "last",
    *,
    ranks: int | None = None,
    plan: str | None = None,
    batch: int | None = None,
    device: str | None = None,
) -> Evaluation:
    """Return the metrics of a checkpoint on a split, computed as the training computes them.

        paceline.evaluate("runs/a", split="test", checkpoint="best").metrics["loss"]

    Each sample counts once. No file of the run changes, and the run may be in training meanwhile. Under
    torchrun, mpirun or srun this process becomes a rank, and all ranks return the same metrics. Otherwise
    ranks are started on this machine; they import the module that defines the task, or get a copy of a task
    that is defined in the script or in a notebook.

    run: the folder of the run; its spec.toml names the task and the precision.
    split: what `Task.dataset` gets, such as "train", "validation" or "test".
    checkpoint: "last" (the last complete one), "best" (by `save.best` of the run) or a step.
    ranks: number of processes [default: as the run].
    plan: text of the plan [default: that of the run; with another number of ranks, the most similar].
    batch: samples that all ranks evaluate at a time [default: the global batch of the run].
    device: "cpu" or "cuda" [default: as the run].

    Returns an `Evaluation`: split, samples, checkpoint, step, plan, ranks, batch, metrics, seconds, notes.
    Raises RunError if `run` is no run, CheckpointError if there is no such checkpoint, DataError if the task
    has no such split, SpecError, PlanError and TaskError for other unsuitable values, and RankError if a
    process fails.
    """
    world = read_world()
    request, num_ranks = read_request(
        run,
        str(checkpoint),
        {"ranks": ranks, "plan": plan, "batch": batch, "device": device},
        world,
    )
    if world.launcher is not None or num_ranks == 1:
        from paceline.training.evaluation.evaluate_checkpoint import evaluate_checkpoint

        return evaluate_checkpoint(request, split, world)
    from paceline.launch.rank_pool import Ranks
    from paceline.launch.sent_task import pack_task

    task = tasks.load_task(request.spec.task, request.spec.set)
    content = pack_task(task, request.spec.task) if type(task).__module__ == "__main__" else None
    with Ranks(num_ranks) as pool:
        result: Evaluation = pool(_evaluate_on_rank, request, split, content, timeout_s=MAX_S)[0]
        return result


def _evaluate_on_rank(request: CheckpointRequest, split: str, sent: bytes | None) -> Evaluation:
    from paceline.launch.sent_task import unpack_task
    from paceline.training.evaluation.evaluate_checkpoint import evaluate_checkpoint

    if sent is not None:
        unpack_task(sent)
    return evaluate_checkpoint(request, split, read_world())


def read_request(
    run: RunFolder | Path | str, checkpoint: str, options: dict[str, Any], world: World
) -> tuple[CheckpointRequest, int]:
    """Return the request of a checkpoint of a run and the number of its ranks.

    options: keys of the request that may change, with at least "ranks" and "plan"; None: as in the run.
    Raises an Error before ranks start.
    """
    from paceline.training.evaluation.evaluate_checkpoint import (
        CheckpointRequest,
        choose_plan_text,
        select_checkpoints,
    )

    run = run if isinstance(run, RunFolder) else open_run(Path(run))
    before = specs.load_own(run.spec, {})[1]
    overrides = {key: value for key, value in options.items() if value is not None}
    spec, launch = specs.load_own(run.spec, overrides)
    if world.launcher is not None and options["ranks"] not in (None, world.size):
        raise LaunchError(
            f"--ranks {options['ranks']}, but {world.launcher} started {world.size} ranks; leave --ranks out"
        )
    if world.launcher is None and options["ranks"] is None and before.nodes > 1:
        raise LaunchError(
            f"{run.path} was trained on {before.nodes} nodes, and this command starts ranks on this machine "
            "only; add --ranks, or start it with srun or torchrun"
        )
    ranks = world.size if world.launcher is not None else launch.ranks or 1
    launch = launch.model_copy(update={"ranks": ranks, "nodes": 1, "least_nodes": None})
    steps = select_checkpoints(run, checkpoint, spec.save.best)
    plan = choose_plan_text(spec, before, launch, options["plan"])
    return CheckpointRequest(run, spec, steps, plan, launch.device), ranks
