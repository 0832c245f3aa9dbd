"""Stores at which processes meet. torch's own listen on all interfaces, whatever host they are given (torch 2.13); these do not."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"
ALL_INTERFACES = ""  # all interfaces
BACKLOG = 2048  # connections that wait to be taken, when thousands of ranks come at once
DEFAULT_TIMEOUT = timedelta(seconds=300)


def open_store(
    host: str = LOOPBACK, port: int = 0, timeout: timedelta = DEFAULT_TIMEOUT, wait_for: int | None = None
) -> dist.TCPStore:
    """Open a store that listens on the address of `host` alone; port 0: a free one. `wait_for`: so many ranks, this one included."""
    try:
        listening = _open_socket(host, port)
    except OSError as error:
        where = f"{host or 'any address'}:{port}" if port else host or "any address"
        raise LaunchError(
            f"cannot listen on {where}: {error.strerror}; is another training there, or does this machine not have it?"
        ) from error
    with listening:
        return dist.TCPStore(
            host or LOOPBACK,
            listening.getsockname()[1],
            wait_for,
            True,
            timeout,
            wait_for_workers=wait_for is not None,
            master_listen_fd=listening.detach(),
        )


def _open_socket(host: str, port: int) -> socket.socket:
    if host == ALL_INTERFACES and socket.has_dualstack_ipv6():
        return socket.create_server(
            (host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    family, *_, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def unwrap_store(store: dist.Store) -> Any:
    """The TCPStore under prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
