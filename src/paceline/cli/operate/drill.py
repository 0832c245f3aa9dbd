"""paceline drill: inject faults into a training, and check that nothing is lost."""

import contextlib
import json as json_file
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options.request_options import Clip, LearningRate, OptimizerName, Set, Target
from paceline.drill.faults import (
    FAULTS,
    Fault,
    FaultMoment,
    choose_save_every,
    schedule_faults,
    select_faults,
)
from paceline.errors import LaunchError, PlanError, RunError, SpecError
from paceline.run import choose_path
from paceline.spec import Launch, Spec
from paceline.units import several

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.drill.matrix import DrillTrial, TrialFile
    from paceline.drill.run import Drill, FaultOutcome

Option = typer.Option
STEPS, RANKS = 24, 2


def drill(
    target: Target = "digits",
    plan: Annotated[str | None, Option(help="Plan, as for train [default: ddp]")] = None,
    ranks: Annotated[int | None, Option(help="Number of processes on this machine [default: 2]")] = None,
    faults: Annotated[
        str | None,
        Option(
            help=f"Faults to inject, separated by commas: {', '.join(fault.name for fault in FAULTS)} "
            "[default: all]"
        ),
    ] = None,
    rounds: Annotated[
        int, Option(help="Number of trainings per fault, each with the fault at a different moment.", min=1)
    ] = 1,
    seed: Annotated[
        int | None,
        Option(help="Seed of the moments of the faults, and of weights and sample order [default: 0]"),
    ] = None,
    steps: Annotated[int | None, Option(help=f"Length of each training in steps [default: {STEPS}]")] = None,
    batch: Annotated[int | None, Option(help="Number of samples of the global batch [default: 64]")] = None,
    lr: LearningRate = None,
    optimizer: OptimizerName = None,
    clip: Clip = None,
    set: Set = None,
    device: Annotated[str | None, Option(help="Device: cpu or cuda [default: cuda if available]")] = None,
    all_plans: Annotated[
        bool,
        Option("--all", help="Drill under eight plans on 2 or 4 ranks, and continue the drills of --record."),
    ] = False,
    record: Annotated[
        Path | None,
        Option(metavar="FILE", help="File of results of --all; drills that it has are not repeated."),
    ] = None,
    json: Annotated[Path | None, Option(help="Write the results to this JSON file.")] = None,
    keep: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Keep all trainings in this new folder [default: keep them only if a check fails]",
        ),
    ] = None,
) -> None:
    """Inject faults into a training, and check that nothing is lost.

    Trains once undisturbed, then once for each fault, which happens at a random but seeded moment.
    Compares weights and losses bit by bit, consumed samples, and the processes and ports that remain.

    Exit status: 0 nothing was lost, 1 something was lost, 2 bad input.
    """
    from paceline.cli.options.launching import read_request
    from paceline.cli.options.plan_options import check_outputs
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
    _check_all(all_plans, record, {"--plan": plan, "--ranks": ranks, "--json": json, "--keep": keep})
    if keep is not None and keep.exists():
        raise RunError(f"{keep} exists already; name a new folder with --keep")
    spec, launch = read_request(target, flags, set or [], steps=STEPS)
    if record is not None:
        raise typer.Exit(_run_all(spec, launch, select_faults(faults), rounds, record))
    prepared = _prepare(spec, launch, keep or choose_path(None, "drill"))
    moments = schedule_faults(select_faults(faults), spec.seed, rounds, prepared.steps, prepared.ranks)
    results, status = _run(prepared, moments, spec.task)
    if json is not None:
        write_whole(json, json_file.dumps(results, indent=1) + "\n")
    if keep is None and not status:
        shutil.rmtree(prepared.folder)
    else:
        print(f"trainings  {prepared.folder}")
    raise typer.Exit(status)


def _check_all(all_plans: bool, record: Path | None, others: dict[str, object]) -> None:
    if all_plans != (record is not None):
        raise SpecError(
            "--all requires --record FILE, where its results are kept; write --all --record drills.jsonl"
            if all_plans
            else f"--record {record} keeps the results of --all; add --all, or leave it out"
        )
    given = next((name for name, value in others.items() if value is not None), None)
    if all_plans and given is not None:
        raise SpecError(f"--all drills under its own plans and keeps results in --record; leave {given} out")


def _run_all(spec: Spec, launch: Launch, faults: list[Fault], rounds: int, record: Path) -> int:
    """Drill under each plan what the file of results lacks, print the table, and return the exit status."""
    from rich.console import Console

    from paceline.drill.all_plans import identify, run_trials
    from paceline.drill.matrix import PLANS, TrialFile

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    with contextlib.ExitStack() as at_end:
        file = at_end.enter_context(contextlib.closing(TrialFile(record)))
        chosen: list[DrillTrial] = []
        at_end.callback(_print_matrix, console, file, chosen, faults)  # also after an interruption
        status = at_end.enter_context(console.status(""))
        todo: list[tuple[Drill, list[tuple[DrillTrial, FaultMoment]]]] = []
        for plan, ranks in PLANS:
            try:
                drill = _prepare(
                    spec, launch.model_copy(update={"plan": plan, "ranks": ranks}), choose_path(None, "drill")
                )
            except (PlanError, LaunchError) as error:
                console.print(f"{plan} on {ranks} ranks is left out: {error}", markup=False)
                continue
            moments = schedule_faults(faults, spec.seed, rounds, drill.steps, ranks)
            trials = [(identify(drill, plan, moment), moment) for moment in moments]
            chosen += [trial for trial, _ in trials]
            todo.append((drill, [entry for entry in trials if entry[0] not in file.results]))
        for drill, trials in todo:
            run_trials(replace(drill, folder=choose_path(None, "drill")), trials, file, status.update)
    results = [file.results[trial] for trial in chosen]
    return int(any(result.verdict == "fails" for result in results))


def _print_matrix(
    console: "Console", file: "TrialFile", chosen: "list[DrillTrial]", faults: list[Fault]
) -> None:
    """Print the results of the drills so far."""
    from rich.table import Table

    from paceline.drill.matrix import build_matrix, describe_failures, summarize

    results = [file.results[trial] for trial in chosen if trial in file.results]
    if len(results) < len(chosen):
        console.print(
            f"{len(results)} of {len(chosen)} drills are done; the same command continues", style="bold red"
        )
    if not results:
        return
    heading, *rows = build_matrix(results, [fault.name for fault in faults])
    table = Table(*heading, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for sentence in describe_failures(results):
        console.print(sentence, markup=False)
    console.print(summarize(results))


def _prepare(spec: Spec, launch: Launch, folder: Path) -> "Drill":
    """Return the drill. Raises an Error for whatever is wrong before the first training."""
    from paceline import task as tasks
    from paceline.distributed.world import read_world
    from paceline.drill.run import Drill
    from paceline.launch.check_launch import check_launch
    from paceline.plan.plan import parse

    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"drill starts the ranks, but {launcher} started this process as a rank; run drill without "
            f"{launcher}"
        )
    if launch.nodes > 1:
        raise LaunchError(f"drill injects faults on one machine, got nodes={launch.nodes}; leave nodes out")
    assert spec.steps is not None
    choose_save_every(spec.steps)
    launch = check_launch(
        spec,
        launch.model_copy(update={"ranks": launch.ranks or RANKS, "run": None, "restarts": 0}),
        read_world(),
    )
    ranks, plan = launch.ranks or RANKS, parse(str(launch.plan))
    if plan.servers is not None:
        raise PlanError(
            f"plan {plan} computes a different result in each training, so drill cannot compare them; use "
            "another plan"
        )
    return Drill(
        spec.model_copy(update={"task": tasks.resolve_reference(spec.task)}),
        launch,
        plan.resolve(ranks),
        folder,
    )


def _run(drill: "Drill", moments: list[FaultMoment], task: str) -> tuple[dict[str, Any], int]:
    """Return the results as JSON, and the exit status."""
    from rich.console import Console

    # SIGTERM ends the trainings, as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False, emoji=False)
    outcomes: list[FaultOutcome] = []
    length = f"{drill.steps} steps of {drill.spec.batch} samples, seed {drill.spec.seed}"
    heading = f"{task}: plan {drill.launch.plan} on {several(drill.ranks, 'rank')}, {length}"
    console.print(heading, markup=False)
    with contextlib.ExitStack() as at_end:
        at_end.callback(_print_outcomes, console, outcomes, len(moments))  # also after an interruption
        status = at_end.enter_context(console.status("undisturbed"))
        reference = drill.run_reference()
        for at, moment in enumerate(moments, 1):
            status.update(f"{at} of {len(moments)}: {moment.fault.name} at step {moment.step}")
            outcomes.append(drill.run_fault(moment, reference, f"{at}-{moment.fault.name}"))
    failed = any(outcome.wrong for outcome in outcomes)
    results = {
        "task": drill.spec.task,
        "plan": drill.launch.plan,
        "ranks": drill.ranks,
        "seed": drill.spec.seed,
        "steps": drill.steps,
        "timeout_s": reference.timeout_s,
        "undisturbed_s": reference.seconds,
        "faults": [outcome.as_json() for outcome in outcomes],
    }
    return results, int(failed)


def _print_outcomes(console: "Console", outcomes: "list[FaultOutcome]", num_faults: int) -> None:
    """Print the outcomes of the faults that were injected so far."""
    from paceline.drill.text import build_sentences, build_summary, build_table

    if len(outcomes) < num_faults:
        console.print(f"ended after {len(outcomes)} of {several(num_faults, 'fault')}", style="bold red")
    if not outcomes:
        return
    console.print(build_table(outcomes))
    for sentence in build_sentences(outcomes):
        console.print(sentence, markup=False, soft_wrap=True)
    failed = any(outcome.wrong for outcome in outcomes)
    console.print(build_summary(outcomes), style="bold red" if failed else "bold green")
