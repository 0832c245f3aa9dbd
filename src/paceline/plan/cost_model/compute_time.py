"""Compute time of one block and micro-batch on one rank, from the shapes of its matrix products."""

import math
from functools import lru_cache
from typing import NamedTuple

from paceline.plan.cost_model import cpu_compute_time
from paceline.plan.cost_model.framework_profiles import Recipe, RecomputeShares
from paceline.plan.cost_model.op_times import OpTimeTable
from paceline.plan.cost_model.rates import DeviceRates
from paceline.plan.cost_model.work_split import MicrobatchKey
from paceline.plan.model.facts import Attention, BlockFacts, Product

# Tile of a product's output that one multiprocessor computes at a time (CUTLASS; the larger tiles of cuBLAS).
TILE_ROWS, TILE_COLUMNS = 128, 256
# A product with a shorter side runs on vector units; their rate relative to matrix cores is that of float32
# on A100.
NARROW_SIDE, VECTOR_RATE = 8, 1 / 16
SPLIT_INNER = 512  # minimum inner elements of a multiprocessor if several share a tile
PROLOGUE_INNER = 64  # inner elements before a tile computes at its full rate
# Kernels, those of 128 experts, that take as long as a rank waits; how many times its own kernels count.
WAITED_KERNELS, OWN_KERNELS = 512, 8
# Relative to the forward pass: a norm and an activation read their input again, a residual sum reads nothing.
BACKWARD_TRAFFIC = 1.75


class ComputeTime(NamedTuple):
    """Seconds of the forward pass, and of the backward pass with separate products for inputs and weights.

    traffic_s: operations limited by memory bandwidth. flops: forward and backward of one rank, without
    recomputation.
    """

    products_s: float
    attention_s: float
    traffic_s: float
    inputs_s: float
    weights_s: float
    attention_backward_s: float
    traffic_backward_s: float
    recompute_s: float
    flops: float
    recompute_flops: float

    def scaled(self, by: float) -> "ComputeTime":
        """Return the same FLOPs with all seconds multiplied by `by`."""
        seconds = {name: value * by for name, value in self._asdict().items() if name.endswith("_s")}
        return self._replace(**seconds)

    @property
    def forward_s(self) -> float:
        return self.products_s + self.attention_s + self.traffic_s

    @property
    def backward_inputs_s(self) -> float:
        return self.inputs_s + self.attention_backward_s + self.traffic_backward_s


@lru_cache(65536)
def compute_block_time(
    rates: DeviceRates, recipe: Recipe, block: BlockFacts, key: MicrobatchKey
) -> ComputeTime:
    """Return the compute time of one micro-batch of `block` on one rank."""
    tp, cp, micro_batch, recompute = key.tp, key.cp, key.micro_batch, key.recompute
    if rates.op_times is not None:
        return _compute_block_time_on_cpu(rates.op_times, recipe, block, key)
    head = block.boundary == 0
    dtype = recipe.wide_dtype if head else recipe.dtype
    forward = inputs = weights = again = 0.0
    for product in block.products:
        m, n, k, count = _shape_on_rank(product, key)
        moved = 2.0 * (m * k / product.reuse + k * n + m * n) * count
        speed = recipe.products * (recipe.grouped if product.active > 1 else 1.0)
        took = product_s(rates, dtype, m, n, k, count, moved) / speed
        forward += took
        again += took if product.chunk else 0.0
        inputs += product_s(rates, dtype, m, k, n, count, moved) / speed
        if not product.frozen:
            weights += product_s(rates, dtype, k, n, m, count, moved) / speed
    attention = sum(_attention_s(rates, recipe, call, tp, cp, micro_batch) for call in block.attention)
    traffic, scores = _traffic_bytes(recipe, block, tp, cp, micro_batch)
    if not recipe.fused_experts:
        traffic += block.expert_traffic.bytes(recipe.stream, recipe.element, tp) * micro_batch
    if recipe.is_low and not head:  # inputs and weights are cast, and their maxima computed
        traffic += recipe.cast_traffic * micro_batch / tp * _cast_elements(recipe, block)
    moved = traffic / cp / rates.memory_Bps
    core = 0.0 if recipe.fused else scores / cp / rates.memory_Bps
    launches = block.kernels + (0.0 if recipe.fused_experts else _expert_launches(block, key.ep))
    kernels = launches * (rates.constants.launch_s + recipe.blocked_s)
    recomputed = recipe.recompute_shares(recompute if block.boundary and "full" in block.saved else "none")
    attention_s = attention + core
    recompute_s = (
        recomputed.products * forward
        + recomputed.attention * attention_s
        + recomputed.traffic * (moved + kernels)
        + again
    )
    started = 0.0 if recipe.graphs else launches * rates.constants.host_s
    short = max(0.0, started - forward - attention_s - moved - kernels)
    flops = block.flops * micro_batch / (tp * cp)
    recompute_flops = _recompute_flops(block, recomputed) * micro_batch / (tp * cp)
    return ComputeTime(
        products_s=forward,
        attention_s=attention_s,
        traffic_s=moved + kernels + short,
        inputs_s=inputs,
        weights_s=weights,
        attention_backward_s=_attention_backward_s(rates, recipe, attention) + 2 * core,
        traffic_backward_s=BACKWARD_TRAFFIC * moved + kernels + short,
        recompute_s=recompute_s + short * bool(recomputed.products),
        flops=3 * flops,
        recompute_flops=recompute_flops,
    )


def _compute_block_time_on_cpu(
    op_times: OpTimeTable, recipe: Recipe, block: BlockFacts, key: MicrobatchKey
) -> ComputeTime:
    """Return the sum over operations, which a CPU runs strictly one after another."""
    sides = [(product, *_shape_on_rank(product, key)) for product in block.products]
    forward, inputs, weights = cpu_compute_time.products_s(
        op_times, [(product, m * n * k, count) for product, m, n, k, count in sides]
    )
    attention, attention_back = cpu_compute_time.attention_s(op_times, block.attention, key)
    others, others_back = cpu_compute_time.others_s(op_times, block, recipe, key)
    recomputed = recipe.recompute_shares(
        key.recompute if block.boundary and "full" in block.saved else "none"
    )
    again, _, _ = cpu_compute_time.products_s(
        op_times, [(product, m * n * k, count) for product, m, n, k, count in sides if product.chunk]
    )
    ranks = key.tp * key.cp
    return ComputeTime(
        products_s=forward,
        attention_s=attention,
        traffic_s=others,
        inputs_s=inputs,
        weights_s=weights,
        attention_backward_s=attention_back,
        traffic_backward_s=others_back,
        recompute_s=recomputed.products * forward
        + recomputed.attention * attention
        + recomputed.traffic * others
        + again,
        flops=3 * block.flops * key.micro_batch / ranks,
        recompute_flops=_recompute_flops(block, recomputed) * key.micro_batch / ranks,
    )


def _expert_launches(block: BlockFacts, ep: int) -> float:
    """Return the kernels that a rank launches, or waits for, because a block has experts.

    Trainings with 128 experts waited equally long with 2 and with 16 of them on a rank: for sorting, counting
    and padding of tokens, which does not grow with more experts, while their own kernels do.
    """
    return min(block.expert_kernels, max(WAITED_KERNELS, OWN_KERNELS * block.expert_kernels / ep))


def _cast_elements(recipe: Recipe, block: BlockFacts) -> float:
    """Return the elements of a sample that a forward pass casts: inputs and outputs of products.

    A fused kernel of experts casts the activations between their two products itself.
    """
    return sum(
        product.rows
        * (
            (product.inner if product.cut == "columns" else product.columns)
            if recipe.fused_experts and product.active > 1
            else product.inner + product.columns
        )
        for product in block.products
    )


def _recompute_flops(block: BlockFacts, recomputed: RecomputeShares) -> float:
    """Return the FLOPs of a sample that the backward pass computes again, also of chunked products."""
    chunked = sum(product.flops for product in block.products if product.chunk)
    again = recomputed.products * block.product_flops + recomputed.attention * block.attention_flops
    return again + chunked


def _shape_on_rank(product: Product, key: MicrobatchKey) -> tuple[float, float, float, float]:
    m, n, k, count = product.rows * key.micro_batch / key.cp, product.columns, product.inner, product.count
    if product.cut == "columns":
        n /= key.tp
    elif product.cut == "inner":
        k /= key.tp
    if product.active > 1:  # rows are distributed over experts, and experts over ranks, with the rows of all
        m, count = m * count * key.ep / product.active, product.active / key.ep
    return m, n, k, count


def product_s(
    rates: DeviceRates,
    dtype: str,
    m: float,
    n: float,
    k: float,
    count: float = 1.0,
    moved: float | None = None,
) -> float:
    """Return the seconds of m × k times k × n, from measured products of that size.

    Without measurements, partial tiles and partial waves cost as much as full ones. Small products are
    limited by memory bandwidth. `moved`: bytes read and written; None: each operand once in 16 bits.
    """
    moving = (2.0 * (m * k + k * n + m * n) * count if moved is None else moved) / rates.memory_Bps
    if min(m, n, k) < NARROW_SIDE:  # a depthwise convolution does not use matrix cores
        return (
            max(2.0 * m * n * k * count / (rates.product_flops(dtype) * VECTOR_RATE), moving)
            + rates.constants.launch_s
        )
    if measured := rates.measured_flops(dtype, m * n * k):
        return max(2.0 * m * n * k * count / measured, moving) + rates.constants.launch_s
    units = rates.device.units
    rows, columns = math.ceil(m / TILE_ROWS), math.ceil(n / TILE_COLUMNS)
    rows2, columns2 = math.ceil(m / TILE_COLUMNS), math.ceil(n / TILE_ROWS)
    tiles = min(rows * columns, rows2 * columns2) * count
    if (
        tiles < units and k > SPLIT_INNER
    ):  # too few for all units: several share a tile and split its inner dimension
        parts = min(math.ceil(units / tiles), k // SPLIT_INNER)
        tiles, k = tiles * parts, k / parts
    tile_flops = 2.0 * TILE_ROWS * TILE_COLUMNS * (k + PROLOGUE_INNER)
    waves = max(1.0, tiles / units + 0.25)  # a quarter: tiles of the last wave are smaller
    computing = waves * units * tile_flops / rates.product_flops(dtype)
    return max(computing, moving) + rates.constants.launch_s


def _attention_s(
    rates: DeviceRates, recipe: Recipe, call: Attention, tp: int, cp: int, micro_batch: int
) -> float:
    """Return the seconds of the forward pass, without reading and writing its scores."""
    heads = micro_batch * call.heads / tp
    if recipe.fused:
        rate = rates.peaks.get(recipe.wide_dtype) or rates.product_flops(recipe.dtype)
        small = min(
            1.0, 0.82 + 0.18 * call.head_dim / 128
        )  # arXiv 2307.08691, figure 5, causal: 64 compared with 128
        return (
            call.flops
            * call.seen
            * call.slice_imbalance(cp)
            * micro_batch
            / (tp * cp)
            / (rate * rates.clock * rates.device.forward * _attention_speed(rates, recipe) * small)
        )
    dtype = recipe.wide_dtype
    queries = call.queries * call.slice_imbalance(cp) / cp
    return product_s(rates, dtype, queries, call.keys, call.head_dim, heads) + product_s(
        rates, dtype, queries, call.head_dim, call.keys, heads
    )


def _attention_speed(rates: DeviceRates, recipe: Recipe) -> float:
    """Return the speed of a system's attention relative to FlashAttention-2."""
    return rates.device.native if recipe.native_attention and rates.device.native else recipe.attention


def _attention_backward_s(rates: DeviceRates, recipe: Recipe, forward_s: float) -> float:
    """Return the seconds of attention backward.

    Fused attention has 5 products instead of 2, because scores are recomputed; else 4.
    """
    return forward_s * 2.5 * rates.device.forward / rates.device.backward if recipe.fused else 2 * forward_s


def _traffic_bytes(
    recipe: Recipe, block: BlockFacts, tp: int, cp: int, micro_batch: int
) -> tuple[float, float]:
    """Return bytes of the forward pass: of elementwise operations, and of attention without a fused kernel.

    The latter transposes heads and back, and writes, scales, masks, normalises (softmax) and drops scores.
    """
    along = recipe.splits_sequence(cp) and not block.whole
    moved = block.traffic.bytes(recipe.stream, recipe.element, tp, along) * recipe.elementwise * micro_batch
    transposed = (
        sum((4 * call.queries + 4 * call.keys) * call.heads * call.head_dim for call in block.attention)
        * recipe.element
    )
    scores = sum(call.scores for call in block.attention) * (
        4 * recipe.element + (2 * recipe.element + 1 if block.core.split_bytes else 0)
    )
    return moved, (transposed + scores) / tp * micro_batch
