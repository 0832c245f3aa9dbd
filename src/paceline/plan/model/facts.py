"""ModelFacts: what planning needs to know of a model, counted on a module or derived from a few numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Literal, NamedTuple

from paceline.plan.model.operations import Operation


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with weights: rows × inner times inner × columns, `count` times per sample.

    The rows of all samples of a micro-batch form one matrix. cut: the dim that tensor parallelism divides, or
    None.
    convolution: rows are output positions, and inner is kernel size × input channels. reuse: number of
    windows that contain an element of the input.
    active: number of weights (experts) over which the rows are distributed; each gets rows × count / active
    of them.
    first: the input is data, which needs no gradients. frozen: the weights get no gradients.
    chunk: elements of the output that exist at once, on a rank, if the product is computed in chunks, and
    again in the backward pass; 0: all of them, once.
    """

    rows: float
    columns: float
    inner: float
    count: float = 1.0
    cut: Literal["rows", "columns", "inner"] | None = None
    active: float = 1.0
    reuse: float = 1.0
    convolution: bool = False
    first: bool = False
    frozen: bool = False
    chunk: float = 0.0

    def output_elements(self, samples: float, tp: int, cp: int = 1) -> float:
        """Return the elements of the output that a rank has at once."""
        elements = self.rows * self.columns * self.count * samples / cp
        elements /= tp if self.cut == "columns" else 1
        return min(elements, self.chunk) if self.chunk else elements

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.count


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention scores and their product with the values, without weights.

    Tensor parallelism divides the heads.
    window: maximum number of keys per query. kv_heads: None means as many as `heads`. masked: it has a mask
    other than a causal one, an additive bias or dropout, which ring attention does not support.
    """

    heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    kv_heads: int | None = None
    masked: bool = False

    def gathers_keys(self, cp: int) -> bool:
        """Return whether `cp` ranks gather keys and values instead of passing them around a ring."""
        is_windowed = self.window is not None and self.window < self.keys
        return self.masked or is_windowed or self.queries != self.keys or self.queries % cp > 0

    def gathered_elements(self, cp: int) -> float:
        """Return the elements of keys and values of other ranks that a rank keeps until the backward pass."""
        if cp == 1 or not self.gathers_keys(cp):
            return 0.0
        return self.key_value_elements * (1 - 1 / cp)

    def slice_imbalance(self, cp: int) -> float:
        """Return the work of the busiest of `cp` ranks, relative to their mean.

        Slices differ by one position at most. If 2 × `cp` does not divide a causal sequence, each rank has
        one range of it, and the last range sees most keys.
        """
        imbalance = -(-self.queries // cp) * cp / self.queries
        if self.causal and not self.gathers_keys(cp) and self.queries % (2 * cp):
            imbalance *= 2 - 1 / cp
        return imbalance

    @property
    def key_value_elements(self) -> float:
        """Elements of the keys and values of a sample."""
        return 2.0 * self.keys * self.head_dim * (self.kv_heads or self.heads)

    @property
    def flops(self) -> float:
        """FLOPs of both products over all pairs of query and key, masked pairs included, as papers count
        them.
        """
        return 4.0 * self.heads * self.queries * self.keys * self.head_dim

    @property
    def seen(self) -> float:
        """Share of the pairs that a kernel computes if it skips masked pairs."""
        if self.window is not None and self.window < self.keys:
            return self.window / self.keys * (1 - self.window / (2 * self.keys) if self.causal else 1)
        return 0.5 if self.causal else 1.0

    @property
    def scores(self) -> float:
        return float(self.heads) * self.queries * self.keys


class TensorVolume(NamedTuple):
    """Size of tensors of one sample, e.g. kept for the backward pass, or read and written.

    stream, whole, split: elements. `stream` has the dtype of the residual stream, the others that of
    activations. Tensor parallelism divides `split`. `whole_bytes` and `split_bytes` do not depend on a dtype,
    such as masks.
    """

    stream: float = 0.0
    whole: float = 0.0
    split: float = 0.0
    whole_bytes: float = 0.0
    split_bytes: float = 0.0

    def bytes(self, stream_bytes: float, element_bytes: float, tp: int = 1, sequence: bool = False) -> float:
        """Return the bytes on one rank.

        sequence: sequence parallelism divides what is outside of products (arXiv 2205.05198, section 4.2.2).
        """
        whole = self.stream * stream_bytes + self.whole * element_bytes + self.whole_bytes
        return whole / (tp if sequence else 1) + (self.split * element_bytes + self.split_bytes) / tp

    def times(self, by: float) -> "TensorVolume":
        return TensorVolume(*(value * by for value in self))

    def plus(self, other: "TensorVolume") -> "TensorVolume":
        return TensorVolume(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = TensorVolume()


class LiveBytes(NamedTuple):
    """Bytes of live tensors of a sample in float32, without weights and their gradients.

    kept: from a block's forward pass to its backward pass. most: at the block's peak, with temporary tensors.
    What earlier blocks keep is not included.
    """

    kept: float
    most: float


@dataclass(frozen=True, eq=False)
class BlockFacts:
    """A part of a model that is computed, gathered and recomputed as a unit; all numbers are of one sample.

    params: tensor parallelism divides `split_params` of them; `expert_params` belong to experts. frozen:
    share of them that gets no gradients.
    dispatched: elements that a forward pass sends to experts, and back; copies: experts of a token.
    expert_groups: into which the experts are divided, and how many of them a token's experts may be in.
    saved: by recompute, what the forward pass keeps for the backward pass; core, gate: what attention and a
    gate's activation without fused kernels add to `none`. traffic: what operations other than products and
    attention read and write in a forward pass; expert_traffic: of experts, in addition, if no kernel fuses
    them.
    boundary: elements of the block's output. sums: all-reduces of its output under tensor parallelism,
    forward.
    kernels: operations launched forward, besides `expert_kernels`, which are divided with the experts.
    operations: all but products and attention, views included, if counted.
    tensors: number of parameter tensors, if counted; largest: elements of the largest.
    whole: under tensor parallelism, activations between split layers are whole on each rank.
    has_state_space: it has a Mamba layer. lives: if traced.
    """

    name: str
    params: int
    split_params: int = 0
    expert_params: int = 0
    frozen: float = 0.0
    dispatched: float = 0.0
    copies: int = 1
    expert_groups: tuple[int, int] = (1, 1)
    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    saved: Mapping[str, TensorVolume] = field(default_factory=dict)
    core: TensorVolume = NOTHING
    gate: TensorVolume = NOTHING
    traffic: TensorVolume = NOTHING
    expert_traffic: TensorVolume = NOTHING
    boundary: float = 0.0
    sums: float = 0.0
    kernels: int = 10
    expert_kernels: int = 0
    operations: tuple[Operation, ...] = ()
    tensors: int = 0
    largest: int = 0
    whole: bool = False
    has_state_space: bool = False
    lives: LiveBytes | None = None

    @property
    def active_params(self) -> float:
        """Parameters that a token is computed with: those of all but the experts that it is not sent to."""
        return self.params - self.expert_params * max(0.0, 1 - self.copies / self.experts)

    @property
    def experts(self) -> int:
        """The number of experts; 1 without any."""
        return int(max((product.active for product in self.products), default=1.0))

    @property
    def product_flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def attention_flops(self) -> float:
        return sum(attention.flops for attention in self.attention)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass of one sample.

        The backward pass has twice as many: products for inputs and for weights.
        """
        return self.product_flops + self.attention_flops


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """Facts of a model: `first` (embeddings), `runs` of identical blocks, `last` (head and loss).

    tokens: of a sample; 1 if samples are not sequences. heads: tp must divide them. sequence: cp splits it.
    shared_params: weights of the head that are also those of the embedding; counted in `first`.
    averaged: share of the parameters of which the training keeps a moving average.
    batch: default number of samples per step. source: counted, measured, or the origin of the numbers.
    slower: measured computing time of a real step relative to the prediction. Compared by identity, so that
    caches look it up fast.
    passes: forward and backward passes of a step, if it has several updates. updates: how often a step
    updates a parameter, on average. is_data_parallel_only: other axes cannot divide such a step.
    """

    name: str
    first: BlockFacts
    runs: tuple[tuple[BlockFacts, int], ...]
    last: BlockFacts
    tokens: int = 1
    heads: tuple[int, ...] = ()
    sequence: int | None = None
    hidden: int = 0
    vocab: int = 0
    shared_params: int = 0
    averaged: float = 0.0
    batch: int | None = None
    source: str = "few numbers"
    slower: float = 1.0
    passes: float = 1.0
    updates: float = 1.0
    is_data_parallel_only: bool = False

    def parts(self) -> Iterator[tuple[BlockFacts, int]]:
        yield self.first, 1
        yield from self.runs
        yield self.last, 1

    @property
    def blocks(self) -> int:
        return sum(count for _, count in self.runs)

    @cached_property
    def params(self) -> int:
        return sum(block.params * count for block, count in self.parts())

    @property
    def active_params(self) -> float:
        """Parameters that a token is computed with."""
        return sum(block.active_params * count for block, count in self.parts())

    @cached_property
    def experts(self) -> int:
        """The number of experts that expert parallelism can divide: a divisor of that of each block; or 1."""
        counts = {
            int(product.active)
            for block, _ in self.parts()
            for product in block.products
            if block.dispatched and product.active > 1
        }
        return gcd(*counts) if counts else 1

    @cached_property
    def has_state_space(self) -> bool:
        return any(block.has_state_space for block, _ in self.runs)

    @property
    def frozen_params(self) -> float:
        """Those of `active_params` that get no gradients."""
        return sum(block.active_params * block.frozen * count for block, count in self.parts())

    @cached_property
    def flops(self) -> float:
        """FLOPs of the forward pass of one sample."""
        return sum(block.flops * count for block, count in self.parts())

    @property
    def training_flops(self) -> float:
        """Model FLOPs of the literature: forward and backward of a sample without recomputation.

        Frozen weights have no products for their gradients.
        """
        return 3.0 * self.flops - self.frozen_flops

    @cached_property
    def frozen_flops(self) -> float:
        """FLOPs of the forward pass of a sample in products whose weights are frozen."""
        return sum(
            product.flops * count
            for block, count in self.parts()
            for product in block.products
            if product.frozen
        )

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Degrees that divide the heads and the widths of all blocks."""
        if not self.heads:
            return (1,)
        most = min(self.heads)
        return tuple(t for t in range(1, most + 1) if all(heads % t == 0 for heads in self.heads))
