"""The command line: one short module per command, which parses options, calls the package and prints.

The module of a command is in the folder of its panel on the help page. What commands share is in `options`.
"""

import errno
import functools
import re
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.errors import Error, SpecError
from paceline.output import ignore_write_errors, open_standard_files, replace_unencodable
from paceline.version import __version__

TRAINING = (
    "train",
    "resume",
    "tune",
    "rank",
    "agent",
    "launcher",
    "monitor",
)  # commands that continue when nobody reads their output

# The commands in the order of the help page, with their panel and the first sentence of their help.
# The module of a command is imported when the command is called: importing all of them takes half a second.
PANELS = {
    "Train": {
        "train": "Train a task on any number of ranks.",
        "resume": "Continue a run from its last complete checkpoint.",
        "evaluate": "Compute loss and metrics of a checkpoint on a split, as the training does.",
        "predict": "Write what a checkpoint predicts for each sample, a line of JSON for each.",
        "generate": "Write texts with the language model of a run of hf:FOLDER.",
        "tune": "Search hyper-parameters and architectures.",
        "export": "Write the weights, the whole model or the adapters of a run.",
        "import-config": "Translate the configuration of DeepSpeed to a request of Paceline.",
    },
    "Plan": {
        "plan": "Predict step time, memory and cost of plans, the fastest first.",
        "scale": "Predict how the step time scales with the number of ranks.",
        "comms": "Show bytes and calls of a training step by collective, mesh axis and module.",
        "batch-size": "Find the batch from which a larger batch no longer pays.",
        "verify": "Check that a plan computes the same training as one process.",
    },
    "Data": {
        "pack": "Pack many small files into few tar shards with an index, or texts into tokens.",
        "unpack": "Restore the files of shards: names, contents and permissions, bit for bit.",
    },
    "Measure": {
        "monitor": "Sample the processors, memory, disks, network and GPUs of this node.",
        "probe": "Show what this machine has: processors, links, network, PyTorch back ends, storage.",
        "bench": "Measure the machine: all benches in under two minutes, or a single bench by its name.",
    },
    "Operate": {
        "preflight": "Check a training before it is queued, from the site file to memory and disk space.",
        "submit": "Queue a training in Slurm, and print the number of the job.",
        "bundle": "Write the packages of this environment to one file, for machines without a network.",
        "status": "Show the state of runs: a line each, with loss, validation metric and throughput.",
        "logs": "Print the output of a run.",
        "cancel": "Stop a run, in Slurm or on this machine.",
        "drill": "Inject faults into a training, and check that nothing is lost.",
    },
    "Inspect": {
        "watch": "Show runs in the browser, live.",
        "show": "Show what happened in a run, or the results of a study.",
        "report": "Write a report of runs as one HTML file that opens without a network.",
        "profile": "Show where the time and memory of a run went, next to the predicted values.",
        "diff": "Name the first step and tensor in which two runs differ.",
        "replay": "Repeat one step of a run on one process.",
        "doctor": "Find out whether a run is stalled, which rank it waits for, and what makes it slow.",
    },
    "Learn": {
        "lesson": "Teach a technique by a lesson that runs on real processes.",
    },
    "Internal": {
        "rank": "Train as one rank of a run.",
        "agent": "Start and restart the ranks of one node.",
        "launcher": "Start and supervise the ranks of a run for a Python process.",
    },
}
COMMANDS = {name: sentence for commands in PANELS.values() for name, sentence in commands.items()}
HIDDEN = tuple(PANELS["Internal"])  # commands that only Paceline starts
# the module of each command below this package: PANEL.COMMAND, or a file in a package of that name
MODULES = {
    name: f"{panel.lower()}.{name.replace('-', '_')}" for panel, names in PANELS.items() for name in names
}
MODULES |= {"bench": "measure.bench.app", "tune": "train.tune.command"}


def _check_repeated_options(command: Any, context: Any, args: list[str]) -> None:
    """Raise SpecError if an option that takes one value has two different values.

    Click uses the last value silently.
    """
    if context.resilient_parsing:  # completion of a command line that is not finished
        return
    parser = command.make_parser(context)
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.multiple and not parameter.count
    ]
    for option in options:  # register the options once more, so that the parser collects all values of each
        if not option.is_flag:
            parser.add_option(option, option.opts, option.name, action="append", nargs=option.nargs)
            continue
        for words in filter(None, (option.opts, option.secondary_opts)):
            parser.add_option(option, words, option.name, action="append_const", const=words[-1])
    values, _, _ = parser.parse_args(list(args))
    if values.get("help"):
        return
    for option in options:
        if len(given := list(dict.fromkeys(values.get(option.name) or ()))) > 1:
            from paceline.spec import abbreviate

            word = "" if option.is_flag else f"{option.opts[-1]} "
            texts = [
                word + abbreviate(" ".join(value) if option.nargs > 1 else value, str) for value in given
            ]
            raise SpecError(f"{' and '.join(texts)} are different values of one option; give only one")


def _escape_markup(command: Any) -> None:
    """Make rich print `[default: 2]` in help texts, which it takes for a tag."""
    for parameter in command.params:
        parameter.help = re.sub(r"(?<!\\)\[", r"\\[", getattr(parameter, "help", None) or "")


class _Command(TyperCommand):
    """A command that refuses two values of an option that takes one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_repeated_options(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _escape_markup(self)
        super().format_help(ctx, formatter)


class _Group(TyperGroup):
    """A command with commands below it, which refuses two values of an option that takes one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_repeated_options(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _escape_markup(self)
        super().format_help(ctx, formatter)


@functools.cache
def load(name: str) -> Any:
    """Return a command with its options, a subclass of click's Command. Imports the module of the command."""
    module = import_module(f"paceline.cli.{MODULES[name]}")
    parent = typer.Typer(rich_markup_mode="rich")
    parent.callback()(lambda: None)
    if name == "bench":
        from paceline.cli.measure.bench import collectives, single

        module.app.command("collectives", cls=_Command)(collectives.collectives)
        for command in (
            single.compute,
            single.overlap,
            single.host,
            single.hierarchy,
            single.storage,
            single.data,
        ):
            module.app.command(cls=_Command)(command)
        parent.add_typer(module.app, name=name, cls=_Group)
    else:
        parent.command(name, hidden=name in HIDDEN, cls=_Command)(getattr(module, name.replace("-", "_")))
    group: Any = typer.main.get_command(parent)
    return group.commands[name]


class _LazyCommands(TyperGroup):
    """All commands by name and first sentence, for help and completion. Only the called command is loaded."""

    def __init__(self, **attrs: Any):
        commands = {
            name: TyperCommand(name, help=help, hidden=name in HIDDEN, rich_help_panel=panel)
            for panel, sentences in PANELS.items()
            for name, help in sentences.items()
        }
        super().__init__(**attrs | {"commands": commands})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None else None, rest


app = typer.Typer(
    name="paceline",
    cls=_LazyCommands,
    help="Plan, run and profile distributed PyTorch training: one task, any number of ranks, the same "
    "result.",
    epilog="Add --debug to any command to see the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line. Print an expected error as one sentence, with exit status 2."""
    open_standard_files()
    ignore_write_errors("stderr", *(["stdout"] if sys.argv[1:2] and sys.argv[1] in TRAINING else []))
    replace_unencodable()
    # the local launcher gives each rank a log of its own, which takes the whole traceback
    has_own_log = sys.argv[1:2] == ["rank"] and len(sys.argv) > 3
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # after it, options of another program
    debug = "--debug" in sys.argv[:end] or has_own_log
    sys.argv = [word for word in sys.argv[:end] if word != "--debug"] + sys.argv[end:]
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
        # an error about a path is expected: a name of 300 characters, a folder without permission
        is_full = error.errno == errno.ENOSPC  # paceline show … > FILE
        if debug or (error.filename is None and not is_full):
            raise
        print(f"paceline: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
