"""Predicted peak memory, part by part, of the rank with the highest peak."""

from functools import lru_cache
from typing import NamedTuple

from paceline.plan.cost_model.cost import CostPart, MemoryCost
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.traced_memory import (
    boundary_bytes,
    chunk_bytes,
    count_updated_params,
    find_peak_moment,
    gathered_key_bytes,
    is_traced,
    list_block_memory,
)
from paceline.plan.cost_model.work_split import MicrobatchKey, StageAssignment, WorkSplit, assign_stages
from paceline.plan.model.facts import BlockFacts, ModelFacts
from paceline.plan.schedules import SCHEDULES

KEPT_LOGIT_BYTES = 4.0  # counted by kept_bytes, in float32
GATHERED_BLOCKS = 2  # gathered at once: one computes, the next is prefetched
BUCKET_BYTES = 25 * 2**20  # of DistributedDataParallel
PART_NAMES = (
    *("weights", "averaged weights", "optimizer", "main weights", "cast weights", "gathered"),
    *("gradients", "activations", "computed again", "loss", "communication"),
    *("allocator", "process"),
)
PART_ERRORS = {
    "activations": 0.08,
    "loss": 0.15,
    "gathered": 0.1,
    "allocator": 0.6,
    "process": 0.3,
    "communication": 0.5,
}


class BytesPerParameter(NamedTuple):
    """Bytes per parameter on each data rank, by ZeRO stage (Rajbhandari et al.

    2020, arXiv 1910.02054, section 5).
    """

    weights: float
    gradients: float
    optimizer: float
    master: float

    @property
    def total(self) -> float:
        return sum(self)


def state_bytes(recipe: Recipe, zero: int, shards: int) -> BytesPerParameter:
    """Return bytes per parameter under ZeRO stage `zero`.

    ZeRO-1 shards optimizer state and main weights, ZeRO-2 also gradients, ZeRO-3 also weights. ZeRO-2 with
    `at_rest` shards weights between steps; the whole weights during a step count as gathered.
    """
    cut_weights = zero >= 3 or (zero == 2 and recipe.at_rest)
    return BytesPerParameter(
        weights=recipe.weight / (shards if cut_weights else 1),
        gradients=recipe.gradient / (shards if zero >= 2 else 1),
        optimizer=recipe.optimizer / (shards if zero >= 1 else 1),
        master=recipe.master / (shards if zero >= 1 else 1),
    )


def params_on_rank(block: BlockFacts, tp: int, ep: int = 1) -> float:
    """Return the parameters of a block that one rank computes with; experts are divided by both tp and ep."""
    experts = block.expert_params
    return (block.split_params - experts) / tp + experts / (tp * ep) + block.params - block.split_params


def kept_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the bytes that a forward pass of a micro-batch keeps on one rank (arXiv 2205.05198, table 2)."""
    shares = recipe.recompute_shares(key.recompute)
    wanted = shares.kept if "full" in block.saved else "none"
    saved = block.saved.get(wanted) or block.saved.get("selective" if wanted == "half" else "none")
    if saved is None:
        return 0.0
    bytes_ = saved.bytes(
        recipe.stream, recipe.element, key.tp, recipe.splits_sequence(key.cp) and not block.whole
    )
    if key.recompute == "none":
        bytes_ += _score_bytes(recipe, block, key.tp)
    if wanted == "none":
        bytes_ += _gate_bytes(recipe, block, key.tp)
    gathered = 0.0 if shares.attention else gathered_key_bytes(recipe, block, key)
    return bytes_ * key.micro_batch / key.cp + gathered


def _score_bytes(recipe: Recipe, block: BlockFacts, tp: int) -> float:
    return 0.0 if recipe.fused else block.core.bytes(recipe.stream, recipe.element, tp)


def _gate_bytes(recipe: Recipe, block: BlockFacts, tp: int) -> float:
    return 0.0 if recipe.fused_gate else block.gate.bytes(recipe.stream, recipe.element, tp)


def predict_memory(facts: ModelFacts, split: WorkSplit, recipe: Recipe, limit_bytes: float) -> MemoryCost:
    """Return the memory of the rank of the pipeline with the highest peak."""
    return build_memory_cost(*find_peak(facts, split, recipe), split, recipe, limit_bytes)


def build_memory_cost(
    rank: int, values: tuple[float, ...], split: WorkSplit, recipe: Recipe, limit_bytes: float
) -> MemoryCost:
    """Return the result of `find_peak` as named parts with notes."""
    sharded, whole = _is_sharded(split, recipe), _keeps_whole_gradients(split, recipe)
    per_param = state_bytes(recipe, split.zero, split.shards)
    notes = {
        "weights": _describe_bytes(per_param.weights, recipe.weight, split.shards),
        "averaged weights": "the moving average of Ema, sharded like the weights",
        "optimizer": _describe_bytes(per_param.optimizer, recipe.optimizer, split.shards),
        "main weights": _describe_bytes(per_param.master, recipe.master, split.shards),
        "gradients": "whole until the last micro-batch"
        if whole
        else _describe_bytes(per_param.gradients, recipe.gradient, split.shards),
        "cast weights": "in the type of the products, for a step",
        "gathered": f"of {GATHERED_BLOCKS} blocks at once" if sharded and split.zero == 3 else "for a step",
        "activations": f"of {_kept_microbatches(split, rank):.3g} "
        f"micro-batch{'es' * (_kept_microbatches(split, rank) > 1)}, recompute "
        f"{split.recompute}",
        "computed again": "a block's activations",
        "loss": "logits and their gradients",
        "communication": "gradients in transit",
        "allocator": "reserved, but not usable",
    }
    parts = (
        CostPart(name, value, PART_ERRORS.get(name, 0.0), notes.get(name, ""))
        for name, value in zip(PART_NAMES, values, strict=True)
        if value
    )
    return MemoryCost(tuple(parts), rank, limit_bytes)


def _describe_bytes(on_rank: float, whole: float, shards: int) -> str:
    return f"{on_rank:.3g} bytes per parameter" + (
        f": {whole:g}, over {shards:,} ranks" if on_rank != whole else ""
    )


def find_peak(facts: ModelFacts, split: WorkSplit, recipe: Recipe) -> tuple[int, tuple[float, ...]]:
    """Return the rank of the pipeline with the highest peak, and its bytes by PART_NAMES."""
    assignments = assign_stages(facts, split.pp, split.stages, recipe.even, SCHEDULES[split.schedule].folded)
    best, max_bytes = (0, ()), -1.0  # type: tuple[int, tuple[float, ...]], float
    for assignment in assignments:
        values = _peak_of_rank(facts, assignment, split, recipe)
        total = sum(values)
        if total > max_bytes:
            best, max_bytes = (assignment.index, values), total
    return best


class MemoryBreakdown(NamedTuple):
    """Parameters and bytes of one rank, of one micro-batch where they depend on it.

    trained: parameters with gradients; experts: parameters of experts, with and without gradients.
    """

    params: float
    trained: float
    experts: float
    largest: float
    gathered: float  # parameters of the largest blocks that are gathered at once
    activations: float
    head: float
    logits: float
    recomputed: float


@lru_cache(65536)
def memory_breakdown(
    facts: ModelFacts, assignment: StageAssignment, recipe: Recipe, key: MicrobatchKey
) -> MemoryBreakdown:
    """Return the memory of one micro-batch on the ranks of `assignment`."""
    counted = [(params_on_rank(block, key.tp, key.ep), count) for block, count in assignment.parts]
    params = sum(size * count for size, count in counted)
    trained = sum(
        size * count * (1 - block.frozen)
        for (size, count), (block, _) in zip(counted, assignment.parts, strict=True)
    )
    experts = sum(block.expert_params / (key.tp * key.ep) * count for block, count in assignment.parts)
    if assignment.is_last and facts.first not in (block for block, _ in assignment.parts):
        shared = facts.shared_params / key.tp  # both ends of the pipeline hold shared weights
        params, trained = params + shared, trained + shared * (1 - facts.first.frozen)
    largest = sorted(
        (size for size, count in counted for _ in range(min(count, GATHERED_BLOCKS))), reverse=True
    )[:GATHERED_BLOCKS]
    logits = (
        sum(product.rows * product.columns for product in facts.last.products[:1] if not product.chunk)
        * key.micro_batch
        / (key.tp * key.cp)
    )
    return MemoryBreakdown(
        params=params,
        trained=trained,
        experts=experts,
        largest=max(size for size, _ in counted),
        gathered=sum(largest),
        activations=sum(
            kept_bytes(recipe, block, key) * count
            for block, count in assignment.parts
            if block is not facts.last
        ),
        head=kept_bytes(recipe, facts.last, key) + chunk_bytes(recipe, facts.last, key)
        if assignment.is_last
        else 0.0,
        logits=logits if assignment.is_last else 0.0,
        recomputed=max(_recomputed_bytes(recipe, block, key) for block, _ in assignment.parts),
    )


def state_of_rank(own: MemoryBreakdown, split: WorkSplit, recipe: Recipe) -> BytesPerParameter:
    """Return the bytes of weights, gradients and optimizer on a rank, of all its parameters.

    ZeRO shards the parameters of experts over the ranks that have the same experts.
    """
    dense, experts = (
        state_bytes(recipe, split.zero, split.shards),
        state_bytes(recipe, split.zero, max(1, split.shards // split.ep)),
    )
    share = own.experts / own.params
    weights, *trained = (a * (1 - share) + b * share for a, b in zip(dense, experts, strict=True))
    return BytesPerParameter(own.params * weights, *(own.trained * each for each in trained))


def count_updated(own: MemoryBreakdown, split: WorkSplit) -> float:
    """Return the parameters that a rank updates; ZeRO divides them as in `state_of_rank`."""
    if not split.zero:
        return own.trained
    share = own.experts / own.params
    return own.trained * ((1 - share) / split.shards + share / max(1, split.shards // split.ep))


def _is_sharded(split: WorkSplit, recipe: Recipe) -> bool:
    return split.shards > 1 and (split.zero == 3 or (split.zero == 2 and recipe.at_rest))


def _keeps_whole_gradients(split: WorkSplit, recipe: Recipe) -> bool:
    return recipe.whole_gradients and split.microbatches > 1 and _is_sharded(split, recipe)


def _kept_microbatches(split: WorkSplit, rank: int) -> float:
    """Return the micro-batches whose activations a rank of the pipeline has at once."""
    return (
        SCHEDULES[split.schedule].kept(split.pp, split.microbatches, split.stages, rank)
        if split.pp > 1
        else 1.0
    )


def _peak_of_rank(
    facts: ModelFacts, assignment: StageAssignment, split: WorkSplit, recipe: Recipe
) -> tuple[float, ...]:
    """Return the bytes at the peak of a rank.

    Three moments are compared: in the loss, at the start and at the end of the backward pass.
    """
    if is_traced(assignment):
        return _peak_of_traced(facts, assignment, split, recipe)
    own = memory_breakdown(facts, assignment, recipe, split.microbatch_key)
    state, sharded = state_of_rank(own, split, recipe), _is_sharded(split, recipe)
    gathered_bytes = (
        max(recipe.gather, recipe.element) + recipe.cast
    )  # 8-bit weights are kept with their transpose
    gathered = (own.gathered if split.zero == 3 else own.params) * gathered_bytes if sharded else 0.0
    gradients = own.trained * recipe.gradient if _keeps_whole_gradients(split, recipe) else state.gradients
    averaged = split.dp * split.cp > 1
    before = (
        gradients
        if recipe.early_gradients or split.microbatches > 1 or (split.zero < 2 and averaged)
        else 0.0
    )
    activations = _kept_microbatches(split, assignment.index) * own.activations
    reducing = own.largest * recipe.reduce * 2 if sharded else 0.0
    buckets = recipe.buckets * BUCKET_BYTES if averaged and split.zero < 2 and recipe.overlaps_data else 0.0
    loss = max(0.0, own.head + (recipe.loss - KEPT_LOGIT_BYTES) * own.logits)
    moments = (  # gradients, activations, computed again, loss, communication
        (before, activations, 0.0, loss, 0.0),
        (before, activations, own.recomputed, 0.0, (reducing if before else 0.0) + buckets),
        (gradients, 0.0, own.recomputed, 0.0, reducing + buckets),
    )
    constant = (
        state.weights,
        state.weights * facts.averaged,
        state.optimizer,
        state.master,
        0.0 if sharded else own.params * recipe.cast,
        gathered,
    )
    values = constant + max(moments, key=sum)
    return (*values, recipe.reserved * sum(values), _process_bytes(split, recipe))


def _peak_of_traced(
    facts: ModelFacts, assignment: StageAssignment, split: WorkSplit, recipe: Recipe
) -> tuple[float, ...]:
    sizes = {id(block): params_on_rank(block, split.tp, split.ep) for block, _ in assignment.parts}
    own = memory_breakdown(facts, assignment, recipe, split.microbatch_key)
    params = own.params
    blocks = list_block_memory(facts, assignment, recipe, split.microbatch_key, sizes)
    moment = find_peak_moment(
        blocks,
        split,
        recipe,
        _kept_microbatches(split, assignment.index),
        boundary_bytes(split, assignment, recipe),
    )
    weights = params * state_bytes(recipe, split.zero, split.shards).weights
    updated = count_updated_params(assignment, split, own.trained)
    constant = (
        weights,
        weights * facts.averaged,
        updated * recipe.optimizer,
        updated * recipe.master,
        params * recipe.cast,
        moment.gathered,
    )
    values = (*constant, moment.gradients, moment.activations, 0.0, 0.0, moment.communication)
    return (*values, recipe.reserved * sum(values), _process_bytes(split, recipe))


def _process_bytes(split: WorkSplit, recipe: Recipe) -> float:
    """Return what a rank has besides its tensors: context, libraries, and buffers of its connections."""
    axes = sum(degree > 1 for degree in (split.dp * split.cp, split.tp, split.pp, split.cp, split.ep))
    return recipe.fixed_bytes + axes * recipe.connection_bytes


def _recomputed_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the bytes of the activations that recomputation of a block brings back for a moment."""
    shares = recipe.recompute_shares(key.recompute)
    if "full" not in block.saved or not (shares.products or shares.attention or shares.traffic):
        return 0.0
    block_bytes = (
        block.saved["none"].bytes(recipe.stream, recipe.element, key.tp, recipe.splits_sequence(key.cp))
        + _gate_bytes(recipe, block, key.tp)
        if shares.kept != "none"
        else 0.0
    )
    core = _score_bytes(recipe, block, key.tp)
    gathered = gathered_key_bytes(recipe, block, key) if shares.attention else 0.0
    return (block_bytes + core) * key.micro_batch / key.cp + gathered
