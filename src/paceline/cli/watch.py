"""paceline watch: show runs in the browser, live."""

import sys
from pathlib import Path
from typing import Annotated

import typer


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
    program: Annotated[
        str,
        typer.Option(metavar="COMMAND", help="Command of Paceline on HOST [default: paceline]."),
    ] = "paceline",
    until_eof: Annotated[
        bool, typer.Option("--until-eof", hidden=True, help="End at the end of the standard input.")
    ] = False,
) -> None:
    """Show runs in the browser, live. Prints one address, which only works for you; Ctrl-C ends it."""
    from paceline.errors import LaunchError, RunError, SpecError
    from paceline.web.listeners import listen_on_path, listen_on_port
    from paceline.web.ssh import parse_remote, watch_remote

    if socket is not None and port:
        raise SpecError("--port and --socket contradict each other; give only one of them")
    path = Path(runs)
    if socket is None and (remote := parse_remote(runs)) is not None:
        watch_remote(*remote, program, port)
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
    from paceline.web.runs import RunList

    access, run_list = Access(), RunList(path)
    if socket is not None:
        with listen_on_path(socket) as listener:
            print(f"listening on {socket}: {access.url('localhost')}", flush=True)
            server.serve(run_list, access, listener, sys.stdin.buffer.read if until_eof else None)
        return
    listener = listen_on_port(port)
    with listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        print(f"{access.url(host)}\nCtrl-C ends it; training is not affected", flush=True)
        server.serve(run_list, access, listener)
