"""Predicted memory of a rank during the backward pass through its blocks, for a traced model."""

from collections.abc import Iterator
from typing import NamedTuple

from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.work_split import MicrobatchKey, StageAssignment, WorkSplit
from paceline.plan.model.facts import BlockFacts, ModelFacts, TensorVolume
from paceline.plan.schedules import SCHEDULES

# Of the micro-batches that a rank keeps, those with deferred gradients of weights; counted in torch's
# schedules.
WAITING_SHARE = 0.5


class MemoryMoment(NamedTuple):
    """Bytes of a rank at one moment of the backward pass."""

    gradients: float
    activations: float
    gathered: float
    communication: float


class BlockMemory(NamedTuple):
    """Parameters and bytes of a block of a rank.

    trained: parameters with gradients. kept: for the backward pass. most: at the peak of the backward pass.
    waiting: gradients of activations that wait for the gradients of weights, if the schedule splits the
    backward pass.
    """

    params: float
    trained: float
    kept: float
    most: float
    waiting: float
    is_root: bool


def is_traced(assignment: StageAssignment) -> bool:
    """Whether all blocks have traced live bytes."""
    return all(block.lives is not None for block, _ in assignment.parts)


def kept_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the bytes that the forward pass of a micro-batch keeps on one rank."""
    assert block.lives is not None
    shares = recipe.recompute_shares(key.recompute)
    saved = block.saved.get(shares.kept) if shares.kept != "none" else None
    if saved is None:
        held = block.lives.kept * _share_on_rank(recipe, block, key)
    else:
        held = _volume_bytes(recipe, block, key, saved) + _product_output_bytes(recipe, block, key)
    held += 0.0 if shares.products else _gathered_bytes(recipe, block, key)
    keys = 0.0 if shares.attention else gathered_key_bytes(recipe, block, key)
    return held * key.micro_batch / key.cp + keys


def gathered_key_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the bytes of keys and values that a rank has from the other ranks of cp."""
    elements = sum(attention.gathered_elements(key.cp) for attention in block.attention)
    return elements * recipe.element * key.micro_batch / key.tp


def peak_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the bytes at the peak of the backward pass, when all recomputed activations exist."""
    assert block.lives is not None
    held = (
        block.lives.most * _share_on_rank(recipe, block, key)
        + _product_output_bytes(recipe, block, key)
        + _gathered_bytes(recipe, block, key)
    )
    activations = held * key.micro_batch / key.cp + gathered_key_bytes(recipe, block, key)
    return activations + chunk_bytes(recipe, block, key)


def chunk_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the bytes of the chunks of outputs that never exist whole: of a chunked cross entropy.

    The logits are at least in float32. With 16 bits, the product and the gradient are chunks, too.
    """
    bytes_ = max(4.0, recipe.element) + (2 * recipe.element if recipe.element < 4 else 0.0)
    return bytes_ * sum(p.output_elements(key.micro_batch, key.tp, key.cp) for p in block.products if p.chunk)


def _product_output_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return bytes per sample of outputs of products and attention that are kept only for recomputation."""
    shares = recipe.recompute_shares(key.recompute)
    if shares.kept != "selective" or shares.kept not in block.saved:
        return 0.0
    whole = _product_output_elements(block, key)
    scored = sum(a.heads * a.queries * a.head_dim for a in block.attention) / key.tp
    return max(
        0.0,
        (whole + scored) * recipe.element
        - _volume_bytes(recipe, block, key, block.saved[shares.kept]._replace(stream=0.0)),
    )


def _product_output_elements(block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the output elements of products per sample, without those that never exist whole."""
    return sum(p.output_elements(1, key.tp) for p in block.products if not p.chunk)


def _gathered_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return bytes per sample of gathered activations.

    Sequence parallelism gathers them before split layers, which keep them whole.
    """
    if block.whole or not recipe.splits_sequence(key.cp):
        return 0.0
    return block.sums * block.boundary * recipe.stream * (1 - 1 / key.tp)


def _share_on_rank(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    """Return the saved bytes of a block relative to those in float32 on one rank."""
    whole = block.saved["none"].bytes(4.0, 4.0)
    if not whole:
        return 1.0 if block.whole else 1 / key.tp
    return _volume_bytes(recipe, block, key, block.saved["none"]) / whole


def _volume_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey, held: TensorVolume) -> float:
    return held.bytes(
        recipe.stream, recipe.element, key.tp, recipe.splits_sequence(key.cp) and not block.whole
    )


def _waiting_bytes(recipe: Recipe, block: BlockFacts, key: MicrobatchKey) -> float:
    return _product_output_elements(block, key) * recipe.element * key.micro_batch / key.cp


def find_peak_moment(
    blocks: list[BlockMemory],
    split: WorkSplit,
    recipe: Recipe,
    kept_microbatches: float,
    received_per_microbatch: float,
) -> MemoryMoment:
    """Return the moment with peak memory.

    kept_microbatches: micro-batches with live activations. received_per_microbatch: bytes that the stages of
    this rank receive per micro-batch.
    """
    return max(_moments(blocks, split, recipe, kept_microbatches, received_per_microbatch), key=sum)


def _moments(
    blocks: list[BlockMemory],
    split: WorkSplit,
    recipe: Recipe,
    kept_microbatches: float,
    received_per_microbatch: float,
) -> Iterator[MemoryMoment]:
    """Yield the moments of the backward pass, from the last block to the first, and its end."""
    params, trained = (sum(getattr(block, name) for block in blocks) for name in ("params", "trained"))
    whole_kept = sum(block.kept for block in blocks)
    splits = split.pp > 1 and SCHEDULES[split.schedule].splits_backward
    waiting = kept_microbatches * WAITING_SHARE * sum(block.waiting for block in blocks) if splits else 0.0
    root = sum(block.params for block in blocks if block.is_root)
    sharded = split.zero >= 2 and split.dp * split.cp > 1
    averaged = split.dp * split.cp > 1
    shard = 1 / split.shards if sharded else 1.0
    received = split.microbatches * received_per_microbatch  # torch's stages have a buffer per micro-batch
    kept_before, done = whole_kept, 0.0
    in_transit = 0.0  # parameters of the previous block of the backward pass, whose gradients are in transit
    for index in range(len(blocks) - 1, -1, -1):
        block = blocks[index]
        kept_before -= block.kept
        if sharded:
            gradients = trained if split.microbatches > 1 else done * shard
            following = blocks[index - 1].params if index and not blocks[index - 1].is_root else 0.0
            gathered = (
                params if split.zero == 2 else root + (0.0 if block.is_root else block.params) + following
            )
            sending = in_transit + (block.trained if split.microbatches == 1 else 0.0)
        else:
            gathered = sending = 0.0
            gradients = (
                trained * (2 if split.microbatches > 1 and split.pp * split.tp == 1 else 1)
                if averaged
                else trained
                if split.microbatches > 1
                else done
            )
        if split.microbatches > 1 or (averaged and not sharded):
            gradients += block.trained  # of the block itself, before they are accumulated
        activations = (kept_microbatches - 1) * whole_kept + kept_before + block.most + waiting
        yield MemoryMoment(
            gradients * recipe.gradient,
            activations,
            gathered * recipe.gather,
            sending * recipe.reduce + received,
        )
        done += block.trained
        in_transit = block.trained
    yield MemoryMoment(
        trained * shard * recipe.gradient,
        0.0,
        0.0 if split.zero != 2 or not sharded else params * recipe.gather,
        received,
    )


def list_block_memory(
    facts: ModelFacts,
    assignment: StageAssignment,
    recipe: Recipe,
    key: MicrobatchKey,
    sizes: dict[int, float],
) -> list[BlockMemory]:
    """Return the memory of each block.

    `sizes`: parameters per block on a rank. First and last block have whole sequences.
    """
    blocks: list[BlockMemory] = []
    for block, count in assignment.parts:
        is_root = block is facts.first or block is facts.last
        block_key = key._replace(cp=1) if is_root else key
        held_bytes = (
            kept_bytes(recipe, block, block_key),
            peak_bytes(recipe, block, block_key),
            _waiting_bytes(recipe, block, block_key),
        )
        size = sizes[id(block)]
        blocks += [BlockMemory(size, size * (1 - block.frozen), *held_bytes, is_root)] * count
    return blocks


def boundary_bytes(split: WorkSplit, assignment: StageAssignment, recipe: Recipe) -> float:
    """Return bytes of activations and gradients that a rank's stages receive for one micro-batch."""
    return assignment.crossing * recipe.stream * split.micro_batch / split.cp


def count_updated_params(assignment: StageAssignment, split: WorkSplit, trained: float) -> float:
    """Return the parameters of the rank that updates most, of the `trained` parameters of a stage.

    ZeRO-1 distributes whole tensors, ZeRO-2 and ZeRO-3 shard each.
    """
    if split.zero == 1 and split.shards > 1:
        largest = (
            max((block.largest for block, _ in assignment.parts if block.frozen < 1), default=0) / split.tp
        )
        return max(largest, trained / split.shards)
    return trained / split.shards if split.zero else trained
