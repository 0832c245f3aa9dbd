"""Seconds of a step outside of the micro-batches: averaging of gradients, gathers of ZeRO, and the update."""

from paceline.plan.cost_model.block_communication import Group, rank_group
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.memory import MemoryBreakdown, count_updated, state_of_rank
from paceline.plan.cost_model.rates import DeviceRates
from paceline.plan.cost_model.work_split import StageAssignment, WorkSplit
from paceline.plan.schedules import StageTimes

UPDATE_BYTES = 12.0  # per parameter: read and write the weight, read the gradient, in float32


def data_parallel_parts(
    assignment: StageAssignment,
    split: WorkSplit,
    recipe: Recipe,
    rates: DeviceRates,
    busiest: StageTimes,
    own: MemoryBreakdown,
) -> dict[str, float]:
    """Return the exposed time of averaging gradients and gathering weights.

    busiest: of a micro-batch on the busiest rank.
    """
    ranks = split.dp * split.cp
    if ranks == 1:
        return {}
    blocks = sum(count for _, count in assignment.parts)
    group = rank_group(ranks, split.tp, rates.per_node)
    shards = rank_group(split.shards, split.tp, rates.per_node)
    forward, backward = busiest.forward_s, busiest.inputs_s + busiest.weights_s
    trained = own.trained / own.params

    def call_s(kind: str, size: float, members: Group) -> float:
        return rates.collective_s(kind, size, members.ranks, members.together, recipe.rails)

    def call(kind: str, bytes_per_param: float, members: Group, share: float = trained) -> float:
        """Return the seconds of a collective of this share of the parameters.

        Ranks with the same experts communicate those.
        """
        dense = call_s(kind, (own.params - own.experts) * share * bytes_per_param, members)
        if not own.experts:
            return dense
        same = rank_group(max(1, members.ranks // split.ep), split.tp * split.ep, rates.per_node)
        return dense + call_s(kind, own.experts * share * bytes_per_param, same)

    exposed_share = rates.exposed_share(
        (shards if split.zero >= 2 else group).together if recipe.rails else 1
    )

    def exposed(communication: float, computing: float) -> float:
        """Return what a collective adds to the computing it may overlap with.

        That of the first or last block is exposed.
        """
        return (
            max(communication / blocks, communication - (1 - exposed_share) * min(communication, computing))
            if recipe.overlaps_data
            else communication
        )

    if split.zero <= 1 or (split.zero == 2 and not recipe.at_rest):
        # Through shared memory, all ranks of the world average, and the thread of the backward pass waits.
        averaging = (
            rates.shared_mean_s(own.trained * recipe.reduce, ranks)
            if split.zero <= 1 and ranks == split.ranks and rates.shares_memory(*group)
            else exposed(call("all-reduce", recipe.reduce, group), backward)
        )
        gathering = call("all-gather", recipe.weight, group) if split.zero else 0.0
        if (
            split.zero == 0 or not recipe.scattered
        ):  # ZeroRedundancyOptimizer sends weights after their update
            return {"data parallel": averaging, "gathered weights": gathering}
        reducing = call("reduce-scatter", recipe.reduce, group)
        return {"data parallel": exposed(reducing, backward), "gathered weights": exposed(gathering, forward)}
    latency = (blocks - 1) * call_s("all-gather", recipe.gather * 1e-9, shards)
    gather = call("all-gather", recipe.gather, shards, 1.0) + latency
    scatter = call("reduce-scatter", recipe.reduce, shards) + latency
    if split.replicate > 1:
        copies = rank_group(split.replicate, split.tp * split.shards, rates.per_node)
        scatter += call_s("all-reduce", own.trained / split.shards * recipe.reduce, copies)
    reductions = 1 if recipe.whole_gradients else split.microbatches
    regather = gather if split.zero == 3 else 0.0
    exposed_s = split.microbatches * (exposed(gather, forward) + exposed(regather, backward)) + reductions * (
        exposed(regather + scatter, backward) - exposed(regather, backward)
    )
    gather_share = (gather + regather) / (gather + regather + scatter)
    return {"gathered weights": exposed_s * gather_share, "data parallel": exposed_s * (1 - gather_share)}


def optimizer_s(
    assignment: StageAssignment,
    split: WorkSplit,
    recipe: Recipe,
    rates: DeviceRates,
    own: MemoryBreakdown,
) -> float:
    """Return the time of the update, from memory bandwidth, or on a CPU from number and size of tensors.

    The norm of the gradients reads them once more.
    """
    tensors = sum(block.tensors * count for block, count in assignment.parts)
    if rates.op_times is not None and tensors:
        own_tensors = tensors / (split.shards if split.zero == 1 else 1)
        return own_tensors * rates.op_times.seconds(
            "update", own.trained / (split.shards if split.zero else 1) / own_tensors
        )
    state = state_of_rank(own, split, recipe)
    moved = UPDATE_BYTES + 2 * recipe.optimizer + recipe.master / 2
    return (count_updated(own, split) * moved + state.gradients) / rates.memory_Bps
