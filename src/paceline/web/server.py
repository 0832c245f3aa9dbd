"""Serve the page on a port of 127.0.0.1 or on a Unix socket that only this user can open."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from paceline.errors import LaunchError
from paceline.files import reason
from paceline.web.access import Access
from paceline.web.app import build_app
from paceline.web.runs import RunList

BACKLOG = 64
MAX_CONNECTIONS = 128


def listen_on_port(port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1. port: 0 takes a free one. Raises LaunchError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on port {port}: {reason(error)}; choose another with --port, or leave --port out"
        ) from error
    return listener


@contextlib.contextmanager
def listen_on_path(path: Path) -> Iterator[socket.socket]:
    """Yield a Unix socket with mode 0600, in a folder with mode 0700 that must not exist yet.

    Raises LaunchError. Folder and socket are deleted at the end."""
    try:
        path.parent.mkdir(mode=0o700)
    except OSError as error:
        raise LaunchError(f"cannot create {path.parent} for a socket: {reason(error)}") from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        yield listener
    except OSError as error:
        raise LaunchError(f"cannot listen on {path}: {reason(error)}") from error
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def serve(
    runs: RunList, access: Access, listener: socket.socket, ends: Callable[[], None] | None = None
) -> None:
    """Answer requests until Ctrl-C, or until `ends` returns. Raises LaunchError if the page was not built."""
    holder: list[uvicorn.Server] = []
    app = build_app(runs, access, lambda: holder[0].should_exit)
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

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


def _wait(ends: Callable[[], None], server: uvicorn.Server) -> None:
    ends()
    server.should_exit = True
