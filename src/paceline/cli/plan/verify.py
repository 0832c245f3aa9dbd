"""paceline verify: check that a plan computes the same training as one process."""

import json as json_file
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import spec as specs
from paceline.cli.options.request_options import Clip, LearningRate, OptimizerName, Target
from paceline.errors import LaunchError, PlanError, SpecError
from paceline.files import check_target, write_whole
from paceline.units import several

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.plan.plan import Plan
    from paceline.verify.run import Verification

Option = typer.Option
STEPS = 3


def verify(
    target: Target = "digits",
    plan: Annotated[str | None, Option(help="Plan to check, as for train.")] = None,
    all: Annotated[bool, Option("--all", help="Check every possible plan, and print a table.")] = False,
    ranks: Annotated[int | None, Option(help="Number of processes on this machine [default: 2]")] = None,
    batch: Annotated[
        int | None,
        Option(
            help="Number of samples of the global batch [default: that of the task, or the next that all "
            "plans can divide]"
        ),
    ] = None,
    steps: Annotated[int | None, Option(help=f"Number of steps to compare [default: {STEPS}]", min=1)] = None,
    lr: LearningRate = None,
    seed: Annotated[int | None, Option(help="Seed of weights and sample order [default: 0]")] = None,
    set: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE",
            help="Set a field of the task, for example to make it small, or a dotted key such as "
            "optimizer.clip; may be repeated.",
        ),
    ] = None,
    optimizer: OptimizerName = None,
    clip: Clip = None,
    json: Annotated[Path | None, Option(help="Write the results to this JSON file.")] = None,
    timeout: Annotated[
        float, Option(help="Seconds after which a plan that has not ended counts as failed.", min=1, max=1e6)
    ] = 120.0,
) -> None:
    """Check that a plan computes the same training as one process.

    Compares loss, gradients, gradient norm and parameters after each step, in float64 on CPU processes.

    Exit status: 0 the same training, 1 a different training, 2 bad input.
    """
    from paceline.cli.options.launching import read_request

    flags: dict[str, Any] = {
        "ranks": ranks,
        "plan": plan,
        "batch": batch,
        "steps": steps,
        "seed": seed,
        "optimizer.lr": lr,
        "optimizer.name": optimizer,
        "optimizer.clip": clip,
    }
    spec, launch = read_request(target, flags, set or [], steps=STEPS)
    if all and plan is not None:
        raise SpecError(f"--all includes --plan {plan}; give only one of them")
    if not all and launch.plan is None:
        raise SpecError("verify requires a plan to compare with one process; add --plan PLAN or --all")
    if json is not None:
        check_target(json)
    results, status = _verify(
        spec, launch.ranks or 2, None if all else launch.plan, batch is not None, timeout
    )
    if json is not None:
        write_whole(json, json_file.dumps(results, indent=1) + "\n")
    raise typer.Exit(status)


def _verify(
    spec: specs.Spec, ranks: int, plan_text: str | None, has_batch: bool, timeout_s: float
) -> tuple[Any, int]:
    """Check a plan, or all plans if `plan_text` is None. Return the results as JSON, and the exit status.

    has_batch: the batch was given as an option, so that it must not change.
    """
    from rich.console import Console

    from paceline import task as tasks
    from paceline.distributed.world import read_world
    from paceline.launch.launchers import check_count
    from paceline.plan.plan import micro_batch_size, parse
    from paceline.plan.search.candidates import enumerate_candidates

    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"verify starts the ranks, but {launcher} started this process as a rank; run verify without "
            f"{launcher}"
        )
    check_count(ranks)  # before the search for all plans, which would take long
    tasks.load_task(spec.task, spec.set)
    task_name = spec.task
    spec = spec.model_copy(update={"task": tasks.resolve_reference(spec.task)})
    plans = [parse(plan_text)] if plan_text is not None else list(enumerate_candidates(ranks))
    if plan_text is not None:
        resolved = plans[0].resolve(ranks)
        if has_batch:
            micro_batch_size(spec.batch, resolved)

    from paceline.verify.report import build_table, describe_conditions, describe_measure, format_verdict
    from paceline.verify.run import Verification, choose_batch

    if not has_batch:
        spec = spec.model_copy(update={"batch": choose_batch(spec.batch, plans, ranks)})
    console = Console(highlight=False, emoji=False)
    with Verification(spec, ranks, timeout_s) as verification:
        reference = verification.reference()
        subject = f"plan {plans[0]}" if plan_text is not None else f"{len(plans)} plans"
        dtype = "float64" if reference.float64_error is None else "float32"
        settings = f"{several(spec.steps or STEPS, 'step')}, batch {spec.batch}, {dtype}"
        console.print(
            f"{task_name}: {subject} on {several(ranks, 'rank')} vs. one process; {settings}",
            markup=False,
            soft_wrap=True,
        )
        for condition in [*describe_conditions(reference), *verification.notes]:
            console.print(condition, markup=False)
        console.print(describe_measure(reference), style="dim")
        if plan_text is None:
            return _verify_all(verification, plans, console)
        if plans[0].is_asynchronous:
            return _check_properties(verification, plans[0], ranks, console)
        verdict = verification.verify(plans[0])
        console.print(build_table(verdict))
        console.print(
            format_verdict(verdict),
            style="bold green" if verdict.same else "bold red",
            markup=False,
            soft_wrap=True,
        )
        return verdict.as_json(), 0 if verdict.same else 1


def _check_properties(
    verification: "Verification", plan: "Plan", ranks: int, console: "Console"
) -> tuple[Any, int]:
    """Check a plan whose update differs from that of one process. Return what `_verify` does."""
    console.print(
        "the update of this plan differs from that of one process; these properties must hold instead:",
        markup=False,
    )
    properties = verification.check_conditions(plan)
    for entry in properties:
        style, word = {
            True: ("bold green", "holds"),
            False: ("bold red", "fails"),
            None: ("dim", "—"),
        }[entry.holds]
        console.print(f"{word:6}", style=style, end="")
        console.print(f" {entry.what}{f' ({entry.detail})' if entry.detail else ''}", markup=False)
    status = 1 if any(entry.holds is False for entry in properties) else 0
    return {
        "plan": str(plan),
        "ranks": ranks,
        "same": None,
        "holds": [entry.as_json() for entry in properties],
    }, status


def _verify_all(verification: "Verification", plans: Sequence["Plan"], console: "Console") -> tuple[Any, int]:
    """Check all plans, and print an overview. Return what `_verify` does."""
    from paceline.verify.report import Overview, build_summary

    overview, verdicts = Overview(console, plans), []
    for plan in plans:
        verdicts.append(verification.try_verify(plan))
        overview.add(verdicts[-1])
    if all(verdict.cannot_be is not None for verdict in verdicts):
        raise PlanError(f"none of {len(plans)} plans is possible: {verdicts[0].cannot_be}")
    console.print(build_summary(verdicts))
    return [verdict.as_json() for verdict in verdicts], 0 if all(
        verdict.same or verdict.cannot_be for verdict in verdicts
    ) else 1
