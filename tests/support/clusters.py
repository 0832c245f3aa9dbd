"""Declared clusters for tests of planning."""

from paceline.cluster.facts import Cluster, Device, Fact, Link


def make_cluster(
    devices: int,
    of_a_node: int = 8,
    memory_GiB: float = 80,
    peak_TFLOPs: float = 312,
    node_GBps: float = 300,
    across_GBps: float = 25,
) -> Cluster:
    """Return a cluster, by default of A100s."""
    nodes = max(1, devices // of_a_node)
    device = Device(
        name="a100-80g",
        memory_bytes=Fact(value=memory_GiB * 2**30),
        memory_Bps=Fact(value=2039e9),
        peaks_flops={"bf16": Fact(value=peak_TFLOPs * 1e12)},
    )
    links = (
        Link(axis="node", beta_Bps=Fact(value=node_GBps * 1e9)),
        Link(axis="across", beta_Bps=Fact(value=across_GBps * 1e9)),
    )
    return Cluster(name="a100", nodes=nodes, devices_per_node=devices // nodes, device=device, links=links)
