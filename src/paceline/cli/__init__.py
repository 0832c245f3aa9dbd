"""The command line: one short file per command; each parses, calls and prints."""

import functools
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.errors import Error
from paceline.output import ignore_write_errors, open_standard_files, replace_unencodable
from paceline.version import __version__

TRAINING = ("train", "resume", "rank", "agent")  # commands that nothing printed may end

# Each command, the function of its name in the module of its name, with the first sentence of its help. Its module is imported when it is
# called: all of them take half a second.
COMMANDS = {
    "train": "Train a task.",
    "resume": "Go on with a run from its last whole checkpoint, to the end that was asked for.",
    "preflight": "Look at a training before it is queued: site file and Slurm, task and data, the plan built, memory, room and time.",
    "submit": "Queue a training in Slurm, and print the number of the job.",
    "status": "Say how runs are: a line for each, with the last loss, the metric by which a checkpoint is best, and the speed.",
    "logs": "Print what a training said: in Slurm the output of its last job.",
    "cancel": "End a training, in Slurm or on this machine.",
    "show": "Show what happened in a run.",
    "doctor": "Say why a run does not go on.",
    "export": "Write the whole weights under the model's own parameter names.",
    "verify": "Hold plans against one process, step by step: loss, gradients, norm, parameters.",
    "drill": "Train undisturbed, then once for each fault, and compare what came of it.",
    "comms": "Show bytes and calls of a training step by collective, mesh axis and module.",
    "plan": "Predict step time, memory and cost of plans, the fastest that fits first.",
    "profile": "Show where the time and memory of a run went, part by part, beside what is predicted.",
    "scale": "Predict how a training scales: the best plan for each number of ranks, for one batch and for one batch a rank.",
    "probe": "Show what this machine is: processors, links, network, PyTorch's back ends, storage.",
    "bench": "Measure the machine: all that fits into two minutes, or one bench by its name.",
    "rank": "Train as the rank that the environment says.",
    "agent": "Train as the node that the environment says.",
}
HIDDEN = ("rank", "agent")  # that only Paceline starts
MODULES = {"bench": "bench.app"} | {
    name: f"internal.{name}" for name in HIDDEN
}  # where a module has another name than its command


@functools.cache
def load(name: str) -> Any:
    """Return a command with all that it takes, a subclass of click's Command."""
    module, beside = (
        import_module(f"paceline.cli.{MODULES.get(name, name)}"),
        typer.Typer(rich_markup_mode="rich"),
    )
    beside.callback()(lambda: None)
    if name == "bench":
        from paceline.cli.bench import collectives, single

        module.app.command("collectives")(collectives.collectives)
        for command in (single.compute, single.overlap, single.host, single.storage):
            module.app.command()(command)
        module.app.command("input")(single.input_)
        beside.add_typer(module.app, name=name)
    else:
        beside.command(name, hidden=name in HIDDEN)(getattr(module, name))
    group: Any = typer.main.get_command(beside)
    return group.commands[name]


class _Commands(TyperGroup):
    """Help, completion and suggestions know the commands by their names and first sentences; the one that is called is loaded."""

    def __init__(self, **attrs: Any):
        commands = {
            name: TyperCommand(name, help=help, hidden=name in HIDDEN) for name, help in COMMANDS.items()
        }
        super().__init__(**attrs | {"commands": commands})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None else None, rest


app = typer.Typer(
    name="paceline",
    cls=_Commands,
    help="Plan, run and account for distributed PyTorch training: one task, any number of ranks, the same result.",
    epilog="--debug behind any command shows where an error came from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """The top of the command line: an error that is meant is one sentence and exit status 2."""
    open_standard_files()
    ignore_write_errors("stderr", *(["stdout"] if sys.argv[1:2] and sys.argv[1] in TRAINING else []))
    replace_unencodable()
    own_log = (
        sys.argv[1:2] == ["rank"] and len(sys.argv) > 3
    )  # of a rank of our launcher on this machine: it says all
    debug = "--debug" in sys.argv or own_log
    sys.argv = [word for word in sys.argv if word != "--debug"]
    try:
        app()
    except Error as error:
        if debug:
            raise
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # paceline show … | head
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if (
            debug or error.filename is None
        ):  # else of a path: a name of 300 characters, a folder that others may not enter
            raise
        print(f"paceline: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
