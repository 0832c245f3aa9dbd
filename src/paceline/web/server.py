"""Serve the page with uvicorn."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable

import uvicorn

from paceline.web.access import Access
from paceline.web.app import StudyPanel, build_app
from paceline.web.runs import RunList

MAX_CONNECTIONS = 128


def serve(
    runs: RunList,
    access: Access,
    listener: socket.socket,
    ends: Callable[[], object] | None = None,
    study: Callable[[], StudyPanel | None] = lambda: None,
) -> None:
    """Answer requests until Ctrl-C, or until `ends` returns. Raises LaunchError if the page was not built.

    study: see `build_app`.
    """
    holder: list[uvicorn.Server] = []
    app = build_app(runs, access, lambda: holder[0].should_exit, study)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,  # it would contain the token
        log_level="error",
        server_header=False,
        date_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    holder.append(server)

    async def run() -> None:
        if ends is not None:
            threading.Thread(target=_wait, args=(ends, server), daemon=True).start()
        await server.serve(sockets=[listener])

    # uvicorn ends the server at SIGTERM, and raises the signal again: then the caller can clean up.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


def _wait(ends: Callable[[], object], server: uvicorn.Server) -> None:
    ends()
    server.should_exit = True
