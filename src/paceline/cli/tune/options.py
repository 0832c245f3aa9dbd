"""The options of paceline tune, and the request that they define."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.request_options import OPTIMIZER_HELP, Set
from paceline.errors import SpecError

Option = typer.Option
SEARCH, TRIALS = "Search", "Trials"


@dataclass(frozen=True)
class TuningRequest:
    """What the options of a command line ask for. Options that were not given are left out.

    search: keys of the table [tune].
    flags: keys of the request of all trials.
    ranges: the range of each parameter by name.
    assignments: NAME=VALUE of --set.
    """

    target: str
    search: Mapping[str, Any]
    flags: Mapping[str, Any]
    ranges: Mapping[str, Any]
    assignments: list[str]
    run_dir: str | None
    is_resume: bool
    is_array: bool
    time: str | None
    site: Path | None
    is_dry_run: bool

    @property
    def job_options(self) -> list[str]:
        """The given options that apply only to a Slurm job."""
        given = {"--time": self.time, "--site": self.site, "--dry-run": self.is_dry_run}
        return [name for name, value in given.items() if value]


def read_options(
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
    nodes: Annotated[
        int | None,
        Option(
            help="Number of nodes of a Slurm job or Ray cluster, over which --ranks are spread evenly. "
            "Outside of an allocation, the study is queued as a job [default: 1]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        Option(
            help="What starts the trials: local, slurm or ray [default: slurm with several --nodes, else "
            "local]",
            rich_help_panel=SEARCH,
        ),
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
        Option(
            help="Time limit of the Slurm job, such as 02:00:00; with --array of each task. The study saves "
            "before it, and is queued again.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    site: Annotated[
        Path | None, Option(help="Site file of a Slurm job, as for submit.", rich_help_panel=SEARCH)
    ] = None,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Print the script of the Slurm job without submitting it.",
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
) -> TuningRequest:
    """Return the request of these options. Raises SpecError."""
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
        "nodes": nodes,
        "launcher": launcher or ("slurm" if (nodes or 1) > 1 else None),
        "ranks_per_trial": _read_ranks_per_trial(ranks_per_trial),
        "where": where or None,
        "max_time": max_time,
    }
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
    return TuningRequest(
        target,
        _select_given(search),
        _select_given(flags),
        _read_ranges(space or [], grid or []),
        set or [],
        run_dir,
        resume,
        array,
        time,
        site,
        dry_run,
    )


def with_tuning_options(command: Callable[[TuningRequest], None]) -> Callable[..., None]:
    """Decorate `command(request)`, so that typer sees the options of a study."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        command(read_options(**values))

    setattr(wrapper, "__signature__", inspect.signature(read_options))  # noqa: B010 (typer reads it)
    return wrapper


def _select_given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _read_ranks_per_trial(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise SpecError(f"--ranks-per-trial must be a number or auto, got {text!r:.40}")
    return int(text)


def _read_ranges(space: list[str], grid: list[str]) -> dict[str, Any]:
    """Return the ranges of --space and --grid by name. Raises SpecError."""
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
