"""Over which network interface the ranks of several machines reach one another.

gloo takes the one of the address that the machine's own name has. On a Debian that is 127.0.1.1, in many a container there is none, and the
other machines would look for this one at themselves.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping

import psutil
import torch.distributed as dist

from paceline.distributed.store import ALL_INTERFACES, unwrap_store
from paceline.errors import LaunchError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
REMOTE_ADDRESS_KEY, CHECKED_IN_KEY, ALL_CHECKED_IN_KEY = (
    "paceline/reached from",
    "paceline/told",
    "paceline/all told",
)


def check_interfaces(environ: Mapping[str, str] = os.environ) -> None:
    """Raises LaunchError where a variable names an interface that this machine does not have."""
    there = [*psutil.net_if_addrs()]
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    lacking = [("GLOO_SOCKET_IFNAME", name) for name in gloo.split(",") if name and name not in there]
    if nccl and not nccl.startswith("^") and not any(_matches_nccl_pattern(name, nccl) for name in there):
        lacking.append(("NCCL_SOCKET_IFNAME", nccl))
    for variable, name in lacking:
        raise LaunchError(
            f"{variable}={name}, but {socket.gethostname()} has no such interface, only {', '.join(there)}; set another, or none"
        )


def _matches_nccl_pattern(name: str, wish: str) -> bool:
    """With "=" before them the names are whole, else they are beginnings."""
    return name in wish[1:].split(",") if wish.startswith("=") else name.startswith(tuple(wish.split(",")))


def choose_interface(store: dist.Store, size: int) -> None:
    """Have gloo take the interface over which the ranks of other machines are reached, where there are some and nothing else was said.

    All `size` ranks of a store call it."""
    master = unwrap_store(store)
    mine = find_local_address(master.host, master.port)
    if not _is_loopback(mine):
        store.set(REMOTE_ADDRESS_KEY, mine)
    if store.add(CHECKED_IN_KEY, 1) == size:
        store.set(ALL_CHECKED_IN_KEY, "")
    if _is_loopback(mine):  # the store is on this machine
        store.wait([ALL_CHECKED_IN_KEY])
        if not store.check([REMOTE_ADDRESS_KEY]):
            return
        mine = find_local_address(store.get(REMOTE_ADDRESS_KEY).decode(), master.port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == mine for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("TP_SOCKET_IFNAME", chosen.partition(",")[0])


def use_loopback() -> None:
    """Have gloo, torch's RPC and NCCL take the loopback interface, for ranks that are all on this machine, where nothing else was said."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in psutil.net_if_addrs().items():
        if name in up and any(
            one.family == socket.AF_INET and _is_loopback(one.address) for one in addresses
        ):
            for variable in INTERFACE_VARIABLES:
                os.environ.setdefault(variable, name)
            return


@contextlib.contextmanager
def restore_interface_variables() -> Iterator[None]:
    """Put the variables of the interfaces back at the end of the context: what one training chooses is not for the next one."""
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
    """Whether a name or address means this machine and nothing else, so that one can listen there."""
    own = {one.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for one in addresses}
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(_is_loopback(address) or address in own for address in found)


def choose_listen_address(host: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """On which address a store for ranks of several machines listens, and by which names they may find it.

    It is that of the interface that was chosen, else that of `host`, by which the others know this machine, or of its own name. Where these
    mean this machine itself, as on a Debian, it is any: one of its addresses must be right, and there is no telling which."""
    own = {
        name: [one.address for one in addresses if one.family == socket.AF_INET]
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
    """Of this machine, as that one sees it."""
    family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
