"""Assumptions about a machine where nothing is known, each with a sentence for the user."""

from paceline.cluster.facts import Cluster, Fact, Link

# A network card of 200 or 400 Gbit/s for each device, as in the DGX of these devices, and in the nodes of
# H800 on which DeepSeek V3 was trained (arXiv 2505.09343).
CARD_GBps = {"a100": 25.0, "h100": 50.0, "h200": 50.0, "h800": 50.0}
OTHER_GBps = 25.0
CPU_GBps = 20.0  # two channels of memory, in round figures
SHARED_GBps = 1.0  # gloo between processes of one node, or over 10 Gbit/s, in round figures


def add_assumptions(cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster with typical values where they are unknown, and a sentence for each.

    Assumed are bandwidths of links and of a CPU's memory.
    """
    known = {link.axis for link in cluster.links}
    links, sentences = [], []
    if cluster.device.kind == "cpu" and cluster.device.memory_Bps is None:
        memory = cluster.device.model_copy(update={"memory_Bps": Fact(value=CPU_GBps * 1e9, note="assumed")})
        cluster = cluster.model_copy(update={"device": memory})
        sentences.append(f"a memory bandwidth of {CPU_GBps:g} GB/s is assumed; paceline bench measures it")
    if cluster.device.kind == "cpu" and "node" not in known:
        links.append(Link(axis="node", beta_Bps=Fact(value=SHARED_GBps * 1e9, note="assumed")))
        sentences.append(
            f"{SHARED_GBps:g} GB/s are assumed between ranks of a node; paceline bench measures them"
        )
    if cluster.nodes > 1 and "across" not in known:
        family = next((name for name in CARD_GBps if name in cluster.device.name.lower()), "")
        GBps = SHARED_GBps if cluster.device.kind == "cpu" else CARD_GBps.get(family, OTHER_GBps)
        links.append(Link(axis="across", beta_Bps=Fact(value=GBps * 1e9, note="assumed")))
        hint = (
            "paceline bench measures them"
            if cluster.device.kind == "cpu"
            else "append @GB/s to the cluster to set them"
        )
        sentences.append(f"{GBps:g} GB/s per device are assumed between nodes; {hint}")
    return cluster.updated(links=links), tuple(sentences)
