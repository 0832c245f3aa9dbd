"""Whether the training can be built: the task and its model, samples at both ends of the data, the plan on ranks that one process plays."""

from paceline.errors import DataError, TaskError
from paceline.plan.plan import ResolvedPlan, micro_batch_size
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Says
from paceline.units import format_bytes, format_count, several


def ranks(flight: PreflightContext) -> Says:
    job = flight.job
    where = f"{job.nodes} nodes, {job.ranks_per_node} on each" if job.nodes > 1 else "one node"
    yield "passes", f"{several(job.ranks, 'rank')} on {where}"


def task(flight: PreflightContext) -> Says:
    """The model on the meta device."""
    from paceline.training.model_analysis import build_meta_model

    model = build_meta_model(flight.spec, flight.task).model
    parameters = format_count(sum(parameter.numel() for parameter in model.parameters()))
    yield (
        "passes",
        f"{type(flight.task).__name__} makes a model of {parameters} parameters in {len(list(model.modules()))} modules",
    )


def weights(flight: PreflightContext) -> Says:
    """Whether initial weights are those of a plain construction."""
    from paceline.training.initial_weights import check_initial_weights
    from paceline.training.model_analysis import build_meta_model

    built = build_meta_model(flight.spec, flight.task)
    for note in (notes := check_initial_weights(flight.spec, flight.task, built.model, built.weights)):
        yield "warns", note
    if not notes:
        yield "passes", "initial weights agree with those of a plain construction of the model"


def data(flight: PreflightContext) -> Says:
    """The first and the last sample of each split, read as a training would."""
    from paceline.data.loader import FailedSample

    for samples in (flight.data.training, flight.data.validation):
        if samples is None:
            continue
        count = samples.count
        for at in sorted({0, count - 1}):
            batch = samples[([at], [at])]
            if isinstance(batch, FailedSample):
                raise DataError(batch.message)
        yield "passes", f"{count:,} samples of {samples.split!r}; the first and the last can be read"


def plan(flight: PreflightContext) -> Says:
    """Whether it divides ranks and batch."""
    on, each = flight.on, micro_batch_size(flight.spec.batch, flight.on)
    rank = "data rank" if on.splits_model or on.cp > 1 else "rank"
    yield (
        "passes",
        f"{flight.plan} on {several(flight.job.ranks, 'rank')}: {_axes(on)}; {several(each, 'sample')} at once on a {rank}",
    )


def built(flight: PreflightContext) -> Says:
    """The first rank of each place of a pipeline, and the last of all, on a process group that talks to nobody."""
    from paceline.parallel.compile import check_compilable
    from paceline.training.dry_run.dry_run import (
        VALUE_ERRORS,
        compute_comm_volume,
        compute_stage_volumes,
    )
    from paceline.training.model_analysis import validate_plan
    from paceline.training.setup import check_sample_count

    spec, on, count = flight.spec, flight.on, flight.job.ranks
    for note in check_sample_count(flight.data.samples, on, spec.batch):
        yield "warns", note
    if spec.compile:
        check_compilable(on)
    if on.is_asynchronous or (on.pp > 1 and on.cp > 1):
        validate_plan(spec, on, flight.task)
        yield (
            "warns",
            f"plan {flight.plan} cannot be built without its ranks; on real ones paceline verify tries it",
        )
        return
    try:
        played = compute_stage_volumes(spec, flight.plan, count, flight.task)
        if count > 1:
            played.append(compute_comm_volume(spec, flight.plan, count, count - 1, flight.task))
    except TaskError as error:
        if not isinstance(error.__cause__, VALUE_ERRORS):
            raise
        yield "warns", f"not built: {error}"
        return
    most = max(played, key=lambda each: sum(entry.sent_bytes for entry in each.entries))
    sent, calls = (sum(getattr(entry, field) for entry in most.entries) for field in ("sent_bytes", "calls"))
    who = ", ".join(f"{each.rank:,}" for each in played)
    yield (
        "passes",
        f"a step of rank{'s' * (count > 1)} {who} was built and played: it sends {format_bytes(sent)} in {calls:,} calls",
    )


def _axes(on: ResolvedPlan) -> str:
    degrees = [
        f"{name}={getattr(on, name)}"
        for name in ("dp", "cp", "tp", "pp")
        if getattr(on, name) != 1 or name == "dp"
    ]
    return " × ".join(degrees) + (f", microbatches={on.microbatches}" if on.microbatches != 1 else "")
