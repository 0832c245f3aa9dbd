"""paceline plan: predict which plans fit, how long a step takes, and what a training costs."""

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

if TYPE_CHECKING:
    from paceline.cli.plan_options import PlanQuery


def plan(
    target: Target = None,
    model: Model = None,
    cluster: ClusterName = None,
    ranks: Annotated[int | None, Option(help="Number of ranks [default: all devices of the cluster]")] = None,
    batch: Batch = None,
    seq: Seq = None,
    plan: Annotated[
        str | None, Option(help="Predict only this plan, as for train [default: all possible plans]")
    ] = None,
    set: Set = None,
    precision: Precision = None,
    lora: Lora = None,
    system: System = None,
    peak: Peak = None,
    tokens: Tokens = None,
    price: Price = None,
    instance: InstanceName = None,
    achieved: Annotated[
        float | None,
        Option(
            metavar="TFLOP/S",
            help="Only estimate the training, from the rate that a device achieves: years of one device.",
        ),
    ] = None,
    top: Annotated[int, Option(help="Number of plans to show.")] = 10,
    explain: Annotated[
        bool,
        Option(
            "--explain",
            help="Show each part of time and memory of the first plan, and why the next is slower.",
        ),
    ] = False,
    measure: Annotated[
        bool, Option("--measure", help="Run steps of the task in this process to measure its computing time.")
    ] = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Predict step time, memory and cost of plans, the fastest first.

    Nothing is run, except with --measure.
    """
    from paceline.cli.plan_inputs import find_cluster, with_peak
    from paceline.cli.plan_options import (
        check_outputs,
        check_positive,
        print_parts,
        read_price,
        read_query,
    )

    check_positive(ranks=ranks, top=top, tokens=tokens, price=price, peak=peak, achieved=achieved)
    check_outputs(json, plot)
    cluster, price = read_price(instance, cluster, price, ranks)
    if achieved is not None:
        _estimate(read_query(target, model, batch or 1, seq, precision, set), achieved, tokens, ranks, price)
        return
    machine = with_peak(find_cluster(cluster), peak)
    query = read_query(target, model, batch, seq, precision, set, machine if measure else None, lora, system)

    from paceline.plan.report.plan import as_json, build_tables, describe_overlap, heading, list_notes
    from paceline.plan.search.best_plans import find_best_plans
    from paceline.plan.search.ranking import find_indistinct_plans

    result = find_best_plans(
        query.facts,
        machine,
        query.batch,
        plan,
        query.recipe,
        ranks,
        tokens,
        price,
        others=explain or plot is not None,
    )
    indistinct = find_indistinct_plans(result, target)
    if json is not None:
        from paceline.files import write_whole

        write_whole(json, as_json(result, top, indistinct))
    if plot is not None:
        from paceline.plan.report.bars import draw

        draw(result, top, plot)
    print_parts(
        heading(result),
        *build_tables(result, top, explain),
        *list_notes(result),
        *([describe_overlap(result, indistinct)] if indistinct else []),
    )


def _estimate(
    query: "PlanQuery", achieved: float, tokens: float | None, ranks: int | None, price: float | None
) -> None:
    """Print a training on the back of an envelope."""
    from paceline.cli.plan_options import print_parts
    from paceline.errors import SpecError
    from paceline.plan.cost_model.cost import estimate_training

    if tokens is None:
        raise SpecError("--achieved requires the length of the training; add --tokens")
    params = query.facts.params
    found = estimate_training(params, tokens, achieved * 1e12, price)
    years = found.device_years
    duration = f"{int(years):,} years" if years >= 1 else f"{365 * years:,.2f} days"
    lines = [
        f"6 × {params:.4g} parameters × {tokens:.4g} tokens = {found.flops:.3g} FLOP; at {achieved:g} "
        f"TFLOP/s: {duration} of one device"
    ]
    if ranks is not None:
        lines.append(f"on {ranks:,} devices: {365 * years / ranks:,.2f} days")
    if found.price is not None:
        term = f"{int(years):,} × 365 × 24 h" if years >= 1 else f"{8760 * years:,.2f} h"
        lines.append(f"{term} × {price:g} = {found.price:,.0f}")
    print_parts(*lines)
