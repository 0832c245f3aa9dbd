"""Seconds that a rank computes on one block for one micro-batch, by the shapes of the products it is left with."""

import math
from functools import lru_cache
from typing import NamedTuple

from paceline.plan.cost_model import cpu_compute_time
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.op_times import OpTimeTable
from paceline.plan.cost_model.rates import DeviceRates
from paceline.plan.cost_model.work_split import MicrobatchKey
from paceline.plan.model.facts import Attention, BlockFacts, Product

TILE_ROWS, TILE_COLUMNS = (
    128,
    256,
)  # of a product's output, one multiprocessor at a time (CUTLASS; the larger tiles of cuBLAS)
NARROW_SIDE, VECTOR_RATE = (
    8,
    1 / 16,
)  # sides below which a product takes vector units, and their rate against matrix cores: float32 on A100
SPLIT_INNER = 512  # elements of the inner dim that a multiprocessor has at least, where several share a tile
PROLOGUE_INNER = 64  # elements of the inner dim that pass before a tile computes at its rate
BACKWARD_TRAFFIC = 1.75  # of the forward pass's: a norm and an activation read their input again, a residual sum reads nothing


class ComputeTime(NamedTuple):
    """Seconds: forward, and backward, where products are made for the inputs and for the weights apart."""

    products_s: float
    attention_s: float
    traffic_s: float
    inputs_s: float
    weights_s: float
    attention_backward_s: float
    traffic_backward_s: float
    recompute_s: float  # forward once more
    flops: float  # forward and backward, of one rank
    recompute_flops: float

    def scaled(self, by: float) -> "ComputeTime":
        """The same FLOPs in so many times the seconds."""
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
    speeds: DeviceRates, recipe: Recipe, block: BlockFacts, cut: MicrobatchKey
) -> ComputeTime:
    tp, cp, micro_batch, recompute = cut.tp, cut.cp, cut.micro_batch, cut.recompute
    if speeds.op_times is not None:
        return _compute_block_time_on_cpu(speeds.op_times, recipe, block, cut)
    head = block.boundary == 0
    dtype = "bf16" if recipe.dtype == "fp8" and head else recipe.dtype
    forward = inputs = weights = 0.0
    for product in block.products:
        m, n, k, count = _shape_on_rank(product, tp, cp, micro_batch)
        moved = 2.0 * (m * k / product.reuse + k * n + m * n) * count
        forward += product_s(speeds, dtype, m, n, k, count, moved)
        inputs += product_s(speeds, dtype, m, k, n, count, moved)
        weights += product_s(speeds, dtype, k, n, m, count, moved)
    attention = sum(_attention_s(speeds, recipe, one, tp, cp, micro_batch) for one in block.attention)
    traffic, scores = _traffic_bytes(recipe, block, tp, cp, micro_batch)
    if recipe.dtype == "fp8" and not head:  # inputs and weights are cast, and their largest values found
        traffic += sum(3.0 * p.rows * (p.inner + p.columns) * micro_batch / tp for p in block.products)
    moved = traffic / cp / speeds.memory_Bps
    core = 0.0 if recipe.fused else scores / cp / speeds.memory_Bps
    kernels = block.kernels * speeds.constants.launch_s
    again = recipe.recompute_shares(recompute if block.boundary and "full" in block.saved else "none")
    attention_s = attention + core
    recompute_s = again.products * forward + again.attention * attention_s + again.traffic * (moved + kernels)
    started = block.kernels * speeds.constants.host_s
    short = max(0.0, started - forward - attention_s - moved - kernels)
    flops = block.flops * micro_batch / (tp * cp)
    recompute_flops = (
        (again.products * block.product_flops + again.attention * block.attention_flops)
        * micro_batch
        / (tp * cp)
    )
    return ComputeTime(
        products_s=forward,
        attention_s=attention_s,
        traffic_s=moved + kernels + short,
        inputs_s=inputs,
        weights_s=weights,
        attention_backward_s=_attention_backward_s(speeds, recipe, attention) + 2 * core,
        traffic_backward_s=BACKWARD_TRAFFIC * moved + kernels + short,
        recompute_s=recompute_s + short * bool(again.products),
        flops=3 * flops,
        recompute_flops=recompute_flops,
    )


def _compute_block_time_on_cpu(
    paces: OpTimeTable, recipe: Recipe, block: BlockFacts, cut: MicrobatchKey
) -> ComputeTime:
    """Each operation is started and done before the next, so that times add up."""
    sides = [
        (product, *_shape_on_rank(product, cut.tp, cut.cp, cut.micro_batch)) for product in block.products
    ]
    forward, inputs, weights = cpu_compute_time.products_s(
        paces, [(product, m * n * k, count) for product, m, n, k, count in sides]
    )
    attention, attention_back = cpu_compute_time.attention_s(paces, block.attention, cut)
    others, others_back = cpu_compute_time.others_s(paces, block, recipe, cut)
    again = recipe.recompute_shares(cut.recompute if block.boundary and "full" in block.saved else "none")
    recompute_flops = again.products * block.product_flops + again.attention * block.attention_flops
    ranks = cut.tp * cut.cp
    return ComputeTime(
        products_s=forward,
        attention_s=attention,
        traffic_s=others,
        inputs_s=inputs,
        weights_s=weights,
        attention_backward_s=attention_back,
        traffic_backward_s=others_back,
        recompute_s=again.products * forward + again.attention * attention + again.traffic * others,
        flops=3 * block.flops * cut.micro_batch / ranks,
        recompute_flops=recompute_flops * cut.micro_batch / ranks,
    )


def _shape_on_rank(product: Product, tp: int, cp: int, micro_batch: int) -> tuple[float, float, float, float]:
    m, n, k, count = product.rows * micro_batch / cp, product.columns, product.inner, product.count
    if product.cut == "columns":
        n /= tp
    elif product.cut == "inner":
        k /= tp
    if product.active > 1:  # rows are dealt out over experts
        m, count = m * count / product.active, product.active
    return m, n, k, count


def product_s(
    speeds: DeviceRates,
    dtype: str,
    m: float,
    n: float,
    k: float,
    count: float = 1.0,
    moved: float | None = None,
) -> float:
    """m × k times k × n, as fast as measured products of that size. Where none was measured, tiles that are not full and waves that are
    not compute for nothing. What is small waits for the memory."""
    moving = (2.0 * (m * k + k * n + m * n) * count if moved is None else moved) / speeds.memory_Bps
    if min(m, n, k) < NARROW_SIDE:  # a convolution of each channel by itself: no product for matrix cores
        return (
            max(2.0 * m * n * k * count / (speeds.product_flops(dtype) * VECTOR_RATE), moving)
            + speeds.constants.launch_s
        )
    if measured := speeds.measured_flops(dtype, m * n * k):
        return max(2.0 * m * n * k * count / measured, moving) + speeds.constants.launch_s
    units = speeds.device.units
    rows, columns = math.ceil(m / TILE_ROWS), math.ceil(n / TILE_COLUMNS)
    rows2, columns2 = math.ceil(m / TILE_COLUMNS), math.ceil(n / TILE_ROWS)
    tiles = min(rows * columns, rows2 * columns2) * count
    if (
        tiles < units and k > SPLIT_INNER
    ):  # too few for all units: several share a tile, each a part of the inner dim
        parts = min(math.ceil(units / tiles), k // SPLIT_INNER)
        tiles, k = tiles * parts, k / parts
    tile_flops = 2.0 * TILE_ROWS * TILE_COLUMNS * (k + PROLOGUE_INNER)
    waves = max(1.0, tiles / units + 0.25)  # a quarter: tiles of the last wave are made smaller
    computing = waves * units * tile_flops / speeds.product_flops(dtype)
    return max(computing, moving) + speeds.constants.launch_s


def _attention_s(
    speeds: DeviceRates, recipe: Recipe, one: Attention, tp: int, cp: int, micro_batch: int
) -> float:
    """Forward, without the traffic of its scores."""
    heads = micro_batch * one.heads / tp
    if recipe.fused:
        rate = speeds.peaks.get(recipe.dtype if recipe.dtype != "fp8" else "bf16") or speeds.product_flops(
            recipe.dtype
        )
        small = min(
            1.0, 0.82 + 0.18 * one.head_dim / 128
        )  # arXiv 2307.08691, figure 5, causal: 64 against 128
        return (
            one.flops
            * one.seen
            * micro_batch
            / (tp * cp)
            / (rate * speeds.clock * speeds.device.forward * recipe.attention * small)
        )
    dtype = "bf16" if recipe.dtype == "fp8" else recipe.dtype
    queries = one.queries / cp
    return product_s(speeds, dtype, queries, one.keys, one.head_dim, heads) + product_s(
        speeds, dtype, queries, one.head_dim, one.keys, heads
    )


def _attention_backward_s(speeds: DeviceRates, recipe: Recipe, forward_s: float) -> float:
    """Fused: 5 products where the forward pass has 2, as it makes the scores again; else twice as many."""
    return forward_s * 2.5 * speeds.device.forward / speeds.device.backward if recipe.fused else 2 * forward_s


def _traffic_bytes(
    recipe: Recipe, block: BlockFacts, tp: int, cp: int, micro_batch: int
) -> tuple[float, float]:
    """Forward, of operations that are no products; and without fused attention, of heads that are brought in order and back, and of scores
    that are written, scaled, masked, put through softmax and dropped."""
    along = recipe.splits_sequence(cp) and not block.whole
    moved = block.traffic.bytes(recipe.stream, recipe.element, tp, along) * recipe.elementwise * micro_batch
    ordered = (
        sum((4 * one.queries + 4 * one.keys) * one.heads * one.head_dim for one in block.attention)
        * recipe.element
    )
    scores = sum(one.scores for one in block.attention) * (
        4 * recipe.element + (2 * recipe.element + 1 if block.core.split_bytes else 0)
    )
    return moved, (ordered + scores) / tp * micro_batch
