"""paceline profile: show where the time and memory of a run went, next to the predicted values."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options.request_options import Json
from paceline.run import RunFolder
from paceline.units import several

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster
    from paceline.events import Skipped
    from paceline.plan.search.best_plans import BestPlans
    from paceline.report.breakdown import RunBreakdown
    from paceline.report.profile import PredictionReport

Option = typer.Option
FLAME_GRAPH = "Flame graph"


def profile(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    cluster: Annotated[
        str | None,
        Option(help="Machine to predict for, as for plan [default: cluster.json here, or this machine]"),
    ] = None,
    update: Annotated[
        bool,
        Option("--update", help="Write the ratios of measured to predicted times into the cluster.json."),
    ] = False,
    measured: Annotated[bool, Option("--measured", help="Show only measured values.")] = False,
    json: Json = None,
    plot: Annotated[
        Path | None,
        Option(metavar="FILE", help="Draw predicted and measured values into this SVG or PNG file."),
    ] = None,
    stacks: Annotated[
        Path | None,
        Option(
            metavar="FILE.svg",
            help="Only sample the Python stacks of a rank that trains, and draw a flame graph (py-spy).",
            rich_help_panel=FLAME_GRAPH,
        ),
    ] = None,
    rank: Annotated[
        int, Option(min=0, help="Rank of the flame graph [default: 0].", rich_help_panel=FLAME_GRAPH)
    ] = 0,
    seconds: Annotated[
        int,
        Option(
            min=1,
            max=3600,
            help="Duration of the samples, 100 a second [default: 10].",
            rich_help_panel=FLAME_GRAPH,
        ),
    ] = 10,
) -> None:
    """Show where the time and memory of a run went, next to the predicted values."""
    from paceline.cli.options.plan_options import check_outputs
    from paceline.errors import PlanError, SpecError
    from paceline.report.profile import (
        PredictionReport,
        build_sentences,
        build_tables,
        draw,
        format_heading,
        to_json,
    )
    from paceline.run import open_run

    if stacks is not None:
        if json is not None or plot is not None or update:
            raise SpecError("--stacks only draws a flame graph; leave out --json, --plot and --update")
        _draw_flame_graph(open_run(run), stacks, rank, seconds)
        return
    check_outputs(json, plot)
    if update and measured:
        raise SpecError("--update requires a prediction, which --measured leaves out; give only one of them")
    folder = open_run(run)
    measured_run, skipped = _read_breakdown(folder)
    report = PredictionReport(measured_run, None, "asked not to (--measured)")
    update_message = ""
    if not measured:
        machine = find_cluster_of_run(folder, measured_run, cluster, update)
        report = predict_run(folder, measured_run, machine)
        if update and report.cost is None:
            raise PlanError(report.unpredicted)
        if update:
            update_message = _update_calibrations(folder, measured_run, machine, cluster)

    from rich.console import Console

    from paceline.errors import RunError
    from paceline.files import write_whole

    if json is not None:
        write_whole(json, to_json(report))
    if report.cost is not None:
        with contextlib.suppress(RunError):  # the folder may belong to another user; only pages read the file
            write_whole(folder.profile, to_json(report))
    if plot is not None:
        draw(report, plot)
    console = Console(highlight=False)
    console.print(format_heading(report), soft_wrap=True, markup=False)
    for table in build_tables(report):
        console.print()
        console.print(table)
    console.print()
    damaged = [] if measured else [folder.origin()[1]]
    for line in [
        *build_sentences(report),
        *filter(None, [str(skipped), *damaged]),
        *([update_message] if update_message else []),
    ]:
        console.print(line, soft_wrap=True, markup=False)


def _draw_flame_graph(folder: RunFolder, path: Path, rank: int, seconds: int) -> None:
    from paceline.doctor.flame_graph import record_flame_graph

    print(f"sampling rank {rank} for {several(seconds, 'second')}", flush=True)
    record_flame_graph(folder, rank, seconds, path)
    print(f"wrote {path}; open it in a browser")


def predict_run(
    folder: RunFolder, measured_run: "RunBreakdown", machine: "Cluster", others: bool = False
) -> "PredictionReport":
    """Return the measured values of a run next to those predicted for a machine.

    others: also predict the other plans for as many ranks. Imports the task of the run."""
    from paceline.errors import PlanError
    from paceline.report.profile import PredictionReport

    try:
        calibrations = tuple(record for record in machine.calibrations if record.run != measured_run.name)
        machine = machine.model_copy(update={"calibrations": calibrations})
        answer = _predict(folder, measured_run, machine, others)
    except PlanError as error:
        return PredictionReport(measured_run, None, str(error))
    guesses = answer.plans[0][1].time.guesses
    notes = (*answer.assumed, *(["extrapolated: " + "; ".join(guesses)] if guesses else []))
    best = next(((str(plan), cost.step_s) for plan, cost in answer.others or ()), None)
    price = machine.price_per_device_hour
    return PredictionReport(
        measured_run,
        answer.plans[0][1],
        "",
        machine.name or machine.device.name,
        notes,
        price.value if price is not None else None,
        best,
    )


def _read_breakdown(folder: RunFolder) -> "tuple[RunBreakdown, Skipped]":
    """Return the breakdown of a run, and the lines that could not be read.

    Raises RunError if there is no breakdown.
    """
    from paceline.errors import RunError
    from paceline.plan.cost_model.compare import MAX_PROFILED_STEPS
    from paceline.plan.plan import parse
    from paceline.report.run_view import view

    run_view = view(folder)
    try:
        return run_view.break_down(), run_view.skipped
    except RunError as error:
        spec, launch = folder.request()
        plan = parse(launch.plan or "ddp")
        hint = (
            "train at least 5 steps with --profile, which profiles steps even if that takes "
            "more than 1 % of the time"
        )
        if plan.servers is not None:
            hint = (
                f"the ranks of plan {plan} do not wait for each other, so its steps are never profiled; "
                "use another plan"
            )
        elif plan.period is not None and plan.period > MAX_PROFILED_STEPS:
            hint = (
                f"plan {plan} requires a profile of a whole period, which must have at most "
                f"{MAX_PROFILED_STEPS} steps; use a shorter period"
            )
        elif spec.profile is False:
            hint = "the run was trained with --no-profile; leave that out"
        skipped = f"; {run_view.skipped}" if run_view.skipped else ""
        raise RunError(f"{folder.path} has no profile: {error}; {hint}{skipped}") from None


def find_cluster_of_run(
    folder: RunFolder, measured_run: "RunBreakdown", name: str | None, update: bool = False
) -> "Cluster":
    """Return the cluster to predict for.

    Raises ClusterError if its device differs from that of the run, or for a missing file to update.
    """
    import re

    from paceline.cli.options.plan_inputs import find_cluster
    from paceline.cluster.local_cluster import find_file
    from paceline.errors import ClusterError

    if update and name is None and find_file() is None:
        raise ClusterError(
            "--update requires a cluster.json, and there is none here; write it with paceline bench, or "
            "name it with --cluster FILE"
        )
    if update and name is not None and not Path(name).is_file():
        raise ClusterError(
            f"--update requires a cluster.json, and there is no file {name}; write it with paceline bench"
        )
    machine = find_cluster(name)
    device = machine.device
    processor = folder.origin()[0].get("processor")
    ran_on = (
        (processor if isinstance(processor, str) else "cpu")
        if measured_run.started.device == "cpu"
        else measured_run.started.device
    )
    names = [re.sub(r"[^a-z0-9]", "", text.lower()) for text in (ran_on, device.name)]
    same_kind = (measured_run.started.device == "cpu") == (device.kind == "cpu")
    if not same_kind or (ran_on != "cpu" and names[0] not in names[1] and names[1] not in names[0]):
        raise ClusterError(
            f"{folder.path} ran on {ran_on}, but the cluster has {device.name}; name the cluster of the "
            "run with --cluster FILE"
        )
    return machine


def _predict(
    folder: RunFolder, measured_run: "RunBreakdown", cluster: "Cluster", others: bool = False
) -> "BestPlans":
    """Return the predicted cost of the plan of a run. Raises PlanError if it cannot be predicted."""
    from paceline.errors import TaskError
    from paceline.plan.cost_model.optimizer_state import recipe_of_request
    from paceline.plan.search.best_plans import find_best_plans
    from paceline.task import has_own_optimizer, load_task
    from paceline.training.model_facts.describe import describe

    spec, _ = folder.request()
    try:
        task = load_task(spec.task, spec.set)
    except TaskError as error:
        raise TaskError(
            f"{error}; a prediction for {folder.path} requires its task; show measured values with --measured"
        ) from error
    started, facts = measured_run.started, describe(spec, task)
    return find_best_plans(
        facts,
        cluster,
        started.batch,
        started.plan,
        recipe_of_request(spec, facts, has_own_optimizer(task)),
        started.ranks,
        others=others,
    )


def _update_calibrations(
    folder: RunFolder, measured_run: "RunBreakdown", cluster: "Cluster", name: str | None
) -> str:
    """Write the ratios of measured to predicted times into the cluster.json, and return them as a sentence.

    Predictions use no earlier calibration, so that the ratios do not depend on the order of the runs.
    """
    from paceline.cluster import file
    from paceline.cluster.local_cluster import find_file
    from paceline.plan.cost_model.calibration import build_record

    path = Path(name) if name is not None else find_file()
    assert path is not None
    _, cost = _predict(folder, measured_run, cluster.model_copy(update={"calibrations": ()})).plans[0]
    started = measured_run.started
    record = build_record(measured_run.name, started.plan, started.ranks, measured_run.seconds, cost)
    updated = cluster.updated(calibrations=[record])
    file.write(path, updated)
    count = len(updated.calibrations)
    replaced = " (this run replaced its earlier record)" if count == len(cluster.calibrations) else ""
    factors = ", ".join(f"{part} × {fact.value:.2f}" for part, fact in record.ratios.items())
    return f"{path} now has {several(count, 'run')}{replaced}: {factors}"
