"""The options of paceline tune, as types of its parameters."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options.option_types import OPTIMIZER_HELP

Option = typer.Option
SEARCH, TRIALS = "Search", "Trials"

Target = Annotated[
    str,
    typer.Argument(
        help="Built-in task, my.py:Class, package.module:Class, a TOML file with the tables "
        "space and tune, or with --resume the folder of a study"
    ),
]
Space = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=RANGE",
        help="A parameter: lr=log:1e-4:1e-1, width=int:32:512:32, dropout=float:0:0.5, "
        "optimizer.name=lamb,adamw, or 'depth=int:1:4 if width>64'; may be repeated.",
        rich_help_panel=SEARCH,
    ),
]
Grid = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=VALUES",
        help="A parameter of a grid, whose combinations are all trained: seed=1..5, width=32,64; may be "
        "repeated.",
        rich_help_panel=SEARCH,
    ),
]
Metric = Annotated[
    list[str] | None,
    Option(
        help="Objective: 'max accuracy', 'min loss', or measured: 'min step_s', 'min parameters'; may be "
        "repeated [default: min loss]",
        rich_help_panel=SEARCH,
    ),
]
Trials = Annotated[
    int | None,
    Option(help="Number of trials [default: 20, or the whole grid]", rich_help_panel=SEARCH),
]
Sampler = Annotated[
    str | None,
    Option(
        help="Sampler: random, quasi-random, grid, or of Optuna tpe, gp, cma-es, nsga2 [default: random]",
        rich_help_panel=SEARCH,
    ),
]
Scheduler = Annotated[
    str | None,
    Option(
        help="How long trials train: none (all equally), median, asha, hyperband or pbt [default: none]",
        rich_help_panel=SEARCH,
    ),
]
Reduction = Annotated[
    int | None,
    Option(
        help="With asha and hyperband, one of this many trials is promoted [default: 3]",
        rich_help_panel=SEARCH,
    ),
]
Rungs = Annotated[
    int | None,
    Option(
        help="Number of lengths of asha and hyperband, each --reduction times longer, or of generations "
        "of pbt [default: 3]",
        rich_help_panel=SEARCH,
    ),
]
SearchSeed = Annotated[int | None, Option(help="Seed of the sampler [default: 0]", rich_help_panel=SEARCH)]
Ranks = Annotated[
    int | None,
    Option(help="Number of processes that the trials share [default: 1]", rich_help_panel=SEARCH),
]
Nodes = Annotated[
    int | None,
    Option(
        help="Number of nodes of a Slurm job or Ray cluster, over which --ranks are spread evenly. "
        "Outside of an allocation, the study is queued as a job [default: 1]",
        rich_help_panel=SEARCH,
    ),
]
Launcher = Annotated[
    str | None,
    Option(
        help="What starts the trials: local, slurm or ray [default: slurm with several --nodes, else local]",
        rich_help_panel=SEARCH,
    ),
]
RanksPerTrial = Annotated[
    str | None,
    Option(
        metavar="N|auto",
        help="Number of processes of each trial; auto: the least on which it is predicted to fit "
        "[default: 1]",
        rich_help_panel=SEARCH,
    ),
]
Where = Annotated[
    list[str] | None,
    Option(
        metavar="NAME<VALUE",
        help="Refuse trials whose prediction violates this: 'memory<16GiB', 'step_s<0.1', 'time<1h', "
        "'parameters<1e6'; may be repeated.",
        rich_help_panel=SEARCH,
    ),
]
MaxTime = Annotated[
    str | None,
    Option(
        help="Wall time after which all trials save and the study stops, such as 90m or 4h; --resume "
        "continues [default: no limit]",
        rich_help_panel=SEARCH,
    ),
]
RunDir = Annotated[
    str | None,
    Option(help="New folder for the study [default: runs/TASK-tune-TIME]", rich_help_panel=SEARCH),
]
Resume = Annotated[
    bool, Option("--resume", help="Continue the study in the folder TARGET.", rich_help_panel=SEARCH)
]
Array = Annotated[
    bool,
    Option(
        "--array",
        help="Train the trials as the tasks of a Slurm job array; see --time and --site.",
        rich_help_panel=SEARCH,
    ),
]
Time = Annotated[
    str | None,
    Option(
        help="Time limit of the Slurm job, such as 02:00:00; with --array of each task. The study saves "
        "before it, and is queued again.",
        rich_help_panel=SEARCH,
    ),
]
Site = Annotated[Path | None, Option(help="Site file of a Slurm job, as for submit.", rich_help_panel=SEARCH)]
DryRun = Annotated[
    bool,
    Option(
        "--dry-run",
        help="Print the script of the Slurm job without submitting it.",
        rich_help_panel=SEARCH,
    ),
]
Plan = Annotated[
    str | None,
    Option(help="Plan of each trial, as for train [default: ddp]", rich_help_panel=TRIALS),
]
Batch = Annotated[
    int | None,
    Option(help="Number of samples of the global batch [default: 64]", rich_help_panel=TRIALS),
]
Epochs = Annotated[
    float | None, Option(help="Length of a trial in epochs [default: 20]", rich_help_panel=TRIALS)
]
Steps = Annotated[
    int | None,
    Option(help="Length of a trial in steps, instead of --epochs.", rich_help_panel=TRIALS),
]
Lr = Annotated[float | None, Option(help="Learning rate [default: 0.001]", rich_help_panel=TRIALS)]
Optimizer = Annotated[str | None, Option(help=OPTIMIZER_HELP, rich_help_panel=TRIALS)]
Seed = Annotated[
    int | None,
    Option(
        help="Seed of weights, sample order and dropout of each trial [default: 0]",
        rich_help_panel=TRIALS,
    ),
]
Device = Annotated[
    str | None, Option(help="Device: cpu or cuda [default: cuda if available]", rich_help_panel=TRIALS)
]
