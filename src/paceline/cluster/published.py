"""Published data of accelerators, and clusters named in short form: `a100-80g:8x128@25`."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from paceline.cluster import file
from paceline.cluster.facts import Cluster, Device, Dtype, Fact, Link
from paceline.errors import ClusterError
from paceline.spec import suggest

ALIASES = {"h100": "h100-sxm"}
Copies = dict[Literal["pinned", "pageable"], Fact]
WORDS = r"(?P<device>[\w.-]+)(:(?P<each>\d{1,9})(x(?P<nodes>\d{1,9}))?)?(@(?P<GBps>\d{1,18}(\.\d+)?))?"


@dataclass(frozen=True)
class Chip:
    """A row of published.toml: the peaks of a chip in 10¹² operations/s."""

    name: str
    source: str
    dense: Mapping[Dtype, float]
    vector: Mapping[Dtype, float]
    sparse: Mapping[Dtype, float]
    sms: int | None = None  # streaming multiprocessors, or compute units
    l2_MB: float | None = None  # in units of 2²⁰ bytes


@dataclass(frozen=True)
class PublishedRow:
    """A row of published.toml: a device. The file describes the units."""

    name: str
    chip: Chip
    source: str
    memory_GB: float
    memory_GBps: float
    power_W: float | None = None
    kind: Literal["cuda", "rocm", "tpu", "neuron"] = "cuda"
    driver: tuple[str, ...] = ()
    link: str | None = None
    link_GBps: float | None = None
    host_GBps: float | None = None

    def device(self) -> Device:
        """Return the device, with the source of each number."""
        host: Copies = {"pinned": _fact(self.host_GBps * 1e9, self.source)} if self.host_GBps else {}
        return Device(
            name=self.name,
            kind=self.kind,
            memory_bytes=_fact(self.memory_GB * 2**30, self.source),
            peaks_flops=_peaks(self.chip.dense, self.chip.source),
            sparse_flops=_peaks(self.chip.sparse, self.chip.source),
            vector_flops=_peaks(self.chip.vector, self.chip.source),
            memory_Bps=_fact(self.memory_GBps * 1e9, self.source),
            to_device_Bps=host,
            to_host_Bps=host,
            power_W=_fact(self.power_W, self.source) if self.power_W is not None else None,
        )

    def links(self) -> tuple[Link, ...]:
        """Return the links among the devices of a node, if they are published."""
        if self.link_GBps is None:
            return ()
        return (Link(axis="node", beta_Bps=_fact(self.link_GBps * 1e9, f"{self.link}, {self.source}")),)


def _fact(value: float, source: str) -> Fact:
    return Fact(value=value, source="published", note=source)


def _peaks(numbers: Mapping[Dtype, float], source: str) -> dict[Dtype, Fact]:
    return {dtype: _fact(number * 1e12, source) for dtype, number in numbers.items()}


@cache
def sheets() -> Mapping[str, PublishedRow]:
    """Return each published device by the name that it has in `a100-80g:8x128`."""
    tree = tomllib.loads((files("paceline.cluster") / "published.toml").read_text("utf-8"))
    chips = {name: Chip(**({"name": name, "sparse": {}} | chip)) for name, chip in tree["chips"].items()}
    return {
        name: PublishedRow(**(row | {"chip": chips[row["chip"]], "driver": tuple(row["driver"])}))
        for name, row in tree["devices"].items()
    }


def find_published_name(driver_name: str) -> str | None:
    """Return the name in `sheets` of a device that nvidia-smi or rocm-smi names exactly so, or None."""
    return next((name for name, sheet in sheets().items() if driver_name in sheet.driver), None)


def find(text: str) -> Cluster:
    """Return the cluster of a file (`cluster.json`) or of a short form (`a100-80g:8x128@25`).

    Raises ClusterError.
    """
    return file.read(Path(text)) if text.endswith(".json") or "/" in text else parse(text)


def parse(text: str) -> Cluster:
    """Return the cluster of a short form. Raises ClusterError.

    `a100-80g:8x128@25` is: device, devices per node, nodes, GB/s (10⁹) of each device across nodes.
    """
    match = re.fullmatch(WORDS, text, re.ASCII)
    if match is None:
        raise ClusterError(
            f"cluster must be DEVICE:DEVICES_PER_NODExNODES@GB/s, as in a100-80g:8x128@25,"
            f" or a cluster.json, got {text!r}"
        )
    name = match["device"].lower()
    sheet = sheets().get(ALIASES.get(name, name))
    if sheet is None and (variants := [full for full in sheets() if full.startswith(f"{name}-")]):
        raise ClusterError(f"{match['device']} has several variants; specify one of {', '.join(variants)}")
    if sheet is None:
        raise ClusterError(
            f"{match['device']} is not in the table of published devices (a cluster.json can describe it)"
            f"{suggest(name, sheets())}"
        )
    for count in ("each", "nodes"):
        if match[count] is not None and int(match[count]) == 0:
            raise ClusterError(
                f"cluster {text!r} must have at least 1"
                f" {'node' if count == 'nodes' else 'device per node'}, got 0"
            )
    links = sheet.links()
    if match["GBps"] is not None:
        if not float(match["GBps"]):
            raise ClusterError(
                f"cluster {text!r} has 0 GB/s across nodes; leave out @0 if the rate is unknown"
            )
        links += (
            Link(axis="across", beta_Bps=Fact(value=float(match["GBps"]) * 1e9, note=f"@{match['GBps']}")),
        )
    return Cluster(
        name=text,
        nodes=int(match["nodes"] or 1),
        devices_per_node=int(match["each"] or 1),
        device=sheet.device(),
        links=links,
    )
