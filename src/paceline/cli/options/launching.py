"""What commands share: read a request, become a rank or start the ranks."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from paceline import spec as specs
from paceline.distributed.world import World, read_world
from paceline.errors import SpecError
from paceline.launch.launchers import find_launcher, is_rank
from paceline.run import RunFolder
from paceline.spec import Launch, Spec

if TYPE_CHECKING:
    from paceline.launch.fork_server import RankForkServer


def read_request(
    target: str, flags: Mapping[str, Any], set: list[str], steps: int | None = None, resolves: bool = True
) -> tuple[Spec, Launch]:
    """Return the request of a command line.

    target: a task or a TOML file.
    flags: values of options by key; None stands for an option that is not given. They take precedence over
        the file.
    set: `NAME=VALUE` of --set. They take precedence over the file.
    steps: the length if neither a flag nor `set` gives it, whatever the file has.
    resolves: whether the precision "auto" is chosen for this machine.
    Raises SpecError, also if a key has two values.
    """
    file = Path(target) if target.endswith(".toml") else None
    given = {key: value for key, value in flags.items() if value is not None}
    if file is None and target != Spec.model_fields["task"].default:
        given["task"] = target
    assignments = specs.parse_overrides(set)
    for key, value in assignments.items():
        specs.check_same_value(
            specs.set_key(key), "its own option or argument", given.get(key, value), "--set", value
        )
    overrides = given | assignments
    if steps is not None:
        overrides.setdefault("steps", steps)
    if file is not None and "task" not in overrides and "task" not in specs.read_toml(file):
        raise SpecError(f'{file} names no task; write task = "digits" there, or task = "my.py:Class"')
    spec, launch = specs.load(file, specs.replace_length(overrides))
    return (resolve_precision(spec, launch) if resolves else spec), launch


def resolve_precision(spec: Spec, launch: Launch) -> Spec:
    """Return the request with the precision of this machine in place of "auto", and print the choice.

    Raises SpecError if the ranks run on other machines.
    """
    from paceline.cluster.precision import AUTO, choose_precision

    if spec.precision != AUTO:
        return spec
    me = read_world()
    if launch.nodes > 1 or launch.launcher not in (None, "local") or me.size > me.local_size:
        raise SpecError(
            "--precision auto chooses for this machine, and the ranks run on others; "
            "specify bf16, fp16 or fp32"
        )
    choice = choose_precision(launch.device)
    if me.rank == 0:
        print(f"precision {choice.precision}: {choice.why}", flush=True)
    return spec.model_copy(update={"precision": choice.precision})


def announce_start(me: World, file: TextIO | None = None) -> None:
    """Print a line before PyTorch is imported, which takes seconds. file: None: standard output."""
    if me.rank == 0 and "torch" not in sys.modules:
        print("starting: importing PyTorch and the task", file=file, flush=True)


def start(
    spec: Spec, launch: Launch, me: World, run: RunFolder | None, early: "RankForkServer | None" = None
) -> NoReturn:
    """Train, and exit with the status of the training.

    run: the folder with the request. A rank of another launcher may pass None: the first event then creates
        the folder.
    early: a fork server that was started before the run folder existed.
    """
    if is_rank(launch, me):
        from paceline.launch.rank_main import run_alone

        raise typer.Exit(run_alone(spec, launch, me, run))
    assert run is not None
    if early is not None:
        from paceline.launch import local
        from paceline.launch.fork_server import move_log

        move_log(run)
        raise typer.Exit(local.start(run, launch.ranks or 1, launch.restarts, early=early))
    raise typer.Exit(find_launcher(launch).start(run, launch))


def has_started(run: RunFolder) -> bool:
    """Return whether a training of this run has started."""
    from paceline.events import Started, last

    return bool(last(run.events, Started))
