"""ModelFacts of a transformer from a few numbers, in closed form."""

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.plan.model.facts import Attention, BlockFacts, ModelFacts, Product, TensorVolume
from paceline.spec import Value

NORMS = {"layer": 2, "rms": 1}  # vectors of weights


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
        decoder = _block(self, "block", cross=self.encoder_layers > 0, causal=self.causal)
        runs: tuple[tuple[BlockFacts, int], ...] = ((decoder, self.layers),)
        if self.encoder_layers:
            runs = ((_block(self, "encoder block", cross=False, causal=False), self.encoder_layers), *runs)
        shared = self.vocab * self.hidden if self.tied and self.head != "classes" else 0
        return ModelFacts(
            name=self.name,
            first=_embedding(self),
            runs=runs,
            last=_head(self),
            tokens=self.seq,
            heads=(self.heads, self.kv_heads or self.heads),
            sequence=self.seq,
            hidden=self.hidden,
            vocab=self.vocab,
            shared_params=shared,
            batch=self.batch,
        )


def _block(m: Transformer, name: str, cross: bool, causal: bool) -> BlockFacts:
    """Return the facts of a block.

    Kept activations are the tensors of arXiv 2205.05198, equation 1, adapted to gates, and without biases or
    dropout.
    """
    h, s, w, kv, f = m.hidden, m.seq, m.width, m.kv_width, m.wide
    many, gates, active = 1 + cross, 1 + m.gated, m.active_experts
    weights = h * (w + 2 * kv) + w * h
    experts = (gates + 1) * h * f * m.experts
    biases = (w + 2 * kv, h) if m.bias else (0, 0)
    ffn_biases = (gates * f, h) if m.bias else (0, 0)
    router = h * m.experts if m.experts > 1 else 0
    split = many * (weights + biases[0]) + experts + ffn_biases[0]
    drop = float(m.dropout)
    # q, k, v, and the inputs of the projection and of the second product
    tensors = many * (w + 2 * kv + w) + active * ((2 + 2 * m.gated) * f)
    # outputs of products and attention, except the last product of each part
    outputs = many * (w + 2 * kv + w) + active * gates * f
    scores = float(many * m.heads * s * s)
    return BlockFacts(
        name=name,
        params=split + many * biases[1] + ffn_biases[1] + router + (2 + cross) * m.norm_params,
        split_params=split,
        expert_params=experts if m.experts > 1 else 0,
        products=(
            Product(s, w + 2 * kv, h, many, "columns"),
            Product(s, h, w, many, "inner"),
            Product(s, gates * f, h, active, "columns", m.experts),
            Product(s, h, f, active, "inner", m.experts),
        ),
        attention=tuple(
            Attention(m.heads, s, s, m.dim, seen and causal, m.window, m.kv_heads)
            for seen in (True, False)[:many]
        ),
        saved={
            "none": TensorVolume(
                (1 + many) * h * s, (many + active) * h * s, tensors * s, (1 + many) * drop * h * s, 0.0
            ),
            "selective": TensorVolume(h * s, (many + active) * h * s, outputs * s, 0.0, 0.0),
            "half": TensorVolume(h * s, active * h * s, (many * (2 * w + kv) + active * f) * s, 0.0, 0.0),
            "full": TensorVolume(h * s),
        },
        core=TensorVolume(0.0, 0.0, (1 + drop) * scores, 0.0, drop * scores),
        traffic=_traffic(m, many),
        boundary=h * s,
        sums=many + 1,
        kernels=many * 14 + 10 + 4 * m.gated + (20 + 4 * m.experts if m.experts > 1 else 0),
    )


def _traffic(m: Transformer, many: int) -> TensorVolume:
    """Return elements read and written outside of products and attention.

    Norms (1 + 1), residual sums (2 + 1), rotation (q and k, in and out), activation (in and out; a gate reads
    two).
    """
    h, s, w, kv = m.hidden, m.seq, m.width, m.kv_width
    drop = float(m.dropout)
    rotated = 0 if m.positions or m.relative_positions else 2 * (w + kv)
    active = m.active_experts
    spread = 4 * active * h if m.experts > 1 else 0  # tokens sent to experts and back
    return TensorVolume(
        stream=(1 + many) * 5 * h * s,
        whole=spread * s,
        split=(many * rotated + active * (2 + m.gated) * m.wide) * s,
        whole_bytes=(1 + many) * drop * h * s,
    )


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
