"""paceline tune: search hyper-parameters and architectures."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.request_options import OPTIMIZER_HELP, Set
from paceline.errors import LaunchError, RunError, SpecError

Option = typer.Option
SEARCH, TRIALS = "Search", "Trials"
RESUMABLE = ("trials", "ranks", "max_time")  # what --resume may change


def tune(
    target: Annotated[
        str,
        typer.Argument(
            help="Built-in task, my.py:Class, package.module:Class, a TOML file with the tables "
            "space and tune, or with --resume the folder of a study"
        ),
    ],
    space: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=RANGE",
            help="A parameter: lr=log:1e-4:1e-1, width=int:32:512:32, dropout=float:0:0.5, "
            "optimizer.name=lamb,adamw, or 'depth=int:1:4 if width>64'; may be repeated.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUES",
            help="A parameter of a grid, whose combinations are all trained: seed=1..5, width=32,64; may be "
            "repeated.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        Option(
            help="Objective: 'max accuracy', 'min loss', or measured: 'min step_s', 'min parameters'; may be "
            "repeated [default: min loss]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        Option(help="Number of trials [default: 20, or the whole grid]", rich_help_panel=SEARCH),
    ] = None,
    sampler: Annotated[
        str | None,
        Option(
            help="Sampler: random, quasi-random, grid, or of Optuna tpe, gp, cma-es, nsga2 [default: random]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        Option(
            help="How long trials train: none (all equally), median, asha, hyperband or pbt [default: none]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    reduction: Annotated[
        int | None,
        Option(
            help="With asha and hyperband, one of this many trials is promoted [default: 3]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    rungs: Annotated[
        int | None,
        Option(
            help="Number of lengths of asha and hyperband, each --reduction times longer, or of generations "
            "of pbt [default: 3]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    search_seed: Annotated[
        int | None, Option(help="Seed of the sampler [default: 0]", rich_help_panel=SEARCH)
    ] = None,
    ranks: Annotated[
        int | None,
        Option(help="Number of processes that the trials share [default: 1]", rich_help_panel=SEARCH),
    ] = None,
    ranks_per_trial: Annotated[
        str | None,
        Option(
            metavar="N|auto",
            help="Number of processes of each trial; auto: the least on which it is predicted to fit "
            "[default: 1]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        Option(
            metavar="NAME<VALUE",
            help="Refuse trials whose prediction violates this: 'memory<16GiB', 'step_s<0.1', 'time<1h', "
            "'parameters<1e6'; may be repeated.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    max_time: Annotated[
        str | None,
        Option(
            help="Wall time after which all trials save and the study stops, such as 90m or 4h; --resume "
            "continues [default: no limit]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        Option(help="New folder for the study [default: runs/TASK-tune-TIME]", rich_help_panel=SEARCH),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue the study in the folder TARGET.", rich_help_panel=SEARCH)
    ] = False,
    array: Annotated[
        bool,
        Option(
            "--array",
            help="Train the trials as the tasks of a Slurm job array; see --time and --site.",
            rich_help_panel=SEARCH,
        ),
    ] = False,
    time: Annotated[
        str | None,
        Option(help="With --array: time limit of each task, such as 02:00:00.", rich_help_panel=SEARCH),
    ] = None,
    site: Annotated[
        Path | None, Option(help="With --array: site file, as for submit.", rich_help_panel=SEARCH)
    ] = None,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="With --array: print the job script without submitting it.",
            rich_help_panel=SEARCH,
        ),
    ] = False,
    plan: Annotated[
        str | None,
        Option(help="Plan of each trial, as for train [default: ddp]", rich_help_panel=TRIALS),
    ] = None,
    batch: Annotated[
        int | None,
        Option(help="Number of samples of the global batch [default: 64]", rich_help_panel=TRIALS),
    ] = None,
    epochs: Annotated[
        float | None, Option(help="Length of a trial in epochs [default: 20]", rich_help_panel=TRIALS)
    ] = None,
    steps: Annotated[
        int | None,
        Option(help="Length of a trial in steps, instead of --epochs.", rich_help_panel=TRIALS),
    ] = None,
    lr: Annotated[float | None, Option(help="Learning rate [default: 0.001]", rich_help_panel=TRIALS)] = None,
    optimizer: Annotated[str | None, Option(help=OPTIMIZER_HELP, rich_help_panel=TRIALS)] = None,
    seed: Annotated[
        int | None,
        Option(
            help="Seed of weights, sample order and dropout of each trial [default: 0]",
            rich_help_panel=TRIALS,
        ),
    ] = None,
    set: Set = None,
    device: Annotated[
        str | None, Option(help="Device: cpu or cuda [default: cuda if available]", rich_help_panel=TRIALS)
    ] = None,
) -> None:
    """Search hyper-parameters and architectures.

    Each trial is a training in a run folder of its own. The study continues after any interruption with
    --resume, and paceline show prints its results.

    Exit status: 0 all trials are over, 75 it was stopped and can continue, 2 bad input.
    """
    from paceline.distributed.world import read_world
    from paceline.launch.launchers import check_count
    from paceline.tuning.definition import define_study, read_definition
    from paceline.tuning.folder import create_study, is_study, open_study

    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"tune starts the ranks, but {launcher} started this process as a rank; run tune without "
            f"{launcher}"
        )
    of_array = {"--time": time, "--site": site, "--dry-run": dry_run}
    if not array and (wrong := [name for name, value in of_array.items() if value]):
        raise SpecError(f"{wrong[0]} is for a job array; add --array, or leave it out")
    if array and resume:
        raise SpecError("--array starts a study, and --resume continues one; leave one out")
    ranges = _read_ranges(space or [], grid or [])
    if space and grid and sampler != "grid":
        raise SpecError("--grid and --space contradict each other; use --space only, or --sampler grid")
    search = {
        "metrics": metric or None,
        "trials": trials,
        "sampler": sampler or ("grid" if grid else None),
        "scheduler": scheduler,
        "reduction": reduction,
        "rungs": rungs,
        "seed": search_seed,
        "ranks": ranks,
        "ranks_per_trial": _read_ranks_per_trial(ranks_per_trial),
        "where": where or None,
        "max_time": max_time,
    }
    given = {key: value for key, value in search.items() if value is not None}
    flags = {
        "plan": plan,
        "batch": batch,
        "epochs": epochs,
        "steps": steps,
        "optimizer.lr": lr,
        "optimizer.name": optimizer,
        "seed": seed,
        "device": device,
    }
    if resume:
        folder = open_study(Path(target))
        changed = [key for key, value in flags.items() if value is not None] + list(ranges) + (set or [])
        changed += [key for key in given if key not in RESUMABLE]
        if changed or run_dir is not None:
            raise RunError(
                f"--resume continues {target} as it was defined, got {(changed or ['--run-dir'])[0]}; "
                "leave it out, or start a new study"
            )
        request, ranges, before = read_definition(folder.definition)
        definition = define_study(request, ranges, before | given)
        check_count(definition.search.ranks)
    else:
        if is_study(Path(target)):
            raise RunError(f"{target} is a study; continue it with: paceline tune {target} --resume")
        request, ranges, before = _read_target(target, flags, set or [], ranges)
        definition = define_study(request, ranges, before | given)
        if array:
            _submit_array(definition, run_dir, request["task"], time, site, dry_run)
            return
        check_count(definition.search.ranks)
        folder = create_study(run_dir, request["task"])
        definition.write(folder.definition)
    raise typer.Exit(_run(folder, definition))


def _submit_array(
    definition: Any, run_dir: str | None, task: str, time: str | None, site: Path | None, dry_run: bool
) -> None:
    """Queue the trials as a job array, and print its number; or only print its script."""
    import shutil

    from paceline.errors import Error
    from paceline.tuning.array import plan_array, render_array, submit_array
    from paceline.tuning.folder import choose_study, create_study

    job, settings = plan_array(definition, time, site)
    if dry_run:
        print(render_array(job, settings, choose_study(run_dir, task)), end="")
        return
    folder = create_study(run_dir, task)
    try:
        definition.write(folder.definition)
        number = submit_array(folder, definition, job, settings)
    except (Error, OSError, KeyboardInterrupt):
        shutil.rmtree(folder.path)
        raise
    print(f"{folder.path}: job array {number}, {definition.search.trials} tasks")


def _read_ranks_per_trial(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise SpecError(f"--ranks-per-trial must be a number or auto, got {text!r:.40}")
    return int(text)


def _read_ranges(space: list[str], grid: list[str]) -> dict[str, Any]:
    """Return the ranges of --space and --grid by name. Raises SpecError."""
    import re

    ranges: dict[str, Any] = {}
    for option, items in (("--space", space), ("--grid", grid)):
        for item in items:
            name, equals, text = item.partition("=")
            if not equals or not name.strip() or not text.strip():
                raise SpecError(f"{option} must be NAME=RANGE, such as lr=log:1e-4:1e-1, got {item!r:.80}")
            if name in ranges:
                raise SpecError(f"{option} {name} is given twice; leave one out")
            steps = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text)
            ranges[name] = f"int:{steps[1]}:{steps[2]}" if steps is not None and option == "--grid" else text
    return ranges


def _read_target(
    target: str, flags: dict[str, Any], set: list[str], ranges: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the request, the ranges and the keys of [tune] of a command line. Raises SpecError."""
    from paceline import spec as specs
    from paceline import task as tasks
    from paceline.tuning.definition import override_request, read_definition

    request: dict[str, Any] = {"task": target}
    before: dict[str, Any] = {}
    if target.endswith(".toml"):
        request, file_ranges, before = read_definition(Path(target))
        ranges = file_ranges | ranges
        if "task" not in request:
            raise SpecError(f'{target} names no task; write task = "digits" there, or task = "my.py:Class"')
    given = {key: value for key, value in flags.items() if value is not None}
    assignments = specs.parse_overrides(set)
    for key, value in assignments.items():
        specs.check_same_value(specs.set_key(key), "its own option", given.get(key, value), "--set", value)
    request = override_request(request, specs.replace_length(given | assignments))
    spec, _ = specs.build(request)
    if not isinstance(request["task"], str):
        raise SpecError(f"task must be a name, got {request['task']!r:.80}")
    request["task"] = tasks.resolve_reference(spec.task)
    if spec.set:
        request["set"] = dict(spec.set)
    return request, ranges, before


def _run(folder: Any, definition: Any) -> int:
    """Run a study and return the exit status."""
    from paceline.launch.signals import STOPPED
    from paceline.tuning.controller import Controller
    from paceline.tuning.executor import Executor
    from paceline.tuning.journal import StudyState, Trial
    from paceline.tuning.results import count_states, format_trial, write_best

    def report(state: StudyState, trial: Trial) -> None:
        print(format_trial(definition, trial), flush=True)

    print(f"study {folder.path}", flush=True)
    with Controller(folder, definition, report) as controller:
        definition.write(folder.definition)  # --resume may have changed it
        try:
            is_over = controller.run(Executor(definition.search.ranks))
        finally:
            best = write_best(folder, definition, controller.state)
            print(count_states(controller.state))
        if best is not None:
            print(f"best: {format_trial(definition, best)}")
            print(f"train it again with: paceline train {folder.best}")
    if not is_over:
        print(f"stopped; continue with: paceline tune {folder.path} --resume", file=sys.stderr)
    return 0 if is_over else STOPPED
