"""paceline plan: which plans fit, how long a step takes, and what a training costs."""

from typing import Annotated

from typer import Option

from paceline.cli.plan_options import (
    Batch,
    Json,
    Model,
    Peak,
    Plot,
    Precision,
    Price,
    Seq,
    Set,
    Target,
    Tokens,
    Where,
)


def plan(
    target: Target = None,
    model: Model = None,
    cluster: Where = None,
    ranks: Annotated[int | None, Option(help="Ranks, if not all devices.")] = None,
    batch: Batch = None,
    seq: Seq = None,
    plan: Annotated[
        str | None, Option(help="Price this one, as for train; else all that there could be.")
    ] = None,
    set: Set = None,
    precision: Precision = None,
    peak: Peak = None,
    tokens: Tokens = None,
    price: Price = None,
    top: Annotated[int, Option(help="Plans to show.")] = 10,
    explain: Annotated[
        bool, Option("--explain", help="Each part of time and memory of the first, and what the next lacks.")
    ] = False,
    measure: Annotated[
        bool, Option("--measure", help="Run the task: real steps on this process say how long it computes.")
    ] = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Predict step time, memory and cost of plans, the fastest that fits first. Nothing is run, but with --measure."""
    from paceline.cli.plan_inputs import cluster_of, with_peak
    from paceline.cli.plan_options import asked, check_above_zero, check_outputs, show

    check_above_zero(ranks=ranks, top=top, tokens=tokens, price=price, peak=peak)
    check_outputs(json, plot)
    where = with_peak(cluster_of(cluster), peak)
    what = asked(target, model, batch, seq, precision, set, where if measure else None)

    from paceline.plan.report.plan import as_json, heading, reasons, tables, without_order
    from paceline.plan.search.best_plans import answer
    from paceline.plan.search.ranking import unranked

    found = answer(
        what.facts,
        where,
        what.batch,
        plan,
        what.recipe,
        ranks,
        tokens,
        price,
        others=explain or plot is not None,
    )
    close = unranked(found, target)
    if json is not None:
        from paceline.files import write_whole

        write_whole(json, as_json(found, top, close))
    if plot is not None:
        from paceline.plan.report.bars import draw

        draw(found, top, plot)
    show(
        heading(found),
        *tables(found, top, explain),
        *reasons(found),
        *([without_order(found, close)] if close else []),
    )
