"""Resume a training from the last complete checkpoint of its run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.data.order import Order
from paceline.errors import CheckpointError, CorruptionError
from paceline.spec import Spec
from paceline.training.checkpoint.identity import describe_changes, describe_identity
from paceline.training.checkpoint.index import Index
from paceline.training.checkpoint.integrity import find_last_complete
from paceline.training.checkpoint.load import check_same_model, load_
from paceline.training.checkpoint.retention import quarantine, read_best_score
from paceline.training.checkpoint.state import rank_prefix
from paceline.training.guard.checkpoint_digest import can_digest, digest_weights, find_difference
from paceline.training.optimization.plateau import PlateauState, plateau_metric
from paceline.training.prepared import PreparedTraining, RankContext
from paceline.training.stop_policy import StopState, get_metric


@dataclass(frozen=True)
class ResumedState:
    """Where a training continues."""

    step: int = 0  # 0 if there was no checkpoint
    best: float | None = None  # score of the best checkpoint, lower being better
    notes: tuple[str, ...] = ()
    evaluated: bool = True  # whether the checkpoint has the metrics of an evaluation
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the checkpoint's step
    stop: StopState | None = None  # of the evaluations before
    plateau: PlateauState | None = None  # of the schedule plateau


def resume(context: RankContext, prepared: PreparedTraining, order: Order) -> ResumedState:
    """Load the last complete checkpoint of the run, if there is one. A collective.

    order: of the training samples. Raises CheckpointError if the checkpoint is of another training.
    """
    spec, world, run = context.spec, context.world, context.run
    if run is None:
        return ResumedState()
    path, index, notes = find_last_complete(run, world.rank, world.size)
    if world.rank == 0:
        quarantine(run, index.step if index is not None else 0)
    if path is None or index is None:
        return ResumedState(notes=tuple(notes))
    check_same_model(path, index, spec.task, spec.set, prepared.model)
    for name, then, now in (
        ("batch", *_describe_batches(spec, index)),
        ("seed", index.seed, spec.seed),
        ("training samples", index.epoch_samples, order.epoch_samples),
        ("order of samples", index.order, order.describe(index.samples)),
    ):
        if then != now:
            raise CheckpointError(
                f"{path} was made with {name} {then}, got {now}; the order of samples depends on it: "
                "start a new run"
            )
    has_rank_state = prepared.local is not None and index.own and index.ranks == world.size
    prefix = rank_prefix(world.rank) if has_rank_state else ""
    operations = prepared.operations
    averages = operations.state() if operations is not None else {}
    if (
        not load_(path, prepared.model, prepared.optimizers, prefix, prepared.group, averages)
        and operations is not None
    ):
        operations.restart_averages()
        notes.append(f"{path} has no averages of all these weights, so they start from its weights")
    if index.own and not has_rank_state:
        notes.append(
            f"{path} is of local SGD on {index.ranks} ranks: this training continues from their mean, "
            "with the optimizer state of rank 0"
        )
    _check_digests(context, prepared, path, index)
    identity = describe_identity(spec, prepared.step.task, prepared.modules, prepared.optimizers)
    if changes := describe_changes(index.identity, identity):
        notes.append(f"this training differs from step {index.step} on: {'; '.join(changes)}")
    scale = prepared.update.loss_scale
    if scale is not None and index.loss_scale is not None:
        scale.scale, scale.good_steps = index.loss_scale["scale"], int(index.loss_scale["good_steps"])
    metric = get_metric(spec)[1]
    if spec.stop.patience is not None and (index.stop is None or index.stop.metric != metric):
        notes.append(
            f"stop.patience counts evaluations from step {index.step} on: {path} has no count for {metric}"
        )
    plateau = index.plateau if spec.schedule.name == "plateau" else None
    if spec.schedule.name == "plateau" and (plateau is None or plateau.metric != plateau_metric(spec)):
        plateau = None
        notes.append(
            f"schedule plateau starts at step {index.step}: {path} has no evaluations of "
            f"{plateau_metric(spec)}"
        )
    best = read_best_score(run, spec.save.best)
    return ResumedState(
        index.step, best, tuple(notes), bool(index.metrics), index.metrics, index.stop, plateau
    )


def _check_digests(context: RankContext, prepared: PreparedTraining, path: Path, index: Index) -> None:
    """Raise CorruptionError if the loaded weights are not those that the training had. A collective."""
    if not index.digests or not can_digest(context.plan):
        return
    loaded = digest_weights(
        prepared.model, context.plan, context.world.rank, context.device, prepared.saved_elsewhere
    )
    if (name := find_difference(index.digests, loaded)) is not None:
        raise CorruptionError(
            f"{path} holds other bits of {name} than the training had at step {index.step}, though its files "
            f"are as they were written: memory was corrupted while it was written or read; resume once more, "
            f"and if this repeats, move {path} away, so that an earlier checkpoint is used"
        )


def _describe_batches(spec: Spec, index: Index) -> tuple[object, object]:
    """Return what must be equal: the batch so far, or the samples so far if the batch changes."""
    if spec.batches.is_constant and index.samples % index.step == 0:
        return index.samples // index.step, spec.batch
    samples = spec.batches.samples_before(index.step)
    return f"{index.samples:,} samples in {index.step} steps", f"{samples:,} samples in {index.step} steps"
