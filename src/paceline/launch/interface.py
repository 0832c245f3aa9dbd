"""Over which network interface the ranks of several machines reach one another.

gloo takes the one of the address that the machine's own name has. On a Debian that is 127.0.1.1, in many a container there is none, and the
other machines would look for this one at themselves.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil
import torch.distributed as dist

from paceline.errors import LaunchError

OTHERS, TOLD, ALL_TOLD = "paceline/reached from", "paceline/told", "paceline/all told"


def check_interfaces(environ: Mapping[str, str] = os.environ) -> None:
    """Raises LaunchError where a variable names an interface that this machine does not have."""
    there = [*psutil.net_if_addrs()]
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    lacking = [("GLOO_SOCKET_IFNAME", name) for name in gloo.split(",") if name and name not in there]
    if nccl and not nccl.startswith("^") and not any(_is_of_nccl(name, nccl) for name in there):
        lacking.append(("NCCL_SOCKET_IFNAME", nccl))
    for variable, name in lacking:
        raise LaunchError(
            f"{variable}={name}, but {socket.gethostname()} has no such interface, only {', '.join(there)}; set another, or none"
        )


def _is_of_nccl(name: str, wish: str) -> bool:
    """With "=" before them the names are whole, else they are beginnings."""
    return name in wish[1:].split(",") if wish.startswith("=") else name.startswith(tuple(wish.split(",")))


def choose_interface(store: dist.Store, size: int) -> None:
    """Have gloo take the interface over which the ranks of other machines are reached, where there are some and nothing else was said.

    All `size` ranks of a store call it."""
    master: Any = store
    while isinstance(master, dist.PrefixStore):
        master = master.underlying_store
    mine = address_towards(master.host, master.port)
    if not _is_loopback(mine):
        store.set(OTHERS, mine)
    if store.add(TOLD, 1) == size:
        store.set(ALL_TOLD, "")
    if _is_loopback(mine):  # the store is on this machine
        store.wait([ALL_TOLD])
        if not store.check([OTHERS]):
            return
        mine = address_towards(store.get(OTHERS).decode(), master.port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == mine for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def own_names() -> list[str]:
    """By which other machines may find this one: its name, or all addresses where that means this machine itself."""
    name = socket.getfqdn()
    with contextlib.suppress(OSError):
        if not _is_loopback(socket.gethostbyname(name)):
            return [name]
    known = [one.address for addresses in psutil.net_if_addrs().values() for one in addresses if one.family == socket.AF_INET]
    return [address for address in known if not _is_loopback(address)] or [name]


def address_towards(host: str, port: int) -> str:
    """Of this machine, as that one sees it."""
    family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
