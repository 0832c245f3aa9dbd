"""The connections between GPUs and network cards: `nvidia-smi topo -m` and `rocm-smi --showtopo`."""

import re

from paceline.cluster.machine import Topology
from paceline.cluster.run_tool import run

NEAREST = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first; MEANING explains them
MEANING = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the host's bridge",
    "NODE": "within a NUMA node",
    "SYS": "between NUMA nodes",
}


def read_nvidia() -> Topology | None:
    """Return the topology that nvidia-smi reports, if it reports one. Raises ClusterError."""
    return parse_nvidia(run("nvidia-smi", "topo", "-m"))


def read_amd() -> Topology | None:
    """Return the topology that rocm-smi reports, if it reports one. Raises ClusterError."""
    return parse_amd(run("rocm-smi", "--showtopo"))


def parse_nvidia(text: str) -> Topology | None:
    """Return the topology in the output of `nvidia-smi topo -m`.

    Tabs separate the columns. The last columns are the CPUs and the NUMA node of a GPU; they are empty for
    NICs.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()  # the header is underlined, even in a file
    header = next((k for k, line in enumerate(lines) if "GPU0" in line.split()), None)
    if header is None:
        return None
    heads = [head.strip() for head in lines[header].strip().split("\t")]
    peers = [head for head in heads if re.fullmatch(r"[A-Za-z]+\d[\w]*", head)]
    links: dict[str, dict[str, str]] = {}
    affinities: dict[str, dict[str, str]] = {"CPU Affinity": {}, "NUMA Affinity": {}}
    for line in lines[header + 1 :]:
        name, *cells = [cell.strip() for cell in line.strip().split("\t")]
        if name not in peers:
            break
        links[name] = {peer: cell for peer, cell in zip(peers, cells, strict=False) if peer != name and cell}
        for head, affinity in affinities.items():
            if head in heads and (cell := dict(zip(heads, cells, strict=False)).get(head)) and cell != "N/A":
                affinity[name] = cell
    nics = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", text, re.M))
    return Topology(links=links, nics=nics, cpus=affinities["CPU Affinity"], numa=affinities["NUMA Affinity"])


def parse_amd(text: str) -> Topology | None:
    """Return the topology in the table under `Link Type between two GPUs`, if the text has it."""
    _, title, table = text.partition("Link Type between two GPUs")
    lines = [words for line in table.splitlines()[1:] if (words := line.split())] if title else []
    if not lines:
        return None
    heads, *rows = lines
    links = {}
    for name, *cells in rows:
        if name not in heads or len(cells) != len(heads):
            break
        links[name] = {peer: cell for peer, cell in zip(heads, cells, strict=True) if peer != name}
    if not links:
        return None
    numa = {
        f"GPU{index}": node
        for index, node in re.findall(r"GPU\[(\d+)\]\s*: \(Topology\) Numa Node: (\d+)", text)
    }
    return Topology(links=links, numa=numa)


def gpu_names(topology: Topology) -> tuple[str, ...]:
    """Return the names of the GPUs of a topology."""
    return tuple(name for name in topology.links if name.startswith("GPU"))


def find_nearest_nics(topology: Topology) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return for each GPU the kind of connection to its nearest NICs, and the names of these NICs."""
    best = {}
    for gpu in gpu_names(topology):
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


def count_gpu_links(topology: Topology) -> dict[str, int]:
    """Return the number of pairs of GPUs by kind of connection."""
    names = gpu_names(topology)
    pairs: dict[str, int] = {}
    for k, first in enumerate(names):
        for second in names[k + 1 :]:
            link = topology.links[first].get(second)
            if link is not None:
                pairs[link] = pairs.get(link, 0) + 1
    return pairs
