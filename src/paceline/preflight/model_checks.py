"""Checks that the training can be built: task, model, data and plan.

Reads the samples at both ends of the data, and builds the plan on ranks that one process simulates.
"""

from paceline.cluster.directories import list_mounts
from paceline.errors import DataError, TaskError
from paceline.plan.plan import ResolvedPlan, micro_batch_size
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Results
from paceline.preflight.source_text import describe_source
from paceline.units import format_bytes, format_count, several


def check_ranks(context: PreflightContext) -> Results:
    job = context.job
    nodes = f"{job.nodes} nodes, {job.ranks_per_node} on each" if job.nodes > 1 else "one node"
    yield "passes", f"{several(job.ranks, 'rank')} on {nodes}"


def check_task(context: PreflightContext) -> Results:
    """Build the model on the meta device."""
    from paceline.training.model_facts.model_analysis import build_meta_model

    model = build_meta_model(context.spec, context.task).model
    parameters = format_count(sum(parameter.numel() for parameter in model.parameters()))
    modules = len(list(model.modules()))
    yield (
        "passes",
        f"{type(context.task).__name__} builds a model of {parameters} parameters in {modules} modules",
    )


def check_weights(context: PreflightContext) -> Results:
    """Compare initial weights with those of a plain construction."""
    from paceline.training.checks.initial_weights import check_initial_weights
    from paceline.training.model_facts.model_analysis import build_meta_model

    built = build_meta_model(context.spec, context.task)
    for note in (notes := check_initial_weights(context.spec, context.task, built.model, built.weights)):
        yield "warns", note
    if not notes:
        yield "passes", "initial weights agree with those of a plain construction of the model"


def check_data(context: PreflightContext) -> Results:
    """Read the first and the last sample of each split as a training does."""
    from paceline.batch import find_tensors
    from paceline.data.cache.sizes import find_source_sizes
    from paceline.data.samples import FailedSample

    mounts = list_mounts()
    for samples in (context.data.training, context.data.validation, *context.data.others):
        if samples is None:
            continue
        count, ends, read_bytes = samples.count, sorted({0, samples.count - 1}), 0
        for index in ends:
            batch = samples[([index], [index])]
            if isinstance(batch, FailedSample):
                raise DataError(batch.message)
            read_bytes += sum(tensor.nbytes for tensor in find_tensors(batch))
        size = f"; as tensors, all have about {format_bytes(read_bytes / len(ends) * count)}"
        yield (
            "passes",
            f"{count:,} samples of {samples.split!r}; the first and the last can be read"
            + (size if read_bytes else ""),
        )
        for source in find_source_sizes(samples.dataset):
            yield "passes", f"{samples.split!r} is {describe_source(source, mounts)}"


def check_plan(context: PreflightContext) -> Results:
    """Check that the plan divides ranks and batch."""
    plan, per_rank = context.resolved_plan, micro_batch_size(context.spec.batch, context.resolved_plan)
    rank = "data rank" if plan.splits_model or plan.cp > 1 else "rank"
    yield (
        "passes",
        f"{context.plan} on {several(context.job.ranks, 'rank')}: {_format_axes(plan)}; "
        f"{several(per_rank, 'sample')} at once on a {rank}",
    )


def check_build(context: PreflightContext) -> Results:
    """Build the first rank of each stage and the last rank on a process group that does not communicate."""
    from paceline.parallel.compile import check_compilable
    from paceline.training.dry_run.dry_run import VALUE_ERRORS, compute_comm_volume, compute_stage_volumes
    from paceline.training.model_facts.model_analysis import validate_plan
    from paceline.training.training_data import check_sample_count

    spec, plan, count = context.spec, context.resolved_plan, context.job.ranks
    for note in check_sample_count(context.data.samples, plan, spec.batch):
        yield "warns", note
    if spec.compile:
        check_compilable(plan)
    if plan.is_asynchronous or (plan.pp > 1 and plan.cp > 1):
        validate_plan(spec, plan, context.task)
        yield (
            "warns",
            f"plan {context.plan} cannot be built without its ranks; paceline verify tries it on real ranks",
        )
        return
    try:
        volumes = compute_stage_volumes(spec, context.plan, count, context.task)
        if count > 1:
            volumes.append(compute_comm_volume(spec, context.plan, count, count - 1, context.task))
    except TaskError as error:
        if not isinstance(error.__cause__, VALUE_ERRORS):
            raise
        yield "warns", f"not built: {error}"
        return
    largest = max(volumes, key=lambda volume: sum(entry.sent_bytes for entry in volume.entries))
    sent = sum(entry.sent_bytes for entry in largest.entries)
    calls = sum(entry.calls for entry in largest.entries)
    ranks = ", ".join(f"{volume.rank:,}" for volume in volumes)
    yield (
        "passes",
        f"built and simulated a step of rank{'s' * (count > 1)} {ranks}: "
        f"it sends {format_bytes(sent)} in {calls:,} calls",
    )


def _format_axes(plan: ResolvedPlan) -> str:
    degrees = [
        f"{name}={getattr(plan, name)}"
        for name in ("dp", "cp", "tp", "pp")
        if getattr(plan, name) != 1 or name == "dp"
    ]
    return " × ".join(degrees) + (f", microbatches={plan.microbatches}" if plan.microbatches != 1 else "")
