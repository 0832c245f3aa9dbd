"""The command line: one short file per command; each parses, calls and prints."""

import sys

import typer

from paceline.cli import (
    account,
    agent,
    bench,
    bench_collectives,
    benches,
    cancel,
    doctor,
    drill,
    export,
    ledger,
    logs,
    plan,
    preflight,
    probe,
    rank,
    resume,
    scale,
    show,
    status,
    submit,
    train,
    verify,
)
from paceline.errors import Error
from paceline.output import never_fail, open_standard_files

TRAINING = ("train", "resume", "rank", "agent")  # commands that nothing printed may end

app = typer.Typer(
    name="paceline",
    help="Plan, run and account for distributed PyTorch training: one task, any number of ranks, the same result.",
    epilog="--debug behind any command shows where an error came from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (
    *(train, resume, preflight, submit, status, logs, cancel, show, doctor),
    *(export, verify, drill, ledger, plan, account, scale, probe),
):
    app.command()(getattr(command, command.__name__.rpartition(".")[2]))
bench.app.command("collectives")(bench_collectives.collectives)
bench.app.command()(benches.compute)
bench.app.command()(benches.overlap)
bench.app.command()(benches.host)
bench.app.command()(benches.storage)
bench.app.command("input")(benches.input_)
app.add_typer(bench.app, name="bench")
app.command(hidden=True)(rank.rank)
app.command(hidden=True)(agent.agent)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    pass


def main() -> None:
    """The top of the command line: an error that is meant is one sentence and exit status 2."""
    open_standard_files()
    never_fail("stderr", *(["stdout"] if sys.argv[1:2] and sys.argv[1] in TRAINING else []))
    own_log = sys.argv[1:2] == ["rank"] and len(sys.argv) > 3  # of a rank of our launcher on this machine: it says all
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
        if debug or error.filename is None:  # else of a path: a name of 300 characters, a folder that others may not enter
            raise
        print(f"paceline: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
