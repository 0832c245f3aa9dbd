"""Who is connected to whom: `nvidia-smi topo -m` and `rocm-smi --showtopo`."""

import re

from paceline.cluster.machine import Topology
from paceline.cluster.run_tool import run

NEAREST = (
    "PIX",
    "PXB",
    "PHB",
    "NODE",
    "SYS",
)  # first is best: from one bridge between the two, to another socket
MEANING = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the host's bridge",
    "NODE": "within a NUMA node",
    "SYS": "between NUMA nodes",
}


def nvidia() -> Topology | None:
    return parse_nvidia(run("nvidia-smi", "topo", "-m"))


def amd() -> Topology | None:
    return parse_amd(run("rocm-smi", "--showtopo"))


def parse_nvidia(text: str) -> Topology | None:
    """The matrix is parted by tabs; the cells at its right tell the CPUs and NUMA node of a GPU, and are empty for NICs."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()  # the heads are underlined, also in a file
    at = next((k for k, line in enumerate(lines) if "GPU0" in line.split()), None)
    if at is None:
        return None
    heads = [head.strip() for head in lines[at].strip().split("\t")]
    peers = [head for head in heads if re.fullmatch(r"[A-Za-z]+\d[\w]*", head)]
    links: dict[str, dict[str, str]] = {}
    beside: dict[str, dict[str, str]] = {"CPU Affinity": {}, "NUMA Affinity": {}}
    for line in lines[at + 1 :]:
        name, *cells = [cell.strip() for cell in line.strip().split("\t")]
        if name not in peers:
            break
        links[name] = {peer: cell for peer, cell in zip(peers, cells, strict=False) if peer != name and cell}
        for head, found in beside.items():
            if head in heads and (cell := dict(zip(heads, cells, strict=False)).get(head)) and cell != "N/A":
                found[name] = cell
    nics = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", text, re.M))
    return Topology(links=links, nics=nics, cpus=beside["CPU Affinity"], numa=beside["NUMA Affinity"])


def parse_amd(text: str) -> Topology | None:
    """The table under `Link Type between two GPUs`."""
    _, found, table = text.partition("Link Type between two GPUs")
    lines = [line.split() for line in table.splitlines()[1:]] if found else []
    if not lines:
        return None
    heads, *rows = lines
    links = {}
    for name, *cells in (row for row in rows if row):
        if name not in heads:
            break
        links[name] = {peer: cell for peer, cell in zip(heads, cells, strict=True) if peer != name}
    numa = {
        f"GPU{index}": node
        for index, node in re.findall(r"GPU\[(\d+)\]\s*: \(Topology\) Numa Node: (\d+)", text)
    }
    return Topology(links=links, numa=numa)


def gpus(topology: Topology) -> tuple[str, ...]:
    return tuple(name for name in topology.links if name.startswith("GPU"))


def best_nics(topology: Topology) -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each GPU, how near its nearest NICs are, and which they are."""
    best = {}
    for gpu in gpus(topology):
        nics = {
            peer: link
            for peer, link in topology.links[gpu].items()
            if not peer.startswith("GPU") and link in NEAREST
        }
        if nics:
            nearest = min(nics.values(), key=NEAREST.index)
            best[gpu] = (
                nearest,
                tuple(topology.nics.get(nic, nic) for nic, link in nics.items() if link == nearest),
            )
    return best


def among_gpus(topology: Topology) -> dict[str, int]:
    """How many pairs of GPUs are connected by what."""
    names = gpus(topology)
    pairs: dict[str, int] = {}
    for k, one in enumerate(names):
        for other in names[k + 1 :]:
            link = topology.links[one].get(other)
            if link is not None:
                pairs[link] = pairs.get(link, 0) + 1
    return pairs
