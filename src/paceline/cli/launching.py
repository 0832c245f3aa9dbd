"""What the commands share: read a request, check it before anything starts, then become a rank or start some."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

from paceline import spec as specs
from paceline import task
from paceline.distributed.world import World
from paceline.errors import LaunchError, SpecError
from paceline.launch.launchers import is_rank, starter
from paceline.launch.slurm.job_script import alike
from paceline.plan.plan import AUTO, Plan, ResolvedPlan, read_plan
from paceline.run import RunFolder
from paceline.spec import Launch, Spec


def read(
    target: str, flags: Mapping[str, Any], set: list[str], steps: int | None = None
) -> tuple[Spec, Launch]:
    """The request of a command line: a task or a TOML file, and over it the flags that are not None and NAME=VALUE.

    steps: the length of the training where neither a flag nor `set` gives it, whatever the file says.
    Raises SpecError, also where two of them give a key two values."""
    file = Path(target) if target.endswith(".toml") else None
    given = {key: value for key, value in flags.items() if value is not None}
    if file is None and target != Spec.model_fields["task"].default:
        given["task"] = target
    also = specs.parse_overrides(set)
    for key, value in also.items():
        specs.check_same_value(
            specs.set_key(key), "its own option or argument", given.get(key, value), "--set", value
        )
    overrides = given | also
    if steps is not None:
        overrides.setdefault("steps", steps)
    if file is not None and "task" not in overrides and "task" not in specs.read_toml(file):
        raise SpecError(f'{file} names no task; write task = "digits" there, or task = "my.py:Class"')
    return specs.load(file, specs.replace_length(overrides))


def announce(me: World) -> None:
    """Print that something happens while PyTorch is imported, for seconds."""
    if me.rank == 0 and "torch" not in sys.modules:
        print("starting: importing PyTorch and the task", flush=True)


def check(spec: Spec, launch: Launch, me: World) -> Launch:
    """The launch with ranks and plan said. Raises the Error of what can be known to go wrong without starting anything."""
    if me.launcher is None:
        starter(launch).check(launch)
    launch, plan, work = say(spec, launch, me)
    if me.launcher is None and (plan.splits_model or plan.cp > 1):  # what only the model can tell
        from paceline.training.setup import validate_plan

        validate_plan(spec, plan, work)
    return launch


def say(spec: Spec, launch: Launch, me: World) -> tuple[Launch, ResolvedPlan, task.Task]:
    """The launch with ranks and plan said, that plan resolved, and the task; the model is not looked at."""
    if me.launcher is not None and launch.ranks not in (None, me.size):
        raise LaunchError(
            f"--ranks {launch.ranks}, but {me.launcher} started {me.size}; leave --ranks out, or start {launch.ranks} there"
        )
    work = task.load_task(spec.task, spec.set)
    ranks = me.size if me.launcher is not None else launch.ranks or launch.nodes * _devices(launch.device)
    if me.launcher is None:
        alike(ranks, launch.nodes)
    if launch.plan == AUTO and me.launcher is None:
        from paceline.training.auto_plan import choose

        choice = choose(spec, work, ranks, launch.device)
        launch = launch.model_copy(update={"plan": str(choice.plan), "chosen": choice.why, "asked": AUTO})
    if launch.plan == AUTO:  # the ranks will choose it together
        return launch.model_copy(update={"ranks": ranks}), Plan().resolve(ranks), work
    plan, on = read_plan(launch.plan, ranks, spec.batch)
    return launch.model_copy(update={"ranks": ranks, "plan": str(plan)}), on, work


def _devices(device: str | None) -> int:
    import torch

    return max(1, torch.cuda.device_count()) if device != "cpu" else 1


def start(spec: Spec, launch: Launch, me: World, run: RunFolder | None) -> NoReturn:
    """Train and exit with its status. `run`: the folder with the request; None: one is made with the first event."""
    if is_rank(launch, me):
        from paceline.launch.rank_main import run_alone

        raise typer.Exit(run_alone(spec, launch, me, run))
    assert run is not None
    raise typer.Exit(starter(launch).start(run, launch))


def has_started(run: RunFolder) -> bool:
    from paceline.events import Started, last

    return bool(last(run.events, Started))
