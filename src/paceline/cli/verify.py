"""paceline verify: is it the same training?"""

import json as json_file
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import spec as specs
from paceline.cli.request_options import Target
from paceline.errors import LaunchError, PlanError, SpecError
from paceline.files import check_target, write_whole
from paceline.units import several

Option = typer.Option
STEPS = 3


def verify(
    target: Target = "digits",
    plan: Annotated[str | None, Option(help="The plan to hold against one process.")] = None,
    all: Annotated[bool, Option("--all", help="Every plan that can be, as a table.")] = False,
    ranks: Annotated[int | None, Option(help="Processes on this machine. Default: 2.")] = None,
    batch: Annotated[
        int | None,
        Option(help="Samples of the global batch. Default: the task's, or the least above that divides."),
    ] = None,
    steps: Annotated[int | None, Option(help=f"Steps to compare. Default: {STEPS}.", min=1)] = None,
    lr: Annotated[float | None, Option(help="Learning rate. Default: 0.001.")] = None,
    seed: Annotated[int | None, Option(help="Of weights and order of samples.")] = None,
    set: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE",
            help="A field of the task, to make it small, or a dotted key: optimizer.clip.",
        ),
    ] = None,
    optimizer: Annotated[str | None, Option(help="adamw or sgd.")] = None,
    clip: Annotated[float | None, Option(help="Largest norm of the whole gradient.")] = None,
    json: Annotated[Path | None, Option(help="Write what was found to this file.")] = None,
    timeout: Annotated[
        float, Option(help="Seconds after which a plan that does not end counts as failed.", min=1, max=1e6)
    ] = 120.0,
) -> None:
    """Hold plans against one process, step by step: loss, gradients, norm, parameters. Float64, on CPU processes.

    Exit status: 0 the same training, 1 not, 2 bad input.
    """
    from paceline.cli.launching import read

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
    spec, launch = read(target, flags, set or [], steps=STEPS)
    if all and plan is not None:
        raise SpecError(f"--all is every plan, and --plan {plan} is one of them; say one of both")
    if not all and launch.plan is None:
        raise SpecError("verify needs to know what to hold against one process: say --plan PLAN or --all")
    if json is not None:
        check_target(json)
    found, status = _verified(
        spec, launch.ranks or 2, None if all else launch.plan, batch is not None, timeout
    )
    if json is not None:
        write_whole(json, json_file.dumps(found, indent=1) + "\n")
    raise typer.Exit(status)


def _verified(
    spec: specs.Spec, ranks: int, asked: str | None, batch_is_said: bool, timeout_s: float
) -> tuple[Any, int]:
    """`asked`: None for all plans. Returns what goes into the JSON file, and the exit status."""
    from rich.console import Console

    from paceline import task as tasks
    from paceline.distributed.world import read_world
    from paceline.launch.launchers import check_count
    from paceline.plan.plan import micro_batch_size, parse
    from paceline.plan.search.candidates import candidates

    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"verify starts ranks itself, and {launcher} has started this process as one; run it without"
        )
    check_count(ranks)  # before every plan is looked for
    tasks.load_task(spec.task, spec.set)
    asked_task = spec.task
    spec = spec.model_copy(update={"task": tasks.resolve_reference(spec.task)})
    plans = [parse(asked)] if asked is not None else list(candidates(ranks))
    if asked is not None:
        resolved = plans[0].resolve(ranks)
        if batch_is_said:
            micro_batch_size(spec.batch, resolved)

    from paceline.verify.report import Overview, closing, conditions, measure, sentence, table
    from paceline.verify.run import Verification, batch_for

    if not batch_is_said:
        spec = spec.model_copy(update={"batch": batch_for(spec.batch, plans, ranks)})
    console = Console(highlight=False, emoji=False)
    with Verification(spec, ranks, timeout_s) as verification:
        reference = verification.reference()
        what = f"plan {plans[0]}" if asked is not None else f"{len(plans)} plans"
        settings = f"{several(spec.steps or STEPS, 'step')}, batch {spec.batch}, {'float64' if reference.no_float64 is None else 'float32'}"
        console.print(
            f"{asked_task}: {what} on {several(ranks, 'rank')} beside one process; {settings}",
            markup=False,
            soft_wrap=True,
        )
        for condition in [*conditions(reference), *verification.notes]:
            console.print(condition, markup=False)
        console.print(measure(reference), style="dim")
        if asked is not None and plans[0].is_asynchronous:
            console.print(
                "this plan makes another update than one process, so that other things must hold:",
                markup=False,
            )
            held = verification.held(plans[0])
            for one in held:
                style, word = {
                    True: ("bold green", "holds"),
                    False: ("bold red", "fails"),
                    None: ("dim", "—"),
                }[one.holds]
                console.print(f"{word:6}", style=style, end="")
                console.print(f" {one.what}{f' ({one.detail})' if one.detail else ''}", markup=False)
            status = 1 if any(one.holds is False for one in held) else 0
            return {
                "plan": str(plans[0]),
                "ranks": ranks,
                "same": None,
                "holds": [one.as_json() for one in held],
            }, status
        if asked is not None:
            verdict = verification.verify(plans[0])
            console.print(table(verdict))
            console.print(
                sentence(verdict),
                style="bold green" if verdict.same else "bold red",
                markup=False,
                soft_wrap=True,
            )
            return verdict.as_json(), 0 if verdict.same else 1
        overview, verdicts = Overview(console, plans), []
        for plan in plans:
            verdicts.append(verification.outcome(plan))
            overview.add(verdicts[-1])
    if all(verdict.cannot_be is not None for verdict in verdicts):
        raise PlanError(f"none of {len(plans)} plans can be: {verdicts[0].cannot_be}")
    console.print(closing(verdicts))
    return [verdict.as_json() for verdict in verdicts], 0 if all(
        verdict.same or verdict.cannot_be for verdict in verdicts
    ) else 1
