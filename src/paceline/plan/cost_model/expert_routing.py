"""On how many nodes a token has experts, in expectation, if each choice of experts is equally likely."""

from functools import lru_cache
from math import comb


@lru_cache(4096)
def expected_nodes(experts: int, active: int, nodes: int, groups: int = 1, group_limit: int = 1) -> float:
    """Return the expected number of nodes with an expert of a token, among `nodes` with equally many experts.

    active: experts of a token. groups: into which the experts are divided; those of a token are in at most
    `group_limit` of them, as in DeepSeek V3, whose tokens go to at most 4 of 8 nodes (arXiv 2412.19437,
    section 2.1.2). Without a limit, the experts of a token are drawn from all (a hypergeometric
    distribution). If no whole number of experts is on a node, the nodes are rounded.
    """
    own = max(1, round(experts / nodes))
    allowed = groups if group_limit >= groups else group_limit
    eligible = experts // groups * allowed
    active = min(active, eligible)
    size = experts // groups
    if own <= size:  # a group is on one node or on several
        missed = _share_without(eligible, min(own, eligible), active)
        return nodes * allowed / groups * (1 - missed)
    on_node = min(groups, round(own / size))
    missed = sum(
        _share_of_draws(groups, on_node, allowed, chosen) * _share_without(eligible, chosen * size, active)
        for chosen in range(min(on_node, allowed) + 1)
    )
    return nodes * (1 - missed)


def _share_without(whole: int, marked: int, drawn: int) -> float:
    """Return the probability that none of `marked` of `whole` elements is among `drawn` of them."""
    return comb(whole - marked, drawn) / comb(whole, drawn)


def _share_of_draws(whole: int, marked: int, drawn: int, hits: int) -> float:
    """Return the probability that exactly `hits` of `marked` elements are among `drawn` of `whole`."""
    return comb(marked, hits) * comb(whole - marked, drawn - hits) / comb(whole, drawn)
