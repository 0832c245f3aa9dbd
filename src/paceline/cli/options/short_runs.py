"""What --measure of scale, plan and train does: short trainings, and the calibration of predictions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import SpecError

if TYPE_CHECKING:
    from paceline.plan.search.constraints import Constraint
    from paceline.short_runs.best_plans import MeasuredPlans
    from paceline.short_runs.request import ShortRequest
    from paceline.short_runs.scaling import MeasuredScaling
    from paceline.spec import Launch, Spec


def read_short_request(
    target: str,
    batch: int | None,
    precision: str | None,
    set: list[str],
    cluster_name: str | None,
    launcher: str | None = None,
) -> "ShortRequest":
    """Return what the short trainings of a task train, and how.

    cluster_name: a cluster.json of the machine that trains. Raises SpecError and LaunchError.
    """
    from pathlib import Path

    from paceline.cli.options.launching import read_request

    if cluster_name is not None and not Path(cluster_name).is_file():
        raise SpecError(
            f"--measure trains on this machine, and --cluster {cluster_name} describes another; name its "
            "cluster.json, or leave --cluster out"
        )
    flags = {"batch": batch, "precision": precision, "launcher": launcher}
    return build_short_request(*read_request(target, flags, set), cluster_name)


def build_short_request(spec: "Spec", launch: "Launch", cluster_name: str | None = None) -> "ShortRequest":
    """Return what short trainings of a request train. Raises LaunchError."""
    from paceline import task as tasks
    from paceline.cluster.local_cluster import load_cluster
    from paceline.cluster.published import find
    from paceline.distributed.world import read_world
    from paceline.errors import LaunchError
    from paceline.plan.cost_model.optimizer_state import recipe_of_request
    from paceline.short_runs.request import ShortRequest
    from paceline.task import has_own_optimizer
    from paceline.training.model_facts.describe import describe

    if (started := read_world().launcher) is not None:
        raise LaunchError(
            f"--measure starts the ranks, but {started} started this process as a rank; run it without "
            f"{started}"
        )
    task = tasks.load_task(spec.task, spec.set)
    spec = spec.model_copy(update={"task": tasks.resolve_reference(spec.task)})
    facts = describe(spec, task)
    recipe = recipe_of_request(spec, facts, has_own_optimizer(task))
    cluster = find(cluster_name) if cluster_name is not None else load_cluster(launch.device)
    return ShortRequest(spec, launch, task, facts, recipe, cluster)


def measure_counts(
    request: "ShortRequest", text: str, plan: str | None, cluster_name: str | None, efficiency: float
) -> "MeasuredScaling":
    """Train shortly on each number of ranks in `text`, print the results, and calibrate later predictions."""
    from rich.console import Console

    from paceline.cli.options.plan_options import print_parts
    from paceline.plan.search.rank_counts import parse_counts
    from paceline.short_runs.calibration import write_records
    from paceline.short_runs.report import build_tables, list_findings
    from paceline.short_runs.scaling import measure_scaling

    counts = parse_counts(text, "--measure")
    with Console(highlight=False, stderr=True).status("starting") as status:
        found = measure_scaling(request, counts, plan, status.update)
    sentence = write_records(request, [point.run for point in found.runs], cluster_name)
    print_parts(
        f"{request.facts.name}: short trainings of {request.spec.task}",
        *build_tables(found),
        *list_findings(found, efficiency),
        sentence,
    )
    return found


def measure_best_plans(
    request: "ShortRequest",
    ranks: int,
    count: int,
    cluster_name: str | None = None,
    where: "Sequence[Constraint]" = (),
) -> "MeasuredPlans":
    """Train shortly under the best plans, print the results, and calibrate later predictions."""
    from rich.console import Console

    from paceline.cli.options.plan_options import print_parts
    from paceline.short_runs.best_plans import build_table, measure_plans
    from paceline.short_runs.calibration import write_records

    with Console(highlight=False, stderr=True).status("starting") as status:
        found = measure_plans(request, ranks, count, status.update, where)
    sentence = write_records(request, [each.run for each in found.plans], cluster_name)
    print_parts(
        build_table(found), *found.describe_failures(), f"fastest: {found.describe_choice()}", sentence, ""
    )
    return found
