"""paceline scale: predict or measure step times for several numbers of ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli.options.plan_options import (
    Batch,
    ClusterName,
    Currency,
    InstanceName,
    Lora,
    Model,
    Peak,
    Plot,
    Precision,
    Price,
    Seq,
    Set,
    System,
    Target,
    Tokens,
)
from paceline.cli.options.request_options import Json
from paceline.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.launch.slurm.queue import QueueEstimate
    from paceline.plan.model.facts import ModelFacts
    from paceline.plan.search.scaling import Scaling, ScalingPoint, TrainableFilter
    from paceline.spec import Spec
    from paceline.task import Task


def scale(
    target: Target = None,
    ranks: Annotated[
        str | None,
        Option(
            metavar="1,2,4,…,64",
            help="Numbers of ranks to predict; 1:64 stands for the same powers of two. Required without "
            "--measure.",
        ),
    ] = None,
    measure: Annotated[
        str | None,
        Option(
            metavar="1,2,4,8",
            help="Train the task shortly on these numbers of ranks, and calibrate later predictions.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        Option(help="With --measure: plan of all numbers of ranks [default: of each, the fastest predicted]"),
    ] = None,
    launcher: Annotated[
        str | None,
        Option(
            help="With --measure: local, slurm (in an allocation, or else as jobs) or ray [default: local]"
        ),
    ] = None,
    model: Model = None,
    cluster: ClusterName = None,
    batch: Batch = None,
    seq: Seq = None,
    set: Set = None,
    precision: Precision = None,
    lora: Lora = None,
    system: System = None,
    peak: Peak = None,
    efficiency: Annotated[
        float,
        Option(
            help="Least efficiency per rank, relative to the fewest ranks, at which more ranks are "
            "recommended."
        ),
    ] = 0.8,
    tokens: Tokens = None,
    epochs: Annotated[
        float | None, Option(help="Length of the training of a task in epochs [default: that of its request]")
    ] = None,
    steps: Annotated[
        int | None, Option(help="Length of the training of a task in steps, instead of --epochs.")
    ] = None,
    price: Price = None,
    currency: Currency = None,
    instance: InstanceName = None,
    queue: Annotated[
        bool | None,
        Option(
            "--queue/--no-queue",
            help="Ask Slurm when a job of each size would start, and show when it would finish "
            "[default: if sbatch exists, the length is known, and --cluster is not given]",
        ),
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Predict how the step time scales with the number of ranks. With --measure, also measure it.

    Shows the best plan of each number, for strong scaling (a fixed global batch) and weak scaling (a fixed
    batch per rank).
    """
    from paceline.cli.options.plan_inputs import find_cluster, with_peak
    from paceline.cli.options.plan_options import (
        check_outputs,
        check_positive,
        read_price,
        read_query,
    )
    from paceline.plan.search.rank_counts import HINT, parse_counts

    check_positive(tokens=tokens, price=price, peak=peak, epochs=epochs, steps=steps)
    check_outputs(json, plot)
    if not 0 < efficiency <= 1:
        raise SpecError(f"--efficiency must be above 0 and at most 1, got {efficiency:g}")
    if ranks is None and measure is None:
        raise SpecError(f"scale requires numbers of ranks; add --ranks: {HINT}")
    if measure is None and (option := "--plan" if plan else "--launcher" if launcher else None):
        raise SpecError(f"{option} requires --measure, which trains")
    counts = parse_counts(ranks) if ranks is not None else ()
    measured = None
    if measure is not None:
        if ranks is None:
            _refuse_predictions(
                {"--plot": plot, "--tokens": tokens, "--epochs": epochs, "--steps": steps, "--price": price}
                | {"--currency": currency, "--instance": instance, "--peak": peak, "--queue": queue}
            )
        measured = _measure(target, measure, plan, launcher, cluster, batch, precision, set or [], efficiency)
    if ranks is None:
        if json is not None:
            _write_json(json, {"measured": measured})
        return
    if target is None and (epochs or steps):
        raise SpecError("--epochs and --steps require a task, got --model; use --tokens")
    cluster, price, unit, _ = read_price(instance, cluster, price, max(counts), currency)
    query = read_query(target, model, batch, seq, precision, set, lora=lora, system=system)
    if target is not None and tokens is None:
        tokens = _count_tokens(target, query.batch, epochs, steps, set or [], query.facts)

    from paceline.plan.search.scaling import predict_scaling

    result = predict_scaling(
        query.facts,
        with_peak(find_cluster(cluster), peak),
        counts,
        query.batch,
        query.recipe,
        tokens,
        price,
        _make_filter(query.spec, query.task) if query.spec is not None and query.task is not None else None,
        unit,
    )
    estimates = _ask_queue(result.strong.points, queue, is_here=cluster is None)
    _show(result, estimates, measured, efficiency, json, plot)


def _refuse_predictions(options: "Mapping[str, object]") -> None:
    """Raise SpecError for the first of these options of predictions that is given."""
    if given := next((name for name, value in options.items() if value), None):
        raise SpecError(f"{given} is for predictions, and --measure alone makes none; add --ranks")


def _show(
    result: "Scaling",
    estimates: "list[QueueEstimate]",
    measured: dict[str, Any] | None,
    efficiency: float,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Print the predictions, and write JSON and picture."""
    from paceline.cli.options.plan_options import print_parts
    from paceline.launch.slurm.queue import build_queue_parts, queue_as_tree
    from paceline.plan.report.scale import as_tree, build_tables, heading, list_findings

    if json is not None:
        tree = as_tree(result, efficiency) | ({"measured": measured} if measured else {})
        _write_json(json, tree | ({"queue": queue_as_tree(estimates)} if estimates else {}))
    if plot is not None:
        from paceline.plan.report.curves import draw

        draw(result, efficiency, plot)
    print_parts(heading(result), *build_tables(result), *list_findings(result, efficiency))
    if estimates:
        print_parts(*build_queue_parts(estimates))


def _measure(
    target: str | None,
    counts: str,
    plan: str | None,
    launcher: str | None,
    cluster: str | None,
    batch: int | None,
    precision: str | None,
    set: list[str],
    efficiency: float,
) -> dict[str, Any]:
    """Train shortly, print what was measured, and return it as JSON."""
    if target is None:
        raise SpecError("--measure requires a task to train, and --model is not one; name a task")
    from paceline.cli.options.short_runs import measure_counts, read_short_request
    from paceline.short_runs.report import as_tree

    request = read_short_request(target, batch, precision, set, cluster, launcher)
    return as_tree(measure_counts(request, counts, plan, cluster, efficiency), efficiency)


def _ask_queue(points: "Sequence[ScalingPoint]", queue: bool | None, is_here: bool) -> "list[QueueEstimate]":
    """Return when the trainings would finish in Slurm's queue; nothing if it is not to be asked.

    queue: None: ask if that is possible. Raises LaunchError and SpecError if it is required and fails.
    """
    import shutil
    import sys

    from paceline.errors import LaunchError

    has_length = points[0].bill is not None
    if queue and not has_length:
        raise SpecError("--queue requires the length of the training; add --tokens")
    if queue is False or (queue is None and not (is_here and has_length and shutil.which("sbatch"))):
        return []
    from paceline.launch.slurm.queue import estimate_queue
    from paceline.launch.slurm.site import read_site

    try:
        return estimate_queue(points, read_site(None))
    except LaunchError as error:
        if queue:
            raise
        print(f"paceline: warning: Slurm was not asked when jobs would start: {error}", file=sys.stderr)
        return []


def _make_filter(spec: "Spec", task: "Task") -> "TrainableFilter":
    """Return the filter of plans that train accepts for a task."""
    from paceline.training.planning.auto_plan import find_trainable

    return lambda plans, ranks, batch: find_trainable(
        plans, spec.model_copy(update={"batch": batch}), task, ranks, []
    )


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    from json import dumps

    from paceline.files import write_whole

    write_whole(path, dumps(tree, indent=1) + "\n")


def _count_tokens(
    target: str, batch: int, epochs: float | None, steps: int | None, set: list[str], facts: "ModelFacts"
) -> float:
    """Return the tokens of the whole training of a task."""
    from paceline.cli.options.launching import read_request
    from paceline.data.open_samples import open_dataset
    from paceline.task import load_task

    spec, _ = read_request(target, {"batch": batch, "epochs": epochs, "steps": steps}, set)
    dataset = open_dataset(load_task(spec.task, spec.set), "train")
    assert dataset is not None
    return float(spec.total_steps(len(dataset)) * batch * facts.tokens)
