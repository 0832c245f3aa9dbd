"""paceline plan: predict which plans fit, how long a step takes, and what a training costs."""

from typing import Annotated

from typer import Option

from paceline.cli.plan_options import (
    Batch,
    ClusterName,
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
    from paceline.cli.plan_options import check_outputs, check_positive, print_parts, read_query

    check_positive(ranks=ranks, top=top, tokens=tokens, price=price, peak=peak)
    check_outputs(json, plot)
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
