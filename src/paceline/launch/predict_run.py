"""`paceline.predict`: what a checkpoint of a run predicts for each sample, on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import task as tasks
from paceline.distributed.world import read_world
from paceline.errors import SpecError
from paceline.files import check_target, replaced
from paceline.launch.evaluate_run import MAX_S, read_request
from paceline.run import RunFolder

if TYPE_CHECKING:
    from paceline.training.evaluation.predict_checkpoint import Prediction, PredictionRequest


def predict(
    run: RunFolder | Path | str,
    files: Sequence[Path | str] = (),
    out: Path | str = "predictions.jsonl",
    checkpoint: str | int = "last",
    *,
    split: str | None = None,
    ranks: int | None = None,
    plan: str | None = None,
    batch: int | None = None,
    device: str | None = None,
) -> Prediction:
    """Write what a checkpoint predicts for each sample to a file, a line of JSON for each, in their order.

        paceline.predict("runs/a", split="test", out="test.jsonl").samples

    The values are those of `Task.predict`; by default, the outputs of the model. They do not depend on ranks
    and plan. The file appears when it is complete. Ranks start as for `evaluate`, and no file of the run
    changes.

    run: the folder of the run.
    files: what `Task.read_files` reads the samples from, in place of a split.
    out: the file to write. Under torchrun, mpirun or srun, rank 0 writes it.
    checkpoint: "last" (the last complete one), "best" (by `save.best` of the run) or a step.
    split: what `Task.dataset` gets, such as "train", "validation" or "test" [default: "validation"].
    ranks, plan, batch, device: as for `evaluate`.

    Returns a `Prediction`: out, samples, checkpoint, step, plan, ranks, batch, seconds, notes.
    Raises RunError if `run` is no run or `out` cannot be written, CheckpointError if there is no such
    checkpoint, DataError if there is no such split or file, SpecError, PlanError and TaskError for other
    unsuitable values, and RankError if a process fails.
    """
    if files and split is not None:
        raise SpecError(f"specify either files or a split, got {len(files)} files and --split {split}")
    out, world = Path(out), read_world()
    check_target(out)
    source, num_ranks = read_request(
        run, str(checkpoint), {"ranks": ranks, "plan": plan, "batch": batch, "device": device}, world
    )
    from paceline.training.evaluation.predict_checkpoint import PredictionRequest, predict_from_checkpoint

    # This process deletes the incomplete file after an interrupt, which would kill the ranks that it started.
    with replaced(out) if world.rank == 0 else contextlib.nullcontext(out) as temporary:
        request = PredictionRequest(source, split or "validation", tuple(map(Path, files)), out, temporary)
        if world.launcher is not None or num_ranks == 1:
            return predict_from_checkpoint(request, world)
        return _predict_on_ranks(request, num_ranks)


def _predict_on_ranks(request: PredictionRequest, num_ranks: int) -> Prediction:
    from paceline.launch.rank_pool import Ranks
    from paceline.launch.sent_task import pack_task

    spec = request.source.spec
    task = tasks.load_task(spec.task, spec.set)
    content = pack_task(task, spec.task) if type(task).__module__ == "__main__" else None
    with Ranks(num_ranks) as pool:
        result: Prediction = pool(_predict_on_rank, request, content, timeout_s=MAX_S)[0]
        return result


def _predict_on_rank(request: PredictionRequest, sent: bytes | None) -> Prediction:
    from paceline.launch.sent_task import unpack_task
    from paceline.training.evaluation.predict_checkpoint import predict_from_checkpoint

    if sent is not None:
        unpack_task(sent)
    return predict_from_checkpoint(request, read_world())
