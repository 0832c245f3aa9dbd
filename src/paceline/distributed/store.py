"""Rendezvous stores that listen on one address.

torch 2.13: torch's own stores listen on all interfaces, whatever host they are given.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"
ALL_INTERFACES = ""  # all interfaces
BACKLOG = 2048  # pending connections, for thousands of ranks that connect at once
DEFAULT_TIMEOUT = timedelta(seconds=300)


def open_store(
    host: str = LOOPBACK, port: int = 0, timeout: timedelta = DEFAULT_TIMEOUT, wait_for: int | None = None
) -> dist.TCPStore:
    """Return a store that listens only on the address of `host`.

    port: 0 for any free port.
    wait_for: the number of ranks to wait for, including this rank.

    Raises LaunchError if it cannot listen there.
    """
    if host == LOOPBACK:
        check_loopback()
    try:
        server = _open_socket(host, port)
    except OSError as error:
        where = f"{host or 'any address'}:{port}" if port else host or "any address"
        raise LaunchError(
            f"cannot listen on {where}: {error.strerror}; another training may use the port, or this "
            "machine may not have the address"
        ) from error
    with server:
        return dist.TCPStore(
            host or LOOPBACK,
            server.getsockname()[1],
            wait_for,
            True,
            timeout,
            wait_for_workers=wait_for is not None,
            master_listen_fd=server.detach(),
        )


def check_loopback() -> None:
    """Raise LaunchError if this machine cannot reach itself, as torch would retry for minutes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 9))  # a datagram socket sends nothing
        except OSError as error:
            raise LaunchError(
                f"cannot reach {LOOPBACK}, over which the ranks of a machine communicate: {error.strerror}; "
                "enable the loopback interface: ip link set lo up"
            ) from error


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
    """Return the TCPStore below prefix stores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
