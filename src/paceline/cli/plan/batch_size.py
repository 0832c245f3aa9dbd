"""paceline batch-size: find the batch from which a larger batch no longer pays."""

import json as json_file
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.options.plan_options import ClusterName, Currency, Plot, Price, Priced, read_price
from paceline.cli.options.request_options import Json, TrainingRequest, with_request_options
from paceline.errors import LaunchError, SpecError
from paceline.run import RUNS

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.batch_size.choose import Choice
    from paceline.batch_size.convergence import ConvergenceCurve
    from paceline.batch_size.result import BatchResult
    from paceline.batch_size.sweep import Sweep
    from paceline.plan.model.facts import ModelFacts

PANEL = "Comparison"
EVALUATIONS_PER_EPOCH = 4


@with_request_options
def batch_size(
    request: TrainingRequest,
    batches: Annotated[
        str, Option(help="Batches: 64:8192 doubles, 64,96,128 lists them.", rich_help_panel=PANEL)
    ] = "64:1024",
    until: Annotated[
        str | None,
        Option(
            help="Target: a metric of the evaluations and its value, such as 'accuracy>=0.97'.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    source: Annotated[
        Path | None,
        Option(
            "--from",
            metavar="RUN",
            help="Continue from the last checkpoint of this run with each batch [default: initial weights]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    tune: Annotated[
        bool,
        Option(
            "--tune",
            help="Try several factors on the scaled learning rate of each batch.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    evaluate_samples: Annotated[
        int | None,
        Option(
            help="Number of samples between evaluations [default: a quarter of an epoch, at least the "
            "largest batch]",
            min=1,
            rich_help_panel=PANEL,
        ),
    ] = None,
    cluster: ClusterName = None,
    most_ranks: Annotated[
        int | None,
        Option(
            help="Largest number of ranks to predict [default: devices of the cluster, at least --ranks]",
            min=1,
            rich_help_panel=PANEL,
        ),
    ] = None,
    price: Price = None,
    currency: Currency = None,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Find the batch from which a larger batch no longer pays.

    Trains the task with each batch until a metric reaches a target: from the same weights, with the same
    order of samples, and a learning rate that is scaled from --batch. Prints steps, samples and time, fits
    samples = Emin × (1 + batch / Bcrit), and predicts the batch, ranks and plan with the least time, energy
    or price. A comparison that was stopped continues if the command is repeated.

    Exit status: 0 some batch reached the target, 1 none did, 2 bad input.
    """
    import typer
    from rich.console import Console

    from paceline.batch_size.convergence import Measurement, fit_curve
    from paceline.batch_size.report import as_json, build_table, describe_choices, list_findings
    from paceline.cli.options.plan_options import check_outputs
    from paceline.files import write_whole

    check_outputs(json, plot)
    priced = read_price(None, cluster, price, None, currency)
    sweep, facts, samples = _prepare(request, batches, until, source, tune, evaluate_samples)
    sweep.open()
    console = Console(highlight=False, emoji=False)
    console.print(f"trainings  {sweep.folder}", markup=False)
    results = _train(sweep, console)
    reached = [result for result in results if result.samples]
    curve = fit_curve([Measurement(r.batch, r.samples or 0.0) for r in reached]) if reached else None
    console.print(build_table(results, curve))
    for line in list_findings(results, sweep.target, curve):
        console.print(line, markup=False, soft_wrap=True)
    best = _choose(sweep, facts, curve, results, priced, most_ranks) if curve is not None else {}
    for line in describe_choices(best, sweep.batches):
        console.print(line, markup=False, soft_wrap=True)
    _print_published(console, facts, samples)
    if json is not None:
        write_whole(json, json_file.dumps(as_json(results, sweep.target, curve, best), indent=1) + "\n")
    if plot is not None:
        from paceline.batch_size.picture import draw

        draw(results, sweep.target, curve, plot)
    raise typer.Exit(0 if reached else 1)


def _prepare(
    request: TrainingRequest,
    batches: str,
    until: str | None,
    source: Path | None,
    tune: bool,
    evaluate_samples: int | None,
) -> "tuple[Sweep, ModelFacts, int]":
    """Return the comparison, facts of the model, and the samples of an epoch."""
    from paceline import task as tasks
    from paceline.batch_size.sweep import Sweep
    from paceline.batch_size.target import parse_target
    from paceline.data.open_samples import open_training_samples
    from paceline.distributed.world import read_world
    from paceline.launch.check_launch import count_devices
    from paceline.plan.search.rank_counts import parse_counts
    from paceline.training.model_facts.describe import describe

    spec, launch = request
    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"batch-size starts the ranks, but {launcher} started this process as a rank; run it without "
            f"{launcher}"
        )
    if launch.nodes > 1 or launch.launcher not in (None, "local"):
        raise LaunchError("batch-size trains on one machine; leave --nodes and --launcher out")
    if until is None:
        raise SpecError("no target; add --until METRIC, such as --until 'accuracy>=0.97'")
    wanted = parse_counts(batches, "--batches")
    task = tasks.load_task(spec.task, spec.set)
    spec = spec.model_copy(update={"task": tasks.resolve_reference(spec.task)})
    samples = open_training_samples(task, spec).count
    if max(wanted) > samples:
        raise SpecError(
            f"--batches {batches}: batch {max(wanted):,} is larger than the {samples:,} samples of an epoch; "
            "use smaller batches"
        )
    largest = max(wanted)
    period = evaluate_samples or max(1, round(samples / EVALUATIONS_PER_EPOCH / largest)) * largest
    ranks = launch.ranks or count_devices(launch.device)
    folder = Path(launch.run) if launch.run is not None else RUNS / _name_folder(spec.task)
    sweep = Sweep(
        spec,
        launch.model_copy(update={"run": None, "ranks": ranks}),
        wanted,
        parse_target(until),
        folder,
        period,
        source,
        tune,
    )
    return sweep, describe(spec, task), samples


def _name_folder(task: str) -> str:
    """Return the default folder: the same for each call, so that a repeated command continues."""
    stem = os.path.basename(task.rpartition(":")[2])
    return re.sub(r"\W+", "-", stem).strip("-").lower()[:100] + "-batch-size"


def _train(sweep: "Sweep", console: "Console") -> "list[BatchResult]":
    from paceline.batch_size.sweep import run_sweep
    from paceline.events import Evaluated, Event, Step

    results = []
    with console.status("starting") as status:
        shown = {"step": "", "metric": ""}

        def show(name: str, event: Event | None) -> None:
            if event is None:
                shown.update(step="", metric="")
            if isinstance(event, Step):
                shown["step"] = f"step {event.step:,}"
            if isinstance(event, Evaluated) and sweep.target.name in event.metrics:
                shown["metric"] = f"{sweep.target.name} {event.metrics[sweep.target.name]:.4g}"
            status.update("  ".join(filter(None, (name, *shown.values()))))

        for result in run_sweep(sweep, show):
            results.append(result)
            steps = f"{result.steps:,.0f} steps" if result.steps is not None else "not reached"
            factor = f", learning rate × {result.lr_factor:g}" if sweep.tunes else ""
            console.print(f"batch {result.batch:,}: {steps}{factor}", markup=False)
    return results


def _choose(
    sweep: "Sweep",
    facts: "ModelFacts",
    curve: "ConvergenceCurve",
    results: "list[BatchResult]",
    priced: Priced,
    most_ranks: int | None,
) -> "dict[str, Choice]":
    """Return the best choices that the planner predicts for the cluster."""
    from paceline.batch_size.choose import find_candidates, list_choices, pick_best
    from paceline.cli.options.plan_inputs import find_cluster
    from paceline.plan.cost_model.optimizer_state import recipe_of_request
    from paceline.task import has_own_optimizer, load_task

    machine = find_cluster(priced.cluster)
    own = sweep.launch.ranks or 1
    most = most_ranks or max(own, machine.devices)
    ranks = sorted({own, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
    recipe = recipe_of_request(
        sweep.spec, facts, has_own_optimizer(load_task(sweep.spec.task, sweep.spec.set))
    )
    batches = find_candidates(results)
    return pick_best(
        list_choices(curve, facts, recipe, machine, batches, ranks, None, priced.price, priced.currency)
    )


def _print_published(console: "Console", facts: "ModelFacts", samples: int) -> None:
    from paceline.batch_size.published import find_published
    from paceline.batch_size.report import build_published_table

    if rows := find_published(facts, samples):
        console.print("published trainings of ResNet-50 on ImageNet:")
        console.print(build_published_table(rows))
