"""Network interfaces and RDMA devices, for example of InfiniBand."""

import re
import socket
from pathlib import Path

import psutil

from paceline.cluster.machine import Interface
from paceline.units import is_whole_number

SYS = Path("/sys/class")
# Data per nominal bit: 8 of 10 bits, 64 of 66; later generations are named by their data.
ENCODING = {"SDR": 0.8, "DDR": 0.8, "QDR": 0.8, "FDR10": 64 / 66, "FDR": 64 / 66}
KINDS = {"1": "ethernet", "32": "infiniband", "772": "loopback"}  # linux/if_arp.h


def list_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces, fastest first, without loopback and the bridges of containers."""
    addresses = psutil.net_if_addrs()
    rows = []
    for name, state in psutil.net_if_stats().items():
        kind = _kind(SYS / "net" / name)
        if kind == "loopback" or name.startswith("veth"):
            continue
        ipv4 = tuple(
            address.address for address in addresses.get(name, ()) if address.family == socket.AF_INET
        )
        rows.append(
            Interface(
                name=name,
                kind=kind,
                up=state.isup,
                Mbps=_speed(state.speed),
                addresses=ipv4,
                numa=_number(SYS / "net" / name / "device/numa_node"),
            )
        )
    return tuple(sorted(rows, key=lambda row: (not row.up, -(row.Mbps or 0), row.name)))


def _speed(Mbps: int) -> int | None:
    # For an unknown speed psutil returns 0, and virtual drivers report -1.
    return Mbps if 0 < Mbps < 2**31 and Mbps != 65535 else None


def list_rdma(root: Path = SYS) -> tuple[Interface, ...]:
    """Return a row for each port of the devices in `root`/infiniband."""
    folder = root / "infiniband"
    devices = sorted(folder.iterdir(), key=lambda path: _natural(path.name)) if folder.is_dir() else []
    return tuple(_port(device, port) for device in devices for port in sorted((device / "ports").glob("*")))


def nominal_Bps(interface: Interface) -> float | None:
    """Return the bytes per second of a link by its kind, without the encoding of lines of old InfiniBand."""
    if interface.Mbps is None:
        return None
    generation = (interface.generation or "").rpartition(" ")[2]
    return interface.Mbps * 1e6 / 8 * ENCODING.get(generation, 1.0)


def _port(device: Path, port: Path) -> Interface:
    is_up = "ACTIVE" in _text(port / "state")  # 4: ACTIVE
    # 400 Gb/sec (4X NDR); a port without a link reports the lowest rate, or that of its last link
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec(?: \((\d+X \w+)\))?", _text(port / "rate")) if is_up else None
    interfaces = device / "device/net"
    ports = sorted(device.glob("ports/*"))
    return Interface(
        name=device.name if len(ports) == 1 else f"{device.name}:{port.name}",
        kind={"InfiniBand": "infiniband", "Ethernet": "roce"}.get(_text(port / "link_layer"), "rdma"),
        up=is_up,
        Mbps=round(float(rate[1]) * 1000) if rate else None,
        generation=rate[2] if rate and _text(port / "link_layer") == "InfiniBand" else None,
        numa=_number(device / "device/numa_node"),
        ports=", ".join(sorted(path.name for path in interfaces.iterdir())) if interfaces.is_dir() else None,
    )


def _kind(path: Path) -> str:
    kind = KINDS.get(_text(path / "type"), "other")
    return "virtual" if kind == "ethernet" and not (path / "device").exists() else kind


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if is_whole_number(text) else None  # -1: the machine has no NUMA nodes


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
