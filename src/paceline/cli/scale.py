"""paceline scale: predict step times for several numbers of ranks."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.plan_options import (
    Batch,
    ClusterName,
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
from paceline.cli.request_options import Json
from paceline.errors import SpecError

if TYPE_CHECKING:
    from paceline.plan.model.facts import ModelFacts


def scale(
    target: Target = None,
    ranks: Annotated[
        str | None,
        Option(
            metavar="1,2,4,…,64", help="Numbers of ranks, required; 1:64 stands for the same powers of two."
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
    instance: InstanceName = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Predict how the step time scales with the number of ranks. Nothing is run.

    Shows the best plan of each number, for strong scaling (a fixed global batch) and weak scaling (a fixed
    batch per rank).
    """
    from paceline.cli.plan_inputs import find_cluster, with_peak
    from paceline.cli.plan_options import (
        check_outputs,
        check_positive,
        print_parts,
        read_price,
        read_query,
    )
    from paceline.plan.search.rank_counts import HINT, parse_counts

    check_positive(tokens=tokens, price=price, peak=peak, epochs=epochs, steps=steps)
    check_outputs(json, plot)
    if not 0 < efficiency <= 1:
        raise SpecError(f"--efficiency must be above 0 and at most 1, got {efficiency:g}")
    if ranks is None:
        raise SpecError(f"scale requires numbers of ranks; add --ranks: {HINT}")
    if target is None and (epochs or steps):
        raise SpecError("--epochs and --steps require a task, got --model; use --tokens")
    counts = parse_counts(ranks)
    cluster, price, _ = read_price(instance, cluster, price, max(counts))
    query = read_query(target, model, batch, seq, precision, set, lora=lora, system=system)
    if target is not None and tokens is None:
        tokens = _count_tokens(target, query.batch, epochs, steps, set or [], query.facts)

    from paceline.plan.report.scale import as_json, build_tables, heading, list_findings
    from paceline.plan.search.scaling import predict_scaling

    result = predict_scaling(
        query.facts, with_peak(find_cluster(cluster), peak), counts, query.batch, query.recipe, tokens, price
    )
    if json is not None:
        from paceline.files import write_whole

        write_whole(json, as_json(result, efficiency))
    if plot is not None:
        from paceline.plan.report.curves import draw

        draw(result, efficiency, plot)
    print_parts(heading(result), *build_tables(result), *list_findings(result, efficiency))


def _count_tokens(
    target: str, batch: int, epochs: float | None, steps: int | None, set: list[str], facts: "ModelFacts"
) -> float:
    """Return the tokens of the whole training of a task."""
    from paceline.cli.launching import read_request
    from paceline.data.loader import open_dataset
    from paceline.task import load_task

    spec, _ = read_request(target, {"batch": batch, "epochs": epochs, "steps": steps}, set)
    dataset = open_dataset(load_task(spec.task, spec.set), "train")
    assert dataset is not None
    return float(spec.total_steps(len(dataset)) * batch * facts.tokens)
