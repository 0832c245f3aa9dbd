"""ModelFacts of a transformer from a few numbers, in closed form."""

from itertools import groupby
from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.plan.model.facts import BlockFacts, ModelFacts, Product, TensorVolume
from paceline.plan.model.lora import freeze
from paceline.plan.model.transformer_parts import (
    attention_part,
    expert_part,
    feed_forward_part,
    join_parts,
    latent_attention_part,
    state_space_part,
)
from paceline.spec import Value


class Transformer(Value):
    """The numbers of a transformer.

    Defaults are those of GPT-2.

    seq: sequence length in training. batch: default number of samples per step. ffn: None means 4 × hidden.
    gated: the feed-forward part multiplies two projections, as SwiGLU. norm_bias: of layer norms; None means
    as `bias`.
    positions: learned positions; 0: none, or rotary embeddings. relative_positions: buckets per head, of
    encoder and decoder.
    patch: makes it a vision transformer with images of `image`² pixels in patches of `patch`², and `vocab`
    classes.
    encoder_layers: makes it an encoder-decoder; `layers` are then those of the decoder, and both have
    sequences of `seq`.
    experts: of each of the layers with experts, `active_experts` of them per token, each of width
    `expert_ffn` (None: `ffn`), and `shared_ffn` for all tokens. dense_layers: the first layers, which have
    none; expert_groups: into which the experts are divided, `group_limit` of which a token's experts are in
    (None: all); expert_every: of the others, each such layer has experts, the rest is dense. expert_hidden:
    width of the latent vectors that experts see instead of the stream (None: `hidden`). clamped: what enters
    the gate of an expert is clamped.
    full_every: with a window, each such layer sees all tokens.
    kv_rank: makes it latent attention (arXiv 2405.04434, section 2.1): width of the latent keys and values;
    q_rank: of the queries, or None; rope_dim: rotary part of a head's keys, in addition to `head_dim`.
    pattern: one letter per layer, which then has one part: M state space (Mamba-2), * attention,
    - feed-forward, E experts. state_heads, state_dim, state_groups: of the state-space layers, whose heads
    have `state_head_dim`.
    lora_rank: the model is frozen, and adapters of this rank are trained (arXiv 2106.09685).
    """

    name: str = "transformer"
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    ffn: int | None = Field(None, ge=1)
    vocab: int = Field(ge=1)
    seq: int = Field(ge=1)
    batch: int | None = Field(None, ge=1)
    experts: int = Field(1, ge=1)
    active_experts: int = Field(1, ge=1)
    expert_ffn: int | None = Field(None, ge=1)
    expert_hidden: int | None = Field(None, ge=1)
    expert_groups: int = Field(1, ge=1)
    group_limit: int | None = Field(None, ge=1)
    clamped: bool = False
    shared_ffn: int = Field(0, ge=0)
    dense_layers: int = Field(0, ge=0)
    expert_every: int = Field(1, ge=1)
    kv_rank: int | None = Field(None, ge=1)
    q_rank: int | None = Field(None, ge=1)
    rope_dim: int = Field(0, ge=0)
    pattern: str = Field("", pattern=r"[M*\-E]*")
    state_heads: int = Field(0, ge=0)
    state_head_dim: int = Field(64, ge=1)
    state_groups: int = Field(8, ge=1)
    state_dim: int = Field(128, ge=1)
    lora_rank: int = Field(0, ge=0)
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    bias: bool = True
    norm_bias: bool | None = None
    positions: int = Field(0, ge=0)
    relative_positions: int = Field(0, ge=0)
    tied: bool = True
    dropout: bool = False
    causal: bool = True
    window: int | None = Field(None, ge=1)
    full_every: int | None = Field(None, ge=1)
    encoder_layers: int = Field(0, ge=0)
    head: Literal["tokens", "masked tokens", "classes"] = "tokens"
    token_types: int = Field(0, ge=0)
    embedding_norm: bool = False
    final_norm: bool = True
    patch: int | None = Field(None, ge=1)
    image: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.hidden % self.heads and self.head_dim is None:
            raise ValueError(f"hidden={self.hidden} is not divisible by heads={self.heads}; set head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}")
        if self.active_experts > self.experts:
            raise ValueError(f"active_experts={self.active_experts} is more than experts={self.experts}")
        if self.experts % self.expert_groups:
            raise ValueError(f"experts={self.experts} is not divisible by expert_groups={self.expert_groups}")
        if (self.group_limit or 1) > self.expert_groups:
            raise ValueError(
                f"group_limit={self.group_limit} is more than expert_groups={self.expert_groups}"
            )
        if (
            self.experts // self.expert_groups * (self.group_limit or self.expert_groups)
            < self.active_experts
        ):
            raise ValueError(
                f"group_limit={self.group_limit} groups have fewer than active_experts={self.active_experts}"
            )
        if self.pattern and len(self.pattern) != self.layers:
            raise ValueError(f"pattern has {len(self.pattern)} letters, and layers={self.layers}")
        if "M" in self.pattern and not self.state_heads:
            raise ValueError("pattern has state-space layers (M); set state_heads")
        if "E" in self.pattern and self.experts == 1:
            raise ValueError("pattern has layers with experts (E); set experts")
        return self

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.dim

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * self.dim

    @property
    def wide(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def norm_params(self) -> int:
        both = self.norm == "layer" and (self.bias if self.norm_bias is None else self.norm_bias)
        return self.hidden * (2 if both else 1)

    def facts(self) -> ModelFacts:
        shared = self.vocab * self.hidden if self.tied and self.head != "classes" else 0
        facts = ModelFacts(
            name=self.name,
            first=_embedding(self),
            runs=self._runs(),
            last=_head(self),
            tokens=self.seq,
            heads=(self.heads,) if self.kv_rank else (self.heads, self.kv_heads or self.heads),
            sequence=self.seq,
            hidden=self.hidden,
            vocab=self.vocab,
            shared_params=shared,
            batch=self.batch,
        )
        return freeze(facts, self.lora_rank) if self.lora_rank else facts

    def _runs(self) -> tuple[tuple[BlockFacts, int], ...]:
        """Return the blocks in their order, with the number of identical ones in a row."""
        kinds = [self._kind(layer) for layer in range(self.layers)]
        blocks = {kind: self._block(*kind) for kind in dict.fromkeys(kinds)}
        runs = tuple((blocks[kind], len(list(group))) for kind, group in groupby(kinds))
        if self.encoder_layers:
            encoder = join_parts(
                "encoder block",
                self,
                attention_part(self, cross=False, causal=False),
                feed_forward_part(self, self.wide),
            )
            return ((encoder, self.encoder_layers), *runs)
        return runs

    def _kind(self, layer: int) -> tuple[str, str, bool]:
        """Return what mixes tokens in a layer, its feed-forward part, and whether it sees all tokens."""
        full = self.window is None or (
            self.full_every is not None and layer % self.full_every == self.full_every - 1
        )
        if self.pattern:
            letter = self.pattern[layer]
            return {
                "M": ("state space", "", True),
                "*": ("attention", "", full),
                "-": ("", "dense", True),
                "E": ("", "experts", True),
            }[letter]
        sparse = self.experts > 1 and layer >= self.dense_layers and (layer + 1) % self.expert_every == 0
        return "attention", "experts" if sparse else "dense", full

    def _block(self, mixer: str, feed_forward: str, full: bool) -> BlockFacts:
        parts = []
        if mixer == "state space":
            parts.append(state_space_part(self))
        elif mixer and self.kv_rank:
            parts.append(latent_attention_part(self))
        elif mixer:
            parts.append(attention_part(self, self.encoder_layers > 0, self.causal, full))
        if feed_forward:
            parts.append(
                expert_part(self) if feed_forward == "experts" else feed_forward_part(self, self.wide)
            )
        return join_parts("block", self, *parts)


def _embedding(m: Transformer) -> BlockFacts:
    h, s = m.hidden, m.seq
    norm = m.norm_params if m.embedding_norm else 0
    if m.patch is not None:
        inner = 3 * m.patch**2
        weights, rows = inner * h + h, (m.image or 224) ** 2 // m.patch**2
        table, extra, products = 0, h, [Product(rows, h, inner)]  # a token for the class
    else:
        weights, table, extra, products = 0, m.vocab * h, 0, []
    positions = m.positions * h
    relative = m.relative_positions * m.heads * (1 + (m.encoder_layers > 0))
    return BlockFacts(
        name="embedding",
        params=table + positions + relative + weights + extra + m.token_types * h + norm,
        split_params=table,
        products=tuple(products),
        saved={"none": TensorVolume(float(h * s) * (norm > 0), 0.0, 0.0, float(m.dropout) * h * s)},
        traffic=TensorVolume(stream=2.0 * h * s),
        boundary=float(h * s),
        sums=1.0 if table else 0.0,
        kernels=4,
    )


def _head(m: Transformer) -> BlockFacts:
    """Return the facts of head and loss. The loss keeps 4 bytes per logit (arXiv 2205.05198, section 4.3)."""
    h, v = m.hidden, m.vocab
    s = 1 if m.head == "classes" else m.seq
    transform = m.head == "masked tokens"
    own = 0 if m.tied and m.head != "classes" else v * h
    norms = (1 + (m.encoder_layers > 0)) * m.norm_params if m.final_norm else 0
    extra = h * h + h + 2 * h + v if transform else v if m.head == "classes" else 0
    products = (Product(s, v, h, 1.0, "columns"), *((Product(s, h, h),) if transform else ()))
    return BlockFacts(
        name="head",
        params=own + norms + extra,
        split_params=own,
        products=products,
        saved={"none": TensorVolume(float(h * s), float(h * s), 0.0, 0.0, 4.0 * v * s)},
        traffic=TensorVolume(stream=2.0 * h * s, split=float(v * s), split_bytes=16.0 * v * s),
        kernels=8,
    )
