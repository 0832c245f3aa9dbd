"""paceline profile: where the time and memory of a run went, beside what is predicted of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.run import RunFolder
from paceline.units import several

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster
    from paceline.events import Skipped
    from paceline.plan.search.best_plans import BestPlans
    from paceline.report.breakdown import RunBreakdown

Option = typer.Option


def profile(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    cluster: Annotated[
        str | None,
        Option(help="Predict on this one, as for plan. Default: cluster.json here, or this machine."),
    ] = None,
    update: Annotated[
        bool, Option("--update", help="Write what the run shows of predictions into the cluster.json.")
    ] = False,
    measured: Annotated[bool, Option("--measured", help="Predict nothing.")] = False,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the figures there, too.")] = None,
    plot: Annotated[
        Path | None, Option(metavar="FILE.svg|png", help="Draw predicted over measured there.")
    ] = None,
) -> None:
    """Show where the time and memory of a run went, part by part, beside what is predicted."""
    from paceline.cli.plan_options import check_outputs
    from paceline.errors import PlanError, SpecError
    from paceline.report.profile import PredictionReport, as_json, draw, heading, lines, tables
    from paceline.run import open_run

    check_outputs(json, plot)
    if update and measured:
        raise SpecError(
            "--update compares with a prediction, and --measured makes none; leave one of them out"
        )
    folder = open_run(run)
    seen, skipped = _measured(folder)
    found = PredictionReport(seen, None, "asked not to (--measured)")
    said = ""
    if not measured:
        where = _cluster(folder, seen, cluster, update)
        name = _name(seen)
        try:
            others = where.model_copy(
                update={"calibrations": tuple(one for one in where.calibrations if one.run != name)}
            )
            answer = _predicted(folder, seen, others)
            guesses = answer.plans[0][1].time.guesses
            notes = (*answer.assumed, *(["extrapolated: " + "; ".join(guesses)] if guesses else []))
            found = PredictionReport(seen, answer.plans[0][1], "", where.name or where.device.name, notes)
        except PlanError as error:
            if update:
                raise
            found = PredictionReport(seen, None, str(error))
        if update:
            said = _update(folder, seen, where, cluster)

    from rich.console import Console

    if json is not None:
        from paceline.files import write_whole

        write_whole(json, as_json(found))
    if plot is not None:
        draw(found, plot)
    console = Console(highlight=False)
    console.print(heading(found), soft_wrap=True, markup=False)
    for table in tables(found):
        console.print()
        console.print(table)
    console.print()
    damaged = [] if measured else [folder.origin()[1]]
    for line in [*lines(found), *filter(None, [str(skipped), *damaged]), *([said] if said else [])]:
        console.print(line, soft_wrap=True, markup=False)


def _measured(folder: RunFolder) -> "tuple[RunBreakdown, Skipped]":
    """And the lines that could not be read. Raises RunError with the way out where there is no breakdown."""
    from paceline.errors import RunError
    from paceline.plan.cost_model.compare import MOST_STEPS
    from paceline.plan.plan import parse
    from paceline.report.run_view import view

    found = view(folder)
    try:
        return found.measured(), found.skipped
    except RunError as error:
        spec, launch = folder.request()
        plan = parse(launch.plan or "ddp")
        hint = "train again with --profile, which profiles some even if they take more than 1 % of the time, and 5 steps or more"
        if plan.servers is not None:
            hint = f"of plan {plan}, whose ranks do not wait for each other, none ever is"
        elif plan.period is not None and plan.period > MOST_STEPS:
            hint = f"of plan {plan} a whole period of at most {MOST_STEPS} steps would have to be"
        elif spec.profile is False:
            hint = "it was asked for with --no-profile; leave that out"
        skipped = f"; {found.skipped}" if found.skipped else ""
        raise RunError(f"{folder.path} has no profile: {error}; {hint}{skipped}") from None


def _name(seen: "RunBreakdown") -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seen.first, UTC).isoformat()


def _cluster(folder: RunFolder, seen: "RunBreakdown", said: str | None, update: bool) -> "Cluster":
    """Raises ClusterError for another device than the run had, or where there is no file to update."""
    import re

    from paceline.cli.plan_inputs import cluster_of
    from paceline.cluster.local_cluster import file_of
    from paceline.errors import ClusterError

    if update and said is None and file_of() is None:
        raise ClusterError(
            "there is no cluster.json here to update; write one with paceline bench, or name one with --cluster FILE"
        )
    if update and said is not None and not Path(said).is_file():
        raise ClusterError(
            f"--update writes into a file, and there is no file {said}; write one with paceline bench"
        )
    where = cluster_of(said)
    device = where.device
    processor = folder.origin()[0].get("processor")
    ran_on = (
        (processor if isinstance(processor, str) else "cpu")
        if seen.started.device == "cpu"
        else seen.started.device
    )
    flat = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in (ran_on, device.name)]
    same_kind = (seen.started.device == "cpu") == (device.kind == "cpu")
    if not same_kind or (ran_on != "cpu" and flat[0] not in flat[1] and flat[1] not in flat[0]):
        raise ClusterError(
            f"{folder.path} ran on {ran_on}, and the cluster is of {device.name}; name the run's own with --cluster FILE"
        )
    return where


def _predicted(folder: RunFolder, seen: "RunBreakdown", cluster: "Cluster") -> "BestPlans":
    """Raises PlanError for what cannot be predicted."""
    from paceline.errors import TaskError
    from paceline.plan.cost_model.framework_profiles import of_precision
    from paceline.plan.search.best_plans import answer
    from paceline.task import load_task
    from paceline.training.model_facts.describe import describe

    spec, _ = folder.request()
    try:
        task = load_task(spec.task, spec.set)
    except TaskError as error:
        raise TaskError(
            f"{error}; what {folder.path} takes cannot be predicted without its task: ask for --measured alone"
        ) from error
    started = seen.started
    return answer(
        describe(spec, task),
        cluster,
        started.batch,
        started.plan,
        of_precision(spec.precision),
        started.ranks,
    )


def _update(folder: RunFolder, seen: "RunBreakdown", cluster: "Cluster", said: str | None) -> str:
    """Ratios are to what the cluster's facts say without any calibration, so that they do not depend on the order of runs."""
    from paceline.cluster import file
    from paceline.cluster.facts import CalibrationRecord, Fact
    from paceline.cluster.local_cluster import file_of
    from paceline.plan.cost_model.compare import ratios

    path = Path(said) if said is not None else file_of()
    assert path is not None
    _, cost = _predicted(folder, seen, cluster.model_copy(update={"calibrations": ()})).plans[0]
    found = {part: Fact(value=ratio, source="measured") for part, ratio in ratios(seen.seconds, cost).items()}
    parts = tuple(part.name for part in cost.time.parts)
    row = CalibrationRecord(
        run=_name(seen), plan=seen.started.plan, ranks=seen.started.ranks, parts=parts, ratios=found
    )
    after = cluster.updated(calibrations=[row])
    file.write(path, after)
    count = len(after.calibrations)
    again = ", this one again" if count == len(cluster.calibrations) else ""
    words = ", ".join(f"{part} × {fact.value:.2f}" for part, fact in found.items())
    return f"{path} now has {several(count, 'run')}{again}: {words}"
