"""paceline plan: predict which plans fit, how long a step takes, and what a training costs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.options.plan_options import (
    Batch,
    Clusters,
    Co2,
    ComputeOptimal,
    Currency,
    Instances,
    InterruptedEvery,
    Lora,
    Model,
    Peak,
    Plot,
    Precision,
    Price,
    SaveTime,
    Seq,
    Set,
    System,
    Target,
    Tokens,
)
from paceline.cli.options.request_options import Json
from paceline.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.cli.options.plan_options import PlanQuery, Priced
    from paceline.plan.search.best_plans import BestPlans
    from paceline.plan.search.constraints import Constraint
    from paceline.short_runs.best_plans import MeasuredPlans


def plan(
    target: Target = None,
    model: Model = None,
    cluster: Clusters = None,
    ranks: Annotated[int | None, Option(help="Number of ranks [default: all devices of the cluster]")] = None,
    batch: Batch = None,
    seq: Seq = None,
    plan: Annotated[
        str | None, Option(help="Predict only this plan, as for train [default: all possible plans]")
    ] = None,
    where: Annotated[
        str | None,
        Option(
            metavar="CONSTRAINTS",
            help="Search only plans with these properties, such as 'pp<=4,tp<=8,recompute!=full'.",
        ),
    ] = None,
    search_time: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            help="End the search after this time with the best plans so far [default: price all plans]",
        ),
    ] = None,
    set: Set = None,
    precision: Precision = None,
    lora: Lora = None,
    system: System = None,
    peak: Peak = None,
    tokens: Tokens = None,
    price: Price = None,
    currency: Currency = None,
    instance: Instances = None,
    interrupted_every: InterruptedEvery = None,
    save_time: SaveTime = None,
    co2: Co2 = None,
    compute_optimal: ComputeOptimal = False,
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
        int | None,
        Option(
            metavar="PLANS",
            help="Train the task shortly under this many of the best plans, on ranks of this machine; choose "
            "the fastest, and calibrate predictions.",
        ),
    ] = None,
    measure_compute: Annotated[
        bool,
        Option(
            "--measure-compute", help="Run steps of the task in this process to measure its computing time."
        ),
    ] = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Predict step time, memory and cost of plans, the fastest first.

    Nothing is run, except with --measure and --measure-compute.
    """
    from paceline.cli.options.plan_options import (
        check_outputs,
        check_positive,
        print_parts,
        read_prices,
        read_query,
    )

    check_positive(
        ranks=ranks,
        top=top,
        measure=measure,
        tokens=tokens,
        price=price,
        peak=peak,
        achieved=achieved,
        co2=co2,
    )
    check_positive(
        **{"interrupted-every": interrupted_every, "save-time": save_time, "search-time": search_time}
    )
    check_outputs(json, plot)
    if tokens is None:
        of_a_length = {"--interrupted-every": interrupted_every, "--co2": co2, "--achieved": achieved}
        _require_length(of_a_length | {"--compute-optimal": compute_optimal or None})
    if save_time is not None and interrupted_every is None:
        raise SpecError("--save-time requires --interrupted-every")
    machines = read_prices(instance or [], cluster or [], price, ranks, currency)
    if len(machines) > 1:
        _refuse(
            f"{len(machines)} machines are compared",
            {"--explain": explain, "--plot": plot, "--achieved": achieved}
            | {"--measure": measure, "--measure-compute": measure_compute},
        )
    if achieved is not None:
        unused: dict[str, object] = {
            "--system": system,
            "--plan": plan,
            "--explain": explain,
            "--plot": plot,
            "--json": json,
            "--where": where,
            "--search-time": search_time,
            "--peak": peak,
            "--measure": measure,
            "--measure-compute": measure_compute,
            "--interrupted-every": interrupted_every,
            "--co2": co2,
        }
        _refuse("--achieved estimates from a rate that you know", unused)
        _check_rate(achieved, machines[0].cluster)
        query = read_query(target, model, batch or 1, seq, precision, set, lora=lora)
        notes = _compare_allocation(query, tokens) if compute_optimal else []
        print_parts(*_estimate(query, achieved, tokens, ranks, machines[0]), *notes)
        return

    from paceline.cli.options.plan_inputs import list_clusters
    from paceline.plan.search.best_plans import find_best_plans
    from paceline.plan.search.constraints import parse_constraints

    constraints = parse_constraints(where) if where is not None else ()
    measured = None
    if measure is not None:
        _refuse("--measure trains under the best plans", {"--plan": plan, "--peak": peak})
        measured = _measure(target, measure, ranks, machines[0].cluster, batch, precision, set, constraints)
    clusters = list_clusters(machines, peak)
    measured_on = clusters[0] if measure_compute else None
    query = read_query(target, model, batch, seq, precision, set, measured_on, lora, system)
    results = []
    for priced, cluster_facts in zip(machines, clusters, strict=True):
        found = find_best_plans(
            query.facts,
            cluster_facts,
            query.batch,
            plan,
            query.recipe,
            ranks,
            tokens,
            priced.price,
            others=explain or plot is not None,
            where=constraints,
            search_s=search_time,
        )
        found = _keep_trainable(found if measured is None else measured.rank(found), query, top)
        results.append(found.with_costs(priced.currency, co2, interrupted_every, save_time))
    notes = _compare_allocation(query, tokens) if compute_optimal else []
    _show(results, top, target, explain, json, plot, measured)
    print_parts(*notes)


def _require_length(options: Mapping[str, object]) -> None:
    """Raise SpecError for the first of these options that is given, without the length of the training."""
    if given := next((name for name, value in options.items() if value is not None), None):
        raise SpecError(f"{given} requires the length of the training; add --tokens")


def _keep_trainable(found: "BestPlans", query: "PlanQuery", top: int) -> "BestPlans":
    """Return the plans without those that train refuses, if a task is planned."""
    if query.spec is None or query.task is None:
        return found
    from paceline.training.planning.auto_plan import drop_refused

    return drop_refused(found, query.spec, query.task, top)


def _refuse(reason: str, options: Mapping[str, object]) -> None:
    """Raise SpecError for the first of these options that is given."""
    if given := next((name for name, value in options.items() if value not in (None, False)), None):
        raise SpecError(f"{reason}; leave {given} out")


def _show(
    results: "list[BestPlans]",
    top: int,
    target: str | None,
    explain: bool,
    json: "Path | None",
    plot: "Path | None",
    measured: "MeasuredPlans | None",
) -> None:
    """Print the plans of one machine, or the best plan of each of several; write JSON and picture."""
    from json import dumps

    from paceline.cli.options.plan_options import print_parts
    from paceline.files import write_whole
    from paceline.plan.report.plan import (
        as_tree,
        build_tables,
        compare_clusters,
        describe_measured,
        describe_overlap,
        heading,
        list_cluster_notes,
        list_notes,
    )
    from paceline.plan.search.measured_plans import count_maybe_faster
    from paceline.plan.search.ranking import find_indistinct_plans

    if len(results) > 1:
        if json is not None:
            trees = [as_tree(result, top, find_indistinct_plans(result, target)) for result in results]
            write_whole(json, dumps({"clusters": trees}, indent=1) + "\n")
        print_parts(compare_clusters(results), *list_cluster_notes(results))
        return
    [result] = results
    indistinct = None if measured is not None else find_indistinct_plans(result, target)
    if json is not None:
        tree = as_tree(result, top, indistinct) | ({"measured": measured.as_tree()} if measured else {})
        write_whole(json, dumps(tree, indent=1) + "\n")
    if plot is not None:
        from paceline.plan.report.bars import draw

        draw(result, top, plot)
    print_parts(
        heading(result),
        *build_tables(result, top, explain),
        *list_notes(result),
        *([describe_overlap(result, indistinct)] if indistinct else []),
        *([describe_measured(result, count_maybe_faster(result))] if measured is not None else []),
    )


def _measure(
    target: str | None,
    count: int,
    ranks: int | None,
    cluster: str | None,
    batch: int | None,
    precision: str | None,
    set: list[str] | None,
    where: "Sequence[Constraint]",
) -> "MeasuredPlans":
    """Train shortly under the best plans, print what was measured, and return it."""
    if target is None:
        raise SpecError("--measure requires a task to train, and --model is not one; name a task")
    from paceline.cli.options.short_runs import measure_best_plans, read_short_request

    request = read_short_request(target, batch, precision, set or [], cluster)
    return measure_best_plans(request, ranks or request.cluster.devices, count, cluster, where)


def _check_rate(achieved: float, cluster: str | None) -> None:
    """Raise SpecError if the devices of the named cluster cannot compute `achieved` TFLOP/s."""
    from paceline.cli.options.plan_inputs import find_cluster

    if cluster is None:
        return
    device = find_cluster(cluster).device
    peak = max((fact.value for fact in device.peaks_flops.values()), default=None)
    if peak is not None and achieved * 1e12 > peak:
        raise SpecError(
            f"--achieved {achieved:g} is more than the peak of {device.name}, {peak / 1e12:g} TFLOP/s; give "
            "what a training reaches, usually a third to a half of it"
        )


def _estimate(
    query: "PlanQuery", achieved: float, tokens: float | None, ranks: int | None, priced: "Priced"
) -> list[str]:
    """Return a training on the back of an envelope, as lines."""
    from paceline.plan.cost_model.cost import estimate_training

    assert tokens is not None
    params, frozen = query.facts.active_params, query.facts.frozen_params
    found = estimate_training(params, tokens, achieved * 1e12, priced.price, frozen)
    years = found.device_years
    billed = f"{found.billed_years:,.{0 if years >= 100 else 2}f}"
    duration = f"{billed} years" if years >= 1 else f"{365 * years:,.2f} days"
    kind = "active parameters" if params < query.facts.params else "parameters"
    factors = f"6 × {params:.4g} {kind}"
    if frozen:
        factors = f"(6 × {params - frozen:.4g} trained + 4 × {frozen:.4g} frozen {kind})"
    lines = [
        f"{factors} × {tokens:.4g} tokens = {found.flops:.3g} FLOP; at {achieved:g} TFLOP/s: {duration} of "
        f"one device"
    ]
    if ranks is not None:
        lines.append(f"on {ranks:,} devices: {365 * years / ranks:,.2f} days")
    if found.price is not None:
        term = f"{billed} × 365 × 24 h" if years >= 1 else f"{8760 * years:,.2f} h"
        lines.append(f"{term} × {priced.price:g} {priced.currency} = {found.price:,.0f} {priced.currency}")
    return lines


def _compare_allocation(query: "PlanQuery", tokens: float | None) -> list[str]:
    """Return a sentence about the compute-optimal training with the same FLOPs."""
    from paceline.plan.compute_optimal import describe_allocation

    assert tokens is not None
    facts = query.facts
    if facts.tokens == 1 or not facts.vocab or facts.frozen_params:
        raise SpecError(
            f"--compute-optimal knows language models that are trained whole; {facts.name} is not one"
        )
    return [describe_allocation(facts.active_params, tokens)]
