"""ModelFacts: what planning needs to know of a model, whether it was counted on a module or written down as a few numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from paceline.plan.model.operations import Operation


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with weights in the forward pass of one sample: rows × inner times inner × columns, `count` times.

    Rows of the samples of a micro-batch are joined into one matrix. `cut`: the dim that tensor parallelism divides, if it does.
    A convolution has a row for each output position and kernel size × input channels as inner; `reuse`: how many of its windows an element
    of the input is in.
    `active`: over how many weights the rows are dealt out (experts); each then sees rows × count / active of them.
    """

    rows: float
    columns: float
    inner: float
    count: float = 1.0
    cut: Literal["rows", "columns", "inner"] | None = None
    active: float = 1.0
    reuse: float = 1.0
    convolution: bool = False
    first: bool = False  # of data, which need no gradients

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.count


@dataclass(frozen=True, slots=True)
class Attention:
    """Scores and their sum over values, which have no weights; tensor parallelism divides the heads."""

    heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = True
    window: int | None = None  # keys that a query sees at most
    kv_heads: int | None = None  # None: as many as heads

    @property
    def flops(self) -> float:
        """Of both products, over all pairs of a query and a key, as the papers count them, masked or not."""
        return 4.0 * self.heads * self.queries * self.keys * self.head_dim

    @property
    def seen(self) -> float:
        """Share of the pairs that a kernel which skips masked ones has to compute."""
        if self.window is not None and self.window < self.keys:
            return self.window / self.keys * (1 - self.window / (2 * self.keys) if self.causal else 1)
        return 0.5 if self.causal else 1.0

    @property
    def scores(self) -> float:
        return float(self.heads) * self.queries * self.keys


class TensorVolume(NamedTuple):
    """How much of something a sample takes: kept for the backward pass, or read and written.

    stream, whole, split: elements. `stream` has the type of the residual stream, the others that of activations; `split` is what tensor
    parallelism divides. `whole_bytes` and `split_bytes` do not depend on a type, as masks.
    """

    stream: float = 0.0
    whole: float = 0.0
    split: float = 0.0
    whole_bytes: float = 0.0
    split_bytes: float = 0.0

    def bytes(self, stream_bytes: float, element_bytes: float, tp: int = 1, sequence: bool = False) -> float:
        """On one rank. `sequence`: what is outside of the products is divided along the sequence (arXiv 2205.05198, section 4.2.2)."""
        whole = self.stream * stream_bytes + self.whole * element_bytes + self.whole_bytes
        return whole / (tp if sequence else 1) + (self.split * element_bytes + self.split_bytes) / tp


NOTHING = TensorVolume()


class LiveBytes(NamedTuple):
    """Bytes of tensors of a sample in float32, weights and gradients of weights left out. kept: from a block's forward pass to its
    backward pass; `most`: at the block's worst moment, with what is only there for that moment. What blocks before it keep comes on top."""

    kept: float
    most: float


@dataclass(frozen=True, eq=False)
class BlockFacts:
    """A part of a model that is computed, gathered and recomputed as one; all numbers are of one sample.

    params, of which `split_params` are divided by tensor parallelism, and `expert_params` belong to experts.
    saved: by recompute, what the forward pass leaves for the backward pass; `core` is what attention without a fused kernel adds to
    `none`. traffic: what operations other than products and attention read and write in a forward pass.
    boundary: elements that a block gives to the next one. sums: all-reduces of its output that tensor parallelism takes, forward.
    """

    name: str
    params: int
    split_params: int = 0
    expert_params: int = 0
    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    saved: Mapping[str, TensorVolume] = field(default_factory=dict)
    core: TensorVolume = NOTHING
    traffic: TensorVolume = NOTHING
    boundary: float = 0.0
    sums: float = 0.0
    kernels: int = 10  # operations that are launched, forward
    operations: tuple[
        Operation, ...
    ] = ()  # other than products and attention, views included, where they were counted
    tensors: int = 0  # parameters, where they were counted
    largest: int = 0  # parameters of the largest of them
    whole: bool = False  # under tensor parallelism each rank has all of what lies between split layers
    lives: LiveBytes | None = None  # where a pass was watched

    @property
    def product_flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def attention_flops(self) -> float:
        return sum(attention.flops for attention in self.attention)

    @property
    def flops(self) -> float:
        """Forward, of one sample; the backward pass takes twice as many, one product for the input and one for the weight."""
        return self.product_flops + self.attention_flops


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """`first` (embeddings), `runs` of blocks that are alike, `last` (head and loss). Compared by identity, so that it is cheap to look up.

    tokens: of a sample; 1 where samples are not sequences. `heads`: what tp must divide; `sequence`: what cp must divide.
    shared_params: weights of the head that are those of the embedding; they are counted in `first`.
    batch: samples of a step, where none are asked for.
    source: counted, measured, or where the numbers are from.
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
    batch: int | None = None
    source: str = "few numbers"
    slower: float = 1.0  # how many times as long as predicted the computing of a real step took

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

    @cached_property
    def flops(self) -> float:
        """Forward, of one sample."""
        return sum(block.flops * count for block, count in self.parts())

    @property
    def training_flops(self) -> float:
        """Forward and backward without recompute, of one sample: the model FLOPs of the literature."""
        return 3.0 * self.flops

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Degrees that divide the heads and the widths of all blocks."""
        if not self.heads:
            return (1,)
        most = min(self.heads)
        return tuple(t for t in range(1, most + 1) if all(heads % t == 0 for heads in self.heads))
