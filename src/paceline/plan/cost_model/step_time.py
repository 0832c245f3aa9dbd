"""Predicted seconds of a step, part by part, of the busiest rank of a pipeline."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import hypot
from typing import NamedTuple

from paceline.plan.cost_model.calibration import Calibration
from paceline.plan.cost_model.compare import TIME_PARTS
from paceline.plan.cost_model.compute_time import ComputeTime, compute_block_time
from paceline.plan.cost_model.constants import MAX_FITTED_RANKS
from paceline.plan.cost_model.cost import CostPart, TimeCost
from paceline.plan.cost_model.engine_overhead import engines_s
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.memory import MemoryBreakdown, count_updated, memory_breakdown, state_of_rank
from paceline.plan.cost_model.rates import SUBSTITUTE_DTYPES, DeviceRates
from paceline.plan.cost_model.work_split import MicrobatchKey, StageAssignment, WorkSplit, assign_stages
from paceline.plan.model.facts import BlockFacts, ModelFacts
from paceline.plan.schedules import SCHEDULES, StageTimes
from paceline.units import several

# By part: relative standard deviation, calibrated on published measurements (docs/planning.md); its basis.
PARTS = {
    "products": (0.053, "tiles and waves of each product's shape on a rank, forward and backward"),
    "attention": (0.15, "FlashAttention-2, arXiv 2307.08691; or products and scores in memory"),
    "other operations": (0.19, "bytes read and written over memory bandwidth; start of kernels"),
    "computed again": (0.075, "forward pass repeated by recompute; arXiv 2205.05198"),
    "tensor parallel": (
        0.22,
        "all-reduces of a block's outputs and of gradients of its inputs; arXiv 1909.08053",
    ),
    "expert parallel": (0.38, "tokens sent to experts and back; arXiv 2101.03961"),
    "context parallel": (0.38, "keys and values round the ring, and merging (arXiv 2310.01889), or gathered"),
    "pipeline bubble": (0.2, "filling and draining; arXiv 2104.04473, 2401.10241"),
    "pipeline sends": (0.38, "activations that the schedule waits for; plan/schedules.py"),
    "data parallel": (0.3, "averaging of gradients, minus what overlaps with the backward pass"),
    "gathered weights": (0.3, "gathers of ZeRO, minus what overlaps with computing; arXiv 1910.02054"),
    "optimizer": (0.22, "bytes of weights and moments over memory bandwidth"),
    "engines": (0.2, "hooks, copies and calls of torch's engines, and of the loop, as measured"),
    "jitter": (0.75, "ranks wait for the slowest"),
}
EXACT: Mapping[str, float] = {}
# Of published runs: experts get unequal numbers of tokens, and kernels for them and for few bits are new.
EXPERT_ERRORS: Mapping[str, float] = {"products": 0.155, "other operations": 0.25, "expert parallel": 0.37}
LOW_ERRORS: Mapping[str, float] = {"products": 0.09}
GUESSED_ERROR = 0.7  # of each part, if nothing was measured of a CPU
# Of a whole step, on devices whose share of the peak is from single measurements of others or guessed, and on
# more ranks than any fitted training. The shares of the known architectures differ by a quarter.
UNFITTED_ERRORS: Mapping[str, float] = {"published": 0.12, "guessed": 0.25}
BEYOND_RANKS_ERROR = 0.1
UPDATE_BYTES = 12.0  # per parameter: read and write the weight, read the gradient, in float32


class Group(NamedTuple):
    """Ranks that communicate with each other, `together` of them in one node."""

    ranks: int
    together: int


def rank_group(ranks: int, stride: int, per_node: int) -> Group:
    """Return the group of ranks at a distance of `stride`, in the order of `ResolvedPlan.place`."""
    return Group(ranks, max(1, min(ranks, per_node // stride)))


class StageLoad(NamedTuple):
    """Seconds of one rank for one micro-batch, over all its blocks."""

    products_s: float
    attention_s: float
    traffic_s: float
    recompute_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    stage: StageTimes
    flops: float
    recompute_flops: float

    @property
    def total_s(self) -> float:
        return (
            self.products_s
            + self.attention_s
            + self.traffic_s
            + self.recompute_s
            + self.tensor_s
            + self.context_s
            + self.expert_s
        )


def predict_time(facts: ModelFacts, split: WorkSplit, recipe: Recipe, rates: DeviceRates) -> TimeCost:
    """Return the time of a step. Raises PlanError if the bandwidth of the cluster is unknown."""
    stages = stage_loads(
        facts, split.pp, split.stages, SCHEDULES[split.schedule].folded, split.microbatch_key, recipe, rates
    )
    assignment, busiest = stages[0]
    m = split.microbatches
    parts = _parts_of_load(m, busiest)
    if split.pp > 1:
        bubble, sends = _pipeline_idle_s(facts, split, recipe, rates, stages)
        if rates.crowd > 1:
            busy_share, bubble = share_cores(m, busiest.total_s, _mean_load_s(stages), bubble, rates.crowd)
            parts = {name: busy_share * seconds for name, seconds in parts.items()}
        parts |= {"pipeline bubble": bubble, "pipeline sends": sends}
    own = max(
        [memory_breakdown(facts, assigned, recipe, split.microbatch_key) for assigned, _ in stages],
        key=lambda breakdown: breakdown.trained,
    )
    data = _data_parts(assignment, split, recipe, rates, busiest, own)
    if split.zero >= 2:  # each pass gathers and scatters all weights
        parts |= {name: seconds * facts.passes for name, seconds in data.items()}
    else:
        parts |= {name: seconds * facts.updates for name, seconds in data.items()}
    parts["engines"] = engines_s(assignment, split, rates) * facts.passes
    parts["optimizer"] = _optimizer_s(assignment, split, recipe, rates, own) * facts.updates
    parts["jitter"] = rates.constants.jitter * sum(parts.values())
    peak = next(
        (
            rates.peaks[dtype]
            for dtype in (*SUBSTITUTE_DTYPES.get(recipe.dtype, (recipe.dtype,)), "bf16", "fp16", "fp32")
            if dtype in rates.peaks
        ),
        None,
    )
    min_error = GUESSED_ERROR if rates.op_times is not None and not rates.op_times.measured else 0.0
    ranks = split.ranks
    guesses = _guesses(split, parts, rates)
    flops = facts.training_flops * split.batch / ranks
    return TimeCost(
        parts=_calibrated_parts(
            parts,
            rates.calibration,
            min_error,
            TIME_PARTS["compute"] if facts.source == "measured" else (),
            _larger_errors(facts, recipe),
        ),
        flops=flops,
        hardware_flops=flops
        + sum(load.recompute_flops * assigned.count for assigned, load in stages) * m / split.pp,
        tokens=float(facts.tokens * split.batch),
        samples=float(split.batch),
        peak_flops=peak,
        guesses=guesses,
        extrapolation_error=_extrapolation_error(split, rates) if guesses else 0.0,
    )


def _calibrated_parts(
    parts: dict[str, float],
    calibration: Calibration | None,
    min_error: float = 0.0,
    measured: Collection[str] = (),
    errors: Mapping[str, float] = EXACT,
) -> tuple[CostPart, ...]:
    """Return the parts, corrected by the calibration.

    min_error: of parts that are only guessed; measured: parts that were measured with the task. errors: least
    error of some parts.
    """
    calibrated = []
    for name, seconds in parts.items():
        guessed = min_error if name not in measured else 0.0
        error, note = max(PARTS[name][0], guessed, errors.get(name, 0.0)), PARTS[name][1]
        if calibration is not None and (factor := calibration.factors.get(name)) is not None:
            runs = several(factor.runs, "run")
            seconds, error, note = (
                seconds * factor.value,
                factor.error(error),
                f"{note}; × {factor.value:.2f} from {runs}",
            )
        if seconds:
            calibrated.append(CostPart(name, seconds, error, note))
    return tuple(calibrated)


def _larger_errors(facts: ModelFacts, recipe: Recipe) -> Mapping[str, float]:
    """Return the least errors of parts that differ more between systems: of experts, and of few bits."""
    if any(block.expert_params for block, _ in facts.runs):
        return EXPERT_ERRORS
    return LOW_ERRORS if recipe.is_low else EXACT


def _guesses(split: WorkSplit, parts: dict[str, float], rates: DeviceRates) -> tuple[str, ...]:
    """Return sentences about guesses; with runs like this step in the calibration, nothing is a guess."""
    if rates.calibration is None:
        return rates.guesses + _extrapolations(split)
    beyond = rates.calibration.beyond(
        [name for name, seconds in parts.items() if seconds and name != "jitter"], split.ranks
    )
    return beyond and (*rates.guesses, *_extrapolations(split), *beyond)


def _extrapolation_error(split: WorkSplit, rates: DeviceRates) -> float:
    """Return the relative error of a device or a number of ranks that nothing was fitted to.

    The operations of CPUs have errors of their own.
    """
    of_device = UNFITTED_ERRORS.get(rates.device.basis, 0.0) if rates.op_times is None else 0.0
    return hypot(of_device, BEYOND_RANKS_ERROR if _extrapolations(split) else 0.0)


def lower_bound_s(facts: ModelFacts, split: WorkSplit, recipe: Recipe, rates: DeviceRates) -> float:
    """Return a lower bound of the step time: only the micro-batches of the busiest rank."""
    stages = stage_loads(
        facts, split.pp, split.stages, SCHEDULES[split.schedule].folded, split.microbatch_key, recipe, rates
    )
    busiest, busy_share = stages[0][1], 1.0
    if rates.crowd > 1 and split.pp > 1:
        busy_share, _ = share_cores(
            split.microbatches, busiest.total_s, _mean_load_s(stages), 0.0, rates.crowd
        )
    if rates.calibration is None:
        return split.microbatches * busiest.total_s * busy_share * (1 + rates.constants.jitter)
    parts = _parts_of_load(split.microbatches, busiest)
    parts = {name: busy_share * seconds for name, seconds in parts.items()}
    parts["jitter"] = rates.constants.jitter * sum(parts.values())
    return sum(part.value for part in _calibrated_parts(parts, rates.calibration))


def _parts_of_load(microbatches: int, busiest: StageLoad) -> dict[str, float]:
    return {
        "products": microbatches * busiest.products_s,
        "attention": microbatches * busiest.attention_s,
        "other operations": microbatches * busiest.traffic_s,
        "computed again": microbatches * busiest.recompute_s,
        "tensor parallel": microbatches * busiest.tensor_s,
        "context parallel": microbatches * busiest.context_s,
        "expert parallel": microbatches * busiest.expert_s,
    }


@lru_cache(65536)
def stage_loads(
    facts: ModelFacts,
    pp: int,
    stages: int,
    folded: bool,
    key: MicrobatchKey,
    recipe: Recipe,
    rates: DeviceRates,
) -> tuple[tuple[StageAssignment, StageLoad], ...]:
    """Return the load of each kind of rank of a pipeline, busiest first."""
    loads = [
        (assignment, stage_load(assignment, recipe, rates, key, facts.slower))
        for assignment in assign_stages(facts, pp, stages, recipe.even, folded)
    ]
    return tuple(sorted(loads, key=lambda pair: -pair[1].total_s))


def _extrapolations(split: WorkSplit) -> tuple[str, ...]:
    """Return a sentence if the split is outside the trainings that the constants were fitted to."""
    sentence = f"{split.ranks} ranks are more than the {MAX_FITTED_RANKS} of any fitted training"
    return (sentence,) if split.ranks > MAX_FITTED_RANKS else ()


@lru_cache(65536)
def stage_load(
    assignment: StageAssignment, recipe: Recipe, rates: DeviceRates, key: MicrobatchKey, slower: float = 1.0
) -> StageLoad:
    """Return the seconds of one micro-batch on the ranks of `assignment`."""
    products = attention = traffic = recompute = tensor = context = expert = 0.0
    flops = recompute_flops = 0.0
    forward = inputs = weights = 0.0
    for block, count in assignment.parts:
        block_time = compute_block_time(rates, recipe, block, key)
        if slower != 1.0:
            block_time = block_time.scaled(slower)
        sums, ring = _tensor_s(block, key, recipe, rates), _context_s(block, key, recipe, rates, block_time)
        sent = _expert_s(block, key, recipe, rates)
        products += count * (block_time.products_s + block_time.inputs_s + block_time.weights_s)
        attention += count * (block_time.attention_s + block_time.attention_backward_s)
        traffic += count * (block_time.traffic_s + block_time.traffic_backward_s)
        recompute += count * block_time.recompute_s
        tensor += count * (sums.forward_s + sums.backward_s + sums.recompute_s)
        context += count * ring
        expert += count * (sent.forward_s + sent.backward_s + sent.recompute_s)
        forward += count * (block_time.forward_s + sums.forward_s + ring / 3 + sent.forward_s)
        inputs += count * (
            block_time.backward_inputs_s
            + block_time.recompute_s
            + sums.backward_s
            + sums.recompute_s
            + ring * 2 / 3
            + sent.backward_s
            + sent.recompute_s
        )
        weights += count * block_time.weights_s
        flops += count * block_time.flops
        recompute_flops += count * block_time.recompute_flops
    return StageLoad(
        products,
        attention,
        traffic,
        recompute,
        tensor,
        context,
        expert,
        StageTimes(forward, inputs, weights),
        flops,
        recompute_flops,
    )


class PassTimes(NamedTuple):
    """Seconds of communication in the forward pass, the backward pass and recomputation."""

    forward_s: float
    backward_s: float
    recompute_s: float


def _tensor_s(block: BlockFacts, key: MicrobatchKey, recipe: Recipe, rates: DeviceRates) -> PassTimes:
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


def _expert_s(block: BlockFacts, key: MicrobatchKey, recipe: Recipe, rates: DeviceRates) -> PassTimes:
    """Return the time in which tokens are sent to their experts and back, forward and backward.

    A token is sent once to each other node that has one of its experts, and from there inside the node (arXiv
    2412.19437, section 3.2.2); inside its own node once per expert.
    """
    if key.ep == 1 or not block.dispatched:
        return PassTimes(0.0, 0.0, 0.0)
    group = rank_group(key.ep, key.tp * key.cp, rates.per_node)
    size = block.dispatched * recipe.dispatch * key.micro_batch / (key.tp * key.cp)
    nodes = -(-group.ranks // group.together)
    away = nodes * (1 - (1 - 1 / nodes) ** block.copies) * (nodes - 1) / nodes / block.copies
    seconds = max(
        rates.collective_s("all-to-all", size, group.together, group.together),
        size * away / rates.across_Bps if nodes > 1 else 0.0,
    )
    exposed = (seconds + 2 * rates.constants.node_s) * (1 - recipe.overlaps_experts)
    again = exposed if recipe.recompute_shares(key.recompute).products == 1 else 0.0
    return PassTimes(exposed, exposed, again)


def _context_s(
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


def _pipeline_idle_s(
    facts: ModelFacts,
    split: WorkSplit,
    recipe: Recipe,
    rates: DeviceRates,
    stages: Sequence[tuple[StageAssignment, StageLoad]],
) -> tuple[float, float]:
    """Return the bubble and the exposed sends of the schedule.

    Ranks may differ in the time they take to fill and drain.
    """
    schedule, busiest = SCHEDULES[split.schedule], stages[0][1]
    others = _mean_load_s(stages) * split.pp - busiest.total_s
    uniform = schedule.idle_s(split.pp, split.microbatches, split.stages, busiest.stage) / (
        busiest.total_s or 1.0
    )
    size = facts.first.boundary * recipe.element * split.micro_batch / split.cp
    size /= split.tp if recipe.scatter or recipe.splits_sequence(split.cp) else 1
    group = rank_group(2, split.dp * split.cp * split.tp, rates.per_node)
    send = rates.collective_s("send", size, 2, group.together)
    sends = schedule.exposed_sends(split.pp, split.microbatches, split.stages) * send
    return uniform * others / (split.pp - 1), sends


def _mean_load_s(stages: Sequence[tuple[StageAssignment, StageLoad]]) -> float:
    """Return the seconds of a micro-batch, as the mean over the ranks of a pipeline."""
    ranks = sum(assigned.count for assigned, _ in stages)
    return sum(assigned.count * load.total_s for assigned, load in stages) / ranks


def share_cores(
    microbatches: int, busiest_s: float, mean_s: float, bubble_s: float, crowd: float
) -> tuple[float, float]:
    """Return the share of the busiest rank's seconds that remains, and the bubble, if ranks share cores.

    A rank that waits leaves its core to others. So a step takes as long as the work of all ranks on all
    cores, or as the critical path if each of its ranks had a core.

    busiest_s, mean_s: seconds of a micro-batch on the busiest and the mean rank; these and bubble_s are of
    ranks that always share. crowd: ranks per core.
    """
    busy_s = microbatches * busiest_s
    step_s = max(microbatches * mean_s, (busy_s + bubble_s) / crowd)
    return min(1.0, step_s / (busy_s or 1.0)), max(0.0, step_s - busy_s)


def _data_parts(
    assignment: StageAssignment,
    split: WorkSplit,
    recipe: Recipe,
    rates: DeviceRates,
    busiest: StageLoad,
    own: MemoryBreakdown,
) -> dict[str, float]:
    """Return the exposed time of averaging gradients and gathering weights."""
    ranks = split.dp * split.cp
    if ranks == 1:
        return {}
    blocks = sum(count for _, count in assignment.parts)
    group = rank_group(ranks, split.tp, rates.per_node)
    shards = rank_group(split.shards, split.tp, rates.per_node)
    forward, backward = busiest.stage.forward_s, busiest.stage.inputs_s + busiest.stage.weights_s
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


def _optimizer_s(
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
