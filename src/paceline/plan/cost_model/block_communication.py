"""Seconds of communication within a block: over tp, over experts, and of attention over cp."""

from typing import NamedTuple

from paceline.plan.cost_model.compute_time import ComputeTime
from paceline.plan.cost_model.expert_routing import expected_nodes
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.rates import DeviceRates
from paceline.plan.cost_model.work_split import MicrobatchKey
from paceline.plan.model.facts import BlockFacts


class Group(NamedTuple):
    """Ranks that communicate with each other, `together` of them in one node."""

    ranks: int
    together: int


def rank_group(ranks: int, stride: int, per_node: int) -> Group:
    """Return the group of ranks at a distance of `stride`, in the order of `ResolvedPlan.place`."""
    return Group(ranks, max(1, min(ranks, per_node // stride)))


class PassTimes(NamedTuple):
    """Seconds of communication in the forward pass, the backward pass and recomputation."""

    forward_s: float
    backward_s: float
    recompute_s: float


def tensor_parallel_s(block: BlockFacts, key: MicrobatchKey, recipe: Recipe, rates: DeviceRates) -> PassTimes:
    """Return the time of a block's all-reduces over tp.

    They sum its outputs forward, and the gradients of its inputs backward.

    Source: arXiv 1909.08053, section 3. Sequence parallelism replaces each by a gather and a scatter, which
    together take as long (arXiv 2205.05198, section 4.2.2). A gather is half of an all-reduce.
    """
    if key.tp == 1 or not block.sums:
        return PassTimes(0.0, 0.0, 0.0)
    size = block.boundary * recipe.element * key.micro_batch / key.cp
    group = rank_group(key.tp, 1, rates.per_node)
    call_s = rates.collective_s("all-reduce", size, group.ranks, group.together) * (
        1 - recipe.overlaps_tensor
    )
    recompute = (
        call_s * block.sums
        if recipe.recompute_shares(key.recompute).products == 1 and block.attention
        else 0.0
    )
    again = 1.5 if recipe.gathers_again and recipe.splits_sequence(key.cp) else 1.0
    return PassTimes(call_s * block.sums, again * call_s * block.sums, recompute)


def expert_parallel_s(block: BlockFacts, key: MicrobatchKey, recipe: Recipe, rates: DeviceRates) -> PassTimes:
    """Return the time in which tokens are sent to their experts and back, forward and backward.

    A system that deduplicates sends a token once to each other node that has one of its experts, and from
    there inside the node (arXiv 2412.19437, section 3.2.2); others once per expert, as all do inside a node.
    """
    if key.ep == 1 or not block.dispatched:
        return PassTimes(0.0, 0.0, 0.0)
    group = rank_group(key.ep, key.tp * key.cp, rates.per_node)
    element = (recipe.dispatch + recipe.combine) / 2
    size = block.dispatched * element * key.micro_batch / (key.tp * key.cp)
    nodes = -(-group.ranks // group.together)
    away = (nodes - 1) / nodes  # share of what is sent that leaves a node
    if recipe.deduplicates:
        away *= expected_nodes(block.experts, block.copies, nodes, *block.expert_groups) / block.copies
    seconds = max(
        rates.collective_s("all-to-all", size, group.together, group.together),
        size * away / rates.across_Bps if nodes > 1 else 0.0,
    )
    exposed = (seconds + 2 * rates.constants.node_s) * (1 - recipe.overlaps_experts)
    again = exposed if recipe.recompute_shares(key.recompute).products == 1 else 0.0
    return PassTimes(exposed, exposed, again)


def context_parallel_s(
    block: BlockFacts, key: MicrobatchKey, recipe: Recipe, rates: DeviceRates, block_time: ComputeTime
) -> float:
    """Return the exposed time of the communication of attention.

    In a ring (arXiv 2310.01889), keys and values circulate while attention computes: forward, again in
    recomputation, and backward with their gradients. After each of cp steps a rank merges the output in
    float32. Otherwise they are gathered before attention, and their gradients reduced and scattered after it.
    """
    if key.cp == 1 or not block.attention:
        return 0.0
    group = rank_group(key.cp, key.tp, rates.per_node)
    width = key.micro_batch / key.tp
    again = recipe.recompute_shares(key.recompute).attention
    gathered = [a for a in block.attention if a.gathers_keys(key.cp)]
    gathered_s = 0.0
    for attention in gathered:
        size = attention.key_value_elements * recipe.element * width
        gathered_s += (1 + again) * rates.collective_s("all-gather", size, group.ranks, group.together)
        gathered_s += rates.collective_s("reduce-scatter", size, group.ranks, group.together)
    if len(gathered) == len(block.attention):
        return gathered_s
    in_ring = [a for a in block.attention if not a.gathers_keys(key.cp)]
    size = sum(a.key_value_elements for a in in_ring) * recipe.element * width
    ring = rates.collective_s("all-gather", size, group.ranks, group.together)
    merged = sum(a.queries * a.head_dim * a.heads for a in in_ring) * recipe.merge * width / rates.memory_Bps
    exposed = ring - (1 - rates.exposed_share(group.together)) * min(ring, block_time.attention_s)
    return gathered_s + (3 + again) * (exposed + merged)
