"""paceline drill: break a training on purpose, and see whether anything is lost."""

import contextlib
import json as json_file
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.request_options import Target
from paceline.drill.faults import FAULTS, FaultMoment, chosen, save_every, schedule
from paceline.errors import LaunchError, PlanError, RunError
from paceline.run import choose_path
from paceline.spec import Launch, Spec
from paceline.units import several

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.drill.run import Drill, FaultOutcome

Option = typer.Option
STEPS, RANKS = 24, 2


def drill(
    target: Target = "digits",
    plan: Annotated[str | None, Option(help="Default: ddp.")] = None,
    ranks: Annotated[int | None, Option(help="Processes on this machine. Default: 2.")] = None,
    faults: Annotated[
        str | None, Option(help=f"With commas: {', '.join(fault.name for fault in FAULTS)}. Default: all.")
    ] = None,
    rounds: Annotated[
        int, Option(help="How often each fault happens, each time at another moment.", min=1)
    ] = 1,
    seed: Annotated[
        int | None, Option(help="Of the moments, and of weights and the order of samples.")
    ] = None,
    steps: Annotated[int | None, Option(help=f"Of each training. Default: {STEPS}.")] = None,
    batch: Annotated[int | None, Option(help="Samples of the global batch.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate. Default: 0.001.")] = None,
    optimizer: Annotated[str | None, Option(help="adamw or sgd.")] = None,
    clip: Annotated[float | None, Option(help="Largest norm of the whole gradient.")] = None,
    set: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE",
            help="A field of the task, to make it small, or a dotted key: optimizer.momentum.",
        ),
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: CUDA where there is some.")] = None,
    json: Annotated[Path | None, Option(help="Write what was found to this file.")] = None,
    keep: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Keep all trainings in this new folder. Else only if one failed."),
    ] = None,
) -> None:
    """Train undisturbed, then once for each fault, which happens at a random but seeded moment, and compare: weights and losses bit by
    bit, the samples that were consumed, the processes and ports that are left.

    Exit status: 0 nothing was lost, 1 something was, 2 bad input.
    """
    from paceline.cli.launching import read
    from paceline.cli.plan_options import check_outputs
    from paceline.files import write_whole

    flags: dict[str, Any] = {
        "ranks": ranks,
        "plan": plan,
        "batch": batch,
        "steps": steps,
        "seed": seed,
        "device": device,
        "optimizer.lr": lr,
        "optimizer.name": optimizer,
        "optimizer.clip": clip,
    }
    check_outputs(json, None)
    if keep is not None and keep.exists():
        raise RunError(f"{keep} exists already; say another --keep")
    spec, launch = read(target, flags, set or [], steps=STEPS)
    one = _prepared(spec, launch, keep or choose_path(None, "drill"))
    moments = schedule(chosen(faults), spec.seed, rounds, one.steps, one.ranks)
    found, status = _held(one, moments, spec.task)
    if json is not None:
        write_whole(json, json_file.dumps(found, indent=1) + "\n")
    if keep is None and not status:
        shutil.rmtree(one.folder)
    else:
        print(f"trainings  {one.folder}")
    raise typer.Exit(status)


def _prepared(spec: Spec, launch: Launch, folder: Path) -> "Drill":
    """Raises the Error of what can be known to go wrong."""
    from paceline import task as tasks
    from paceline.cli.launching import check
    from paceline.distributed.world import read_world
    from paceline.drill.run import Drill
    from paceline.plan.plan import parse

    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"drill starts ranks itself, and {launcher} has started this process as one; run it without"
        )
    if launch.nodes > 1:
        raise LaunchError(
            f"drill breaks what it can reach, the ranks of one machine, got nodes={launch.nodes}; leave it out"
        )
    assert spec.steps is not None
    save_every(spec.steps)
    launch = check(
        spec,
        launch.model_copy(update={"ranks": launch.ranks or RANKS, "run": None, "restarts": 0}),
        read_world(),
    )
    ranks, plan = launch.ranks or RANKS, parse(str(launch.plan))
    if plan.servers is not None:
        raise PlanError(
            f"under plan {plan} no two trainings are the same, so there is nothing to compare with; use another plan"
        )
    return Drill(
        spec.model_copy(update={"task": tasks.resolve_reference(spec.task)}),
        launch,
        plan.resolve(ranks),
        folder,
    )


def _held(one: "Drill", moments: list[FaultMoment], task: str) -> tuple[dict[str, Any], int]:
    """Returns what goes into the JSON file, and the exit status."""
    from rich.console import Console

    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # as Ctrl-C: what was started is ended
    console = Console(highlight=False, emoji=False)
    outcomes: list[FaultOutcome] = []
    what = f"{task}: plan {one.launch.plan} on {several(one.ranks, 'rank')}, {one.steps} steps of {one.spec.batch} samples"
    console.print(f"{what}, seed {one.spec.seed}", markup=False)
    with contextlib.ExitStack() as at_end:
        at_end.callback(_tell, console, outcomes, len(moments))  # also of a drill that is ended
        shown = at_end.enter_context(console.status("undisturbed"))
        reference = one.reference()
        for at, moment in enumerate(moments, 1):
            shown.update(f"{at} of {len(moments)}: {moment.fault.name} at step {moment.step}")
            outcomes.append(one.hit(moment, reference, f"{at}-{moment.fault.name}"))
    failed = any(outcome.wrong for outcome in outcomes)
    found = {
        "task": one.spec.task,
        "plan": one.launch.plan,
        "ranks": one.ranks,
        "seed": one.spec.seed,
        "steps": one.steps,
        "timeout_s": reference.timeout_s,
        "undisturbed_s": reference.seconds,
        "faults": [outcome.as_json() for outcome in outcomes],
    }
    return found, int(failed)


def _tell(console: "Console", outcomes: "list[FaultOutcome]", faults: int) -> None:
    """What was found so far, of so many faults."""
    from paceline.drill.text import closing, sentences, table

    if len(outcomes) < faults:
        console.print(f"ended after {len(outcomes)} of {several(faults, 'fault')}", style="bold red")
    if not outcomes:
        return
    console.print(table(outcomes))
    for sentence in sentences(outcomes):
        console.print(sentence, markup=False, soft_wrap=True)
    failed = any(outcome.wrong for outcome in outcomes)
    console.print(closing(outcomes), style="bold red" if failed else "bold green")
