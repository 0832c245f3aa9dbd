"""Parts of a transformer's block, in closed form: attention, feed-forward layers, experts, state spaces.

A part has its norm and its residual sum. Kept activations are the tensors of arXiv 2205.05198, equation 1,
adapted to gates, and without biases or dropout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.plan.model.facts import NOTHING, Attention, BlockFacts, Product, TensorVolume

if TYPE_CHECKING:
    from paceline.plan.model.transformer import Transformer

# Elements of 16 bits that separate operations of experts move forward, for each element that they change.
# With the backward pass (compute_time.BACKWARD_TRAFFIC), a bias moves 68 bytes, since it is added expert by
# expert in float32, and a clamp 18 (Megatron-Core of 2026: TEGroupedMLP._apply_bias,
# weighted_bias_quick_geglu_impl).
BIAS_MOVES, CLAMP_MOVES = 12.4, 3.3
STATE_CHUNK = 256  # tokens of a chunk of the scan (arXiv 2405.21060, section 6)


def join_parts(name: str, m: Transformer, *parts: BlockFacts) -> BlockFacts:
    """Return the block of these parts. With recomputation, a block keeps its input."""
    saved = {
        kind: sum_volumes(part.saved.get(kind, NOTHING) for part in parts)
        for kind in ("none", "selective", "half", "full")
    }
    boundary = TensorVolume(float(m.hidden * m.seq))
    return BlockFacts(
        name=name,
        params=sum(part.params for part in parts),
        split_params=sum(part.split_params for part in parts),
        expert_params=sum(part.expert_params for part in parts),
        dispatched=sum(part.dispatched for part in parts),
        copies=max(part.copies for part in parts),
        expert_groups=max(part.expert_groups for part in parts),
        products=tuple(product for part in parts for product in part.products),
        attention=tuple(call for part in parts for call in part.attention),
        saved={kind: value if kind == "none" else value.plus(boundary) for kind, value in saved.items()},
        core=sum_volumes(part.core for part in parts),
        gate=sum_volumes(part.gate for part in parts),
        traffic=sum_volumes(part.traffic for part in parts),
        expert_traffic=sum_volumes(part.expert_traffic for part in parts),
        boundary=float(m.hidden * m.seq),
        sums=sum(part.sums for part in parts),
        kernels=sum(part.kernels for part in parts),
        expert_kernels=sum(part.expert_kernels for part in parts),
        has_state_space=any(part.has_state_space for part in parts),
    )


def sum_volumes(volumes: Iterable[TensorVolume]) -> TensorVolume:
    total = NOTHING
    for volume in volumes:
        total = total.plus(volume)
    return total


def attention_part(m: Transformer, cross: bool, causal: bool, full: bool = True) -> BlockFacts:
    """Return attention with its projections, and in a decoder (`cross`) also that to the encoder's output."""
    h, s, w, kv = m.hidden, m.seq, m.width, m.kv_width
    many, drop = 1 + cross, float(m.dropout)
    biases = (w + 2 * kv, h) if m.bias else (0, 0)
    split = many * (h * (w + 2 * kv) + w * h + biases[0])
    scores = float(many * m.heads * s * s)
    # q, k, v and the input of the projection; with recomputation the outputs of products and attention
    tensors = many * (w + 2 * kv + w) * s
    rotated = 0 if m.positions or m.relative_positions else 2 * (w + kv)
    return BlockFacts(
        name="attention",
        params=split + many * (biases[1] + m.norm_params),
        split_params=split,
        products=(Product(s, w + 2 * kv, h, many, "columns"), Product(s, h, w, many, "inner")),
        attention=tuple(
            Attention(m.heads, s, s, m.dim, seen and causal, None if full else m.window, m.kv_heads)
            for seen in (True, False)[:many]
        ),
        saved={
            "none": TensorVolume(many * h * s, many * h * s, tensors, many * drop * h * s),
            "selective": TensorVolume(0.0, many * h * s, tensors),
            "half": TensorVolume(0.0, 0.0, many * (2 * w + kv) * s),
        },
        core=TensorVolume(0.0, 0.0, (1 + drop) * scores, 0.0, drop * scores),
        traffic=_norm_and_sum(m, many).plus(TensorVolume(split=float(many * rotated * s))),
        sums=many,
        kernels=many * 14,
    )


def latent_attention_part(m: Transformer) -> BlockFacts:
    """Return multi-head latent attention: queries, keys and values are projected from narrow latent vectors.

    Source: arXiv 2405.04434, section 2.1. The narrow projections are the same on all ranks of tp.
    """
    h, s, w = m.hidden, m.seq, m.width
    key = m.dim + m.rope_dim
    narrow_kv, narrow_q = (m.kv_rank or 0), m.q_rank or 0
    down = h * (narrow_kv + m.rope_dim) + h * narrow_q
    up_q, up_kv = (narrow_q or h) * m.heads * key, narrow_kv * 2 * w
    split = up_q + up_kv + w * h
    keys = m.heads * key
    products = [
        *([Product(s, narrow_q, h)] if narrow_q else []),
        Product(s, keys, narrow_q or h, cut="columns"),
        Product(s, narrow_kv + m.rope_dim, h),
        Product(s, 2 * w, narrow_kv, cut="columns"),
        Product(s, h, w, cut="inner"),
    ]
    latent = narrow_kv + m.rope_dim + narrow_q
    tensors = (2 * keys + 2 * w) * s  # q, k, v, output
    return BlockFacts(
        name="latent attention",
        params=split + down + narrow_kv + narrow_q + m.norm_params,
        split_params=split,
        products=tuple(products),
        # keys and values have different widths; their products have the FLOPs of the mean width
        attention=(Attention(m.heads, s, s, (key + m.dim) // 2, m.causal),),
        saved={
            "none": TensorVolume(h * s, (h + 2 * latent) * s, tensors),
            "selective": TensorVolume(0.0, (h + latent) * s, tensors),
            "half": TensorVolume(0.0, latent * s, tensors),
        },
        core=TensorVolume(0.0, 0.0, float(m.heads * s * s)),
        # the rotary part of a key is copied to each head, and both parts are joined
        traffic=_norm_and_sum(m, 1).plus(
            TensorVolume(whole=4.0 * latent * s, split=(4.0 * keys + 2 * w) * s)
        ),
        sums=1,
        kernels=30,
    )


def state_space_part(m: Transformer) -> BlockFacts:
    """Return a Mamba-2 layer: projections, a short convolution, a scan in chunks, a gated norm.

    Source: arXiv 2405.21060. The scan counts as attention of each token to a quarter of a chunk (half of it
    is masked, and scores are shared by a group) and to the state.
    """
    h, s = m.hidden, m.seq
    inner, shared = m.state_heads * m.state_head_dim, 2 * m.state_groups * m.state_dim
    wide = 2 * inner + shared + m.state_heads
    split = h * wide + inner * h
    return BlockFacts(
        name="state space",
        params=split + 5 * (inner + shared) + 3 * m.state_heads + inner + m.norm_params,
        split_params=split,
        products=(Product(s, wide, h, cut="columns"), Product(s, h, inner, cut="inner")),
        attention=(Attention(m.state_heads, s, STATE_CHUNK // 4 + m.state_dim, m.state_head_dim, False),),
        saved={
            "none": TensorVolume(h * s, h * s, (wide + 2 * (inner + shared) + 2 * inner) * s),
            "selective": TensorVolume(0.0, h * s, (wide + inner) * s),
            "half": TensorVolume(0.0, 0.0, (wide + inner) * s),
        },
        # convolution, activation, scan and gated norm read and write the inner width, and states of chunks
        traffic=_norm_and_sum(m, 1).plus(
            TensorVolume(split=(4.0 * (inner + shared) + 9 * inner + inner * m.state_dim / 64) * s)
        ),
        sums=1,
        kernels=30,
        has_state_space=True,
    )


def feed_forward_part(m: Transformer, width: int) -> BlockFacts:
    """Return a dense feed-forward part of this inner width."""
    h, s, gates, drop = m.hidden, m.seq, 1 + m.gated, float(m.dropout)
    biases = (gates * width, h) if m.bias else (0, 0)
    split = (gates + 1) * h * width + biases[0]
    return BlockFacts(
        name="feed-forward",
        params=split + biases[1] + m.norm_params,
        split_params=split,
        products=(Product(s, gates * width, h, 1, "columns"), Product(s, h, width, 1, "inner")),
        saved={
            "none": TensorVolume(h * s, h * s, (2 + m.gated) * width * s, drop * h * s),
            "selective": TensorVolume(0.0, h * s, gates * width * s),
            "half": TensorVolume(0.0, h * s, width * s),
        },
        gate=TensorVolume(split=float(m.gated * width * s)),
        traffic=_norm_and_sum(m, 1).plus(TensorVolume(split=float((2 + m.gated) * width * s))),
        sums=1,
        kernels=10 + 4 * m.gated,
    )


def expert_part(m: Transformer) -> BlockFacts:
    """Return a feed-forward part of experts, with those that all tokens use.

    Latent experts see a projection of the stream, and their sum is projected back.
    """
    h, s, gates, active = m.hidden, m.seq, 1 + m.gated, m.active_experts
    width, shared, seen = m.expert_ffn or m.wide, m.shared_ffn, m.expert_hidden or m.hidden
    biases = (gates * width, seen) if m.bias else (0, 0)
    experts = (gates + 1) * seen * width * m.experts
    split = experts + biases[0] + (gates + 1) * h * shared
    everywhere = (
        (Product(s, gates * shared, h, 1, "columns"), Product(s, h, shared, 1, "inner")) if shared else ()
    )
    latent = (Product(s, seen, h), Product(s, h, seen)) if m.expert_hidden else ()
    used = active * width + shared
    inputs = (active * seen + (shared > 0) * h) * s
    return BlockFacts(
        name="experts",
        params=split + biases[1] + h * m.experts + m.norm_params + 2 * h * seen * bool(latent),
        split_params=split,
        expert_params=experts,
        dispatched=2.0 * active * seen * s,
        copies=active,
        expert_groups=(m.expert_groups, m.group_limit or m.expert_groups),
        products=(
            Product(s, gates * width, seen, active, "columns", m.experts),
            Product(s, seen, width, active, "inner", m.experts),
            *everywhere,
            *latent,
        ),
        saved={
            "none": TensorVolume(h * s, inputs, (2 + m.gated) * used * s),
            "selective": TensorVolume(0.0, inputs, gates * used * s),
            "half": TensorVolume(0.0, active * seen * s, used * s),
        },
        gate=TensorVolume(split=float(m.gated * used * s)),
        # rows are sorted by expert, sent, and summed again
        traffic=_norm_and_sum(m, 1).plus(
            TensorVolume(whole=4.0 * active * seen * s, split=float((2 + m.gated) * used * s))
        ),
        expert_traffic=TensorVolume(
            split=active * s * (BIAS_MOVES * m.bias * seen + CLAMP_MOVES * m.clamped * gates * width)
        ),
        sums=1,
        kernels=10 + 4 * m.gated + 20,
        expert_kernels=4 * m.experts,
    )


def _norm_and_sum(m: Transformer, many: int) -> TensorVolume:
    """Return elements read and written by norm (1 + 1), residual sum (2 + 1) and dropout of a part."""
    return TensorVolume(
        stream=many * 5.0 * m.hidden * m.seq, whole_bytes=many * float(m.dropout) * m.hidden * m.seq
    )
