"""A port of 127.0.0.1, or a Unix socket that only this user can open."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import LaunchError
from paceline.files import reason

BACKLOG = 64


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
