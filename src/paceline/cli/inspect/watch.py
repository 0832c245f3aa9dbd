"""paceline watch: show runs in the browser or in the terminal, live."""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options.plan_options import Price

METRICS = "Metrics for Prometheus"


def watch(
    runs: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Folder of a run, folder that contains runs, or HOST:PATH, which is read through ssh.",
        ),
    ] = "runs",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1 [default: a free port].")
    ] = 0,
    socket: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Listen on this Unix socket instead of a port. Its folder is created for it.",
        ),
    ] = None,
    terminal: Annotated[
        bool,
        typer.Option(
            "--terminal",
            help="Show them in this terminal. Without a terminal, print lines until the runs end.",
        ),
    ] = False,
    program: Annotated[
        str,
        typer.Option(metavar="COMMAND", help="Command of Paceline on HOST [default: paceline]."),
    ] = "paceline",
    metrics: Annotated[
        bool,
        typer.Option("--metrics", help="Answer /metrics for Prometheus.", rich_help_panel=METRICS),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token of /metrics, created if missing [default: the token of the page].",
            rich_help_panel=METRICS,
        ),
    ] = None,
    textfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.prom",
            help="Write the metrics to this file every 15 s, for the textfile collector of node_exporter.",
            rich_help_panel=METRICS,
        ),
    ] = None,
    grafana: Annotated[
        bool,
        typer.Option("--grafana", help="Print a Grafana dashboard, and exit.", rich_help_panel=METRICS),
    ] = False,
    price: Price = None,
    until_eof: Annotated[
        bool, typer.Option("--until-eof", hidden=True, help="End at the end of the standard input.")
    ] = False,
) -> None:
    """Show runs in the browser, live. Prints one address, which only works for you; Ctrl-C ends it.

    With --terminal, show them in the terminal instead.
    """
    from paceline.cli.options.plan_options import check_positive
    from paceline.errors import LaunchError, RunError, SpecError
    from paceline.tuning.folder import StudyFolder, is_study
    from paceline.tuning.report.live import StudyWatch
    from paceline.web.listeners import listen_on_path, listen_on_port
    from paceline.web.ssh import parse_remote, watch_remote

    if socket is not None and port:
        raise SpecError("--port and --socket contradict each other; give only one of them")
    if grafana:
        from paceline.web.metrics.grafana import read_dashboard

        print(read_dashboard(), end="")
        return
    check_positive(price=price)
    if token_file is not None and not metrics:
        raise SpecError("--token-file requires --metrics; add it")
    path, study = Path(runs), None
    if is_study(path):
        study, path, runs = StudyWatch(StudyFolder(path)), path / "trials", str(path / "trials")
    if terminal:
        serving = {"--port": port, "--socket": socket, "--metrics": metrics, "--textfile": textfile}
        _watch_in_terminal(runs, price, [name for name, value in serving.items() if value])
    if socket is None and (remote := parse_remote(runs)) is not None:
        for option, value in (("--token-file", token_file), ("--textfile", textfile)):
            if value is not None:
                raise SpecError(
                    f"{option} requires a folder of this machine; run paceline watch on {remote[0]}"
                )
        options = ["--metrics"] if metrics else []
        options += ["--price", str(price)] if price is not None else []
        watch_remote(*remote, program, port, options)
        return
    if not path.is_dir():
        raise RunError(f"no such folder: {path}; specify the folder of a run, or one that contains runs")
    try:
        from paceline.web import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "paceline":
            raise
        raise LaunchError(
            f'paceline watch requires {error.name}, which is not installed; pip install "paceline[web]"'
        ) from None
    from paceline.web.access import Access
    from paceline.web.metrics import token_file as token_files
    from paceline.web.metrics.collector import MetricsCollector
    from paceline.web.metrics.textfile import write_regularly
    from paceline.web.precedence import give_way
    from paceline.web.runs import RunList

    give_way()
    access, run_list = Access(), RunList(path, price)
    run_list.prefetch()
    if metrics:
        token = token_files.read_or_create(token_file) if token_file is not None else access.token
        access = dataclasses.replace(access, metrics_token=token)
    with contextlib.ExitStack() as stack:
        if socket is not None:
            listener = stack.enter_context(listen_on_path(socket))
            print(f"listening on {socket}: {access.url('localhost')}", flush=True)
        else:
            listener = stack.enter_context(listen_on_port(port))
            host = f"127.0.0.1:{listener.getsockname()[1]}"
            print(f"{access.url(host)}\nCtrl-C ends it; training is not affected", flush=True)
            if metrics:
                print(f"metrics: http://{host}/metrics", flush=True)
        if textfile is not None:
            stack.enter_context(write_regularly(textfile, MetricsCollector(run_list).collect))
        ends = sys.stdin.buffer.read if until_eof else None
        server.serve(run_list, access, listener, ends, study or (lambda: None))


def _watch_in_terminal(runs: str, price: float | None, serving: list[str]) -> None:
    """Show runs in the terminal until the user quits, or print lines until the runs end.

    serving: options that were given and make sense for a server only."""
    from paceline.errors import LaunchError, RunError, SpecError
    from paceline.terminal import follow
    from paceline.web.precedence import NICENESS
    from paceline.web.runs import RunList
    from paceline.web.ssh import parse_remote

    if serving:
        raise SpecError(f"--terminal starts no server; leave out {' and '.join(serving)}")
    path = Path(runs)
    if (remote := parse_remote(runs)) is not None:
        host, there = remote
        raise SpecError(
            f"--terminal shows runs of this machine; for runs of {host} use: "
            f"ssh -t {host} paceline watch {there or 'runs'} --terminal"
        )
    if not path.is_dir():
        raise RunError(f"no such folder: {path}; specify the folder of a run, or one that contains runs")
    if not follow.is_screen():
        raise typer.Exit(follow.follow(RunList(path, price)))
    os.nice(NICENESS)  # the terminal belongs to this session
    try:
        from paceline.terminal import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "paceline":
            raise
        raise LaunchError(
            f'--terminal requires {error.name}, which is not installed; pip install "paceline[tui]"'
        ) from None
    raise typer.Exit(app.show(RunList(path, price)))
