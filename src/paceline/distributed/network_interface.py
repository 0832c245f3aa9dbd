"""The network interface over which the ranks of several machines communicate.

gloo uses the interface of the address of the machine's host name. On Debian that address is 127.0.1.1 and in
many containers there is none, so other machines would connect to themselves.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping

import psutil
import torch.distributed as dist

from paceline.distributed.store import ALL_INTERFACES, check_loopback, unwrap_store
from paceline.errors import LaunchError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
REMOTE_ADDRESS_KEY, CHECKED_IN_KEY, ALL_CHECKED_IN_KEY = (
    "paceline/remote address",
    "paceline/checked in",
    "paceline/all checked in",
)


def check_interfaces(environ: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError if a variable names an interface that this machine does not have."""
    interfaces = [*psutil.net_if_addrs()]
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    missing = [("GLOO_SOCKET_IFNAME", name) for name in gloo.split(",") if name and name not in interfaces]
    if (
        nccl
        and not nccl.startswith("^")
        and not any(_matches_nccl_pattern(name, nccl) for name in interfaces)
    ):
        missing.append(("NCCL_SOCKET_IFNAME", nccl))
    for variable, name in missing:
        raise LaunchError(
            f"{variable}={name}, but {socket.gethostname()} has no such interface, only "
            f"{', '.join(interfaces)}; set another, or unset the variable"
        )


def _matches_nccl_pattern(name: str, pattern: str) -> bool:
    """Return whether NCCL's pattern matches an interface: whole names after "=", else prefixes."""
    return (
        name in pattern[1:].split(",")
        if pattern.startswith("=")
        else name.startswith(tuple(pattern.split(",")))
    )


def choose_interface(store: dist.Store, size: int) -> None:
    """Let gloo use the interface that reaches the ranks of other machines, unless the user has set another.

    All `size` ranks of a store call this. Without other machines it changes nothing.
    """
    master = unwrap_store(store)
    address = find_local_address(master.host, master.port)
    if not _is_loopback(address):
        store.set(REMOTE_ADDRESS_KEY, address)
    if store.add(CHECKED_IN_KEY, 1) == size:
        store.set(ALL_CHECKED_IN_KEY, "")
    if _is_loopback(address):  # the store is on this machine
        store.wait([ALL_CHECKED_IN_KEY])
        if not store.check([REMOTE_ADDRESS_KEY]):
            return
        address = find_local_address(store.get(REMOTE_ADDRESS_KEY).decode(), master.port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("TP_SOCKET_IFNAME", chosen.partition(",")[0])


def use_loopback() -> None:
    """Let gloo, torch's RPC and NCCL use the loopback interface, unless the user has set another.

    For ranks that are all on this machine. Raises LaunchError if no interface is set, and loopback is down.
    """
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in psutil.net_if_addrs().items():
        if name in up and any(
            entry.family == socket.AF_INET and _is_loopback(entry.address) for entry in addresses
        ):
            for variable in INTERFACE_VARIABLES:
                os.environ.setdefault(variable, name)
            return
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        check_loopback()


@contextlib.contextmanager
def restore_interface_variables() -> Iterator[None]:
    """Restore the environment variables of interfaces at the end of the context, for the next training."""
    before = {name: os.environ.get(name) for name in INTERFACE_VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_local_host(host: str) -> bool:
    """Return whether a name or address means only this machine, so that a socket can listen there."""
    own = {
        entry.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for entry in addresses
    }
    try:
        resolved = {
            str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    except OSError:
        return False
    return all(_is_loopback(address) or address in own for address in resolved)


def choose_listen_address(host: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """Return the address on which a store for several machines listens, and the names to connect to.

    host: the name by which the other machines know this machine, if known.

    The address is that of the interface set in GLOO_SOCKET_IFNAME, else that of `host` or of the machine's
    name. If that name resolves to the machine itself, as on Debian, the store listens on all interfaces, and
    ranks try all addresses.
    """
    own = {
        name: [entry.address for entry in addresses if entry.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    chosen = [
        address for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") for address in own.get(name, ())
    ]
    known = [address for addresses in own.values() for address in addresses if not _is_loopback(address)]
    if not chosen:
        with contextlib.suppress(OSError):
            chosen = [
                address for address in [socket.gethostbyname(host or socket.getfqdn())] if address in known
            ]
    if not chosen and host is None and len(known) == 1:
        chosen = known
    if chosen:
        return chosen[0], [chosen[0]]
    return ALL_INTERFACES, [host] if host is not None else known or [socket.getfqdn()]


def find_local_address(host: str, port: int) -> str:
    """Return the address of this machine as `host` sees it."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket sends nothing
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
