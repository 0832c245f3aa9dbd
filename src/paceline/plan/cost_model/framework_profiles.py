"""Recipe: how a training framework runs a plan: bytes per number, recomputation, and overlap."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import NamedTuple

from paceline.errors import PlanError


class RecomputeShares(NamedTuple):
    """Shares of the forward pass that the backward pass repeats.

    kept: key of `BlockFacts.saved` for what is kept.
    """

    kept: str
    products: float
    attention: float
    traffic: float


# core: only the scores of attention (arXiv 2205.05198, section 5); products: all but products and attention,
# as Paceline does;
# half: also every second product, as torchtitan does (torchtitan/distributed/activation_checkpoint.py).
SELECTIVE: Mapping[str, RecomputeShares] = {
    "core": RecomputeShares("none", 0.0, 1.0, 0.0),
    "products": RecomputeShares("selective", 0.0, 0.0, 1.0),
    "half": RecomputeShares("half", 0.4, 0.0, 1.0),
}


WIDE_DTYPES = ("bf16", "fp16")
LOW_DTYPES = ("fp8", "mxfp8", "fp4")


@dataclass(frozen=True, eq=False)
class Recipe:
    """Properties of a training framework.

    weight, gradient, optimizer, master: bytes per parameter; master: main weights. cast: bytes of a copy of
    the weights in the dtype of products that lives through a step, or 0. stream, element: bytes of an element
    of the residual stream, and of other activations.
    cast_traffic: bytes that a cast to 8 or 4 bits reads and writes, per element of the inputs and outputs of
    products.
    gather, reduce: bytes sent per parameter by gathers of ZeRO and by the averaging of gradients.
    products: speed of matrix products relative to the libraries of 2023. grouped: speed of the products of
    experts relative to those.
    fused_experts: the products of all experts are one kernel, which also computes their activations and
    casts. graphs: the host starts a whole step at once (CUDA graphs). blocked_s: what each kernel takes
    longer because the host waits for its end before it prepares the next (CUDA_LAUNCH_BLOCKING=1).
    fused: attention without its scores in memory. attention: its speed relative to FlashAttention-2.
    native_attention: on devices that have them, kernels written for their architecture instead.
    fused_gate: the activation of a gate and its product are one kernel, which keeps only its inputs.
    elementwise: memory traffic of other operations, relative to kernels that are fused as in Megatron.
    loss: bytes per logit at the peak: itself, in float32, as log-probability, and its gradients.
    merge: bytes read and written per element of attention's output to merge it with that of the next keys of
    the ring: five float32 operations, or a fused kernel.
    dispatch, combine: bytes of an element that is sent to an expert, and back. deduplicates: a token is sent
    to a node once, whatever the number of its experts there.
    is_fitted: the values were compared with published trainings.
    overlaps_data, overlaps_tensor, overlaps_experts: shares of these collectives that can overlap with
    computing.
    rails: a collective over several nodes uses the network devices of all its ranks at once (hierarchical),
    or of one rank.
    whole_gradients: under ZeRO, gradients stay whole between micro-batches; else each micro-batch reduces
    them.
    scattered: under zero=1, each rank gets only the gradients it updates with; else all gradients, and
    updated weights are sent afterwards.
    at_rest: under zero=2, weights are sharded between steps. early_gradients: allocated before the backward
    pass.
    buckets: number of gradient buckets that are copies; 0 if the gradients are views of them.
    even: stages have equally many blocks; else equal costs. scatter: stages send a slice from each tp rank.
    sequence: activations between split layers are split along the sequence; sequence_with_cp: also if cp
    splits it already.
    gathers_again: the inputs of layers that are split by columns are kept as slices, and gathered again in
    the backward pass, where nothing overlaps with it (arXiv 2205.05198, section 4.2.2).
    reserved: share of the counted memory that the allocator holds and cannot use. fixed_bytes: of process,
    context and libraries; connection_bytes: of NCCL's buffers, per axis over which ranks communicate.
    """

    name: str
    weight: float = 4.0
    gradient: float = 4.0
    optimizer: float = 8.0
    master: float = 0.0
    cast: float = 0.0
    stream: float = 4.0
    element: float = 2.0
    gather: float = 4.0
    reduce: float = 4.0
    dtype: str = "bf16"
    cast_traffic: float = 3.0
    products: float = 1.0
    grouped: float = 1.0
    fused_experts: bool = False
    graphs: bool = False
    blocked_s: float = 0.0
    fused: bool = True
    fused_gate: bool = False
    attention: float = 1.0
    native_attention: bool = False
    selective: str = "products"
    sequence: bool = False
    sequence_with_cp: bool = True
    gathers_again: bool = False
    elementwise: float = 1.5
    loss: float = 14.0
    merge: float = 40.0
    dispatch: float = 2.0
    combine: float = 2.0
    deduplicates: bool = True
    is_fitted: bool = True
    overlaps_experts: float = 0.0
    overlaps_data: bool = True
    overlaps_tensor: float = 0.0
    rails: bool = True
    whole_gradients: bool = True
    scattered: bool = False
    at_rest: bool = True
    early_gradients: bool = False
    buckets: int = 2
    even: bool = False
    scatter: bool = False
    reserved: float = 0.03
    fixed_bytes: float = 0.0
    connection_bytes: float = 0.0

    @property
    def is_low(self) -> bool:
        """Whether products are computed in 8 or 4 bits; attention and the head stay in 16 bits."""
        return self.dtype in LOW_DTYPES

    @property
    def wide_dtype(self) -> str:
        """The data type of attention and the head."""
        return "bf16" if self.is_low else self.dtype

    def splits_sequence(self, cp: int) -> bool:
        """Return whether sequence parallelism applies with context parallelism of degree `cp`."""
        return self.sequence and (cp == 1 or self.sequence_with_cp)

    def recompute_shares(self, recompute: str) -> RecomputeShares:
        """Return what the backward pass repeats under the plan key `recompute`."""
        if recompute == "selective":
            return SELECTIVE[self.selective]
        return (
            RecomputeShares("full", 1.0, 1.0, 1.0)
            if recompute == "full"
            else RecomputeShares("none", 0.0, 0.0, 0.0)
        )


# float32 weights, autocast to bf16
PACELINE = Recipe("paceline", cast=2.0, sequence=True, sequence_with_cp=False, buckets=0)
PACELINE_FP16 = replace(PACELINE, name="paceline-fp16", dtype="fp16")  # for devices without bf16
FLOAT32 = Recipe(
    "float32", element=4.0, dtype="fp32", loss=12.0, sequence=True, sequence_with_cp=False, buckets=0
)
FLOAT32_TF32 = replace(FLOAT32, name="float32-tf32", dtype="tf32")  # products alone, on tensor cores

CUDA_CONTEXT_BYTES = 1.5 * 2**30  # with the workspaces of cuBLAS; nvidia-smi shows it, the allocator does not
NCCL_BYTES = 0.4 * 2**30  # of the communicators of an axis

# Narayanan et al. 2021 and Korthikanti et al. 2022: fp16 with float32 main weights, fused kernels for
# softmax, GELU and dropout, scores of attention in memory, gradients averaged in float32 after the backward
# pass.
MEGATRON = Recipe(
    "megatron",
    weight=2.0,
    gradient=4.0,
    master=4.0,
    stream=2.0,
    gather=2.0,
    dtype="fp16",
    fused=False,
    selective="core",
    elementwise=1.0,
    loss=10.0,
    overlaps_data=False,
    scattered=True,
    at_rest=False,
    early_gradients=True,
    even=True,
    scatter=True,
    fixed_bytes=CUDA_CONTEXT_BYTES,
    connection_bytes=NCCL_BYTES,
)
# Megatron-Core since 2023: flash attention, sequence parallelism; averaging and all-reduces of tp overlap
# with computing.
MEGATRON_CORE = replace(
    MEGATRON,
    name="megatron-core",
    dtype="bf16",
    fused=True,
    fused_gate=True,
    sequence=True,
    overlaps_data=True,
    overlaps_tensor=0.6,
    gather=2.0,
    deduplicates=False,  # by its default dispatcher, alltoall
)
# Rajbhandari et al. 2020: 2 + 2 + 12 bytes per parameter. DeepSpeed's first ZeRO-3 is known to gather each
# weight separately.
DEEPSPEED = replace(
    MEGATRON,
    name="deepspeed",
    gradient=2.0,
    reduce=2.0,
    overlaps_data=True,
    whole_gradients=False,
    early_gradients=False,
    rails=False,
)
# FSDP with mixed precision: float32 shards, computing in bf16, gradients averaged in float32 after each
# micro-batch.
FSDP = Recipe(
    "fsdp",
    stream=2.0,
    gather=2.0,
    whole_gradients=False,
    selective="half",
    sequence=True,
    elementwise=1.5,
    reserved=0.1,
    fixed_bytes=CUDA_CONTEXT_BYTES,
    connection_bytes=NCCL_BYTES,
    deduplicates=False,
)
# blocks are compiled, the loss is not
FSDP_COMPILED = replace(FSDP, name="fsdp-compiled", fused_gate=True, elementwise=1.0)

# MosaicML's llm-foundry of 2023: attention in Triton, which is 1.3 to 1.5 times slower than FlashAttention-2
# (arXiv 2307.08691, section 4.1), and a loss that turns 16-bit logits into their gradients in place.
LLM_FOUNDRY = replace(
    FSDP, name="llm-foundry", selective="core", elementwise=1.2, attention=0.7, loss=2.0, reserved=0.03
)
# Megatron-DeepSpeed without ZeRO: gradients stay in fp16.
MEGATRON_DEEPSPEED = replace(MEGATRON, name="megatron-deepspeed", gradient=2.0, reduce=2.0)

# BigScience's fork of Megatron-DeepSpeed, for BLOOM (arXiv 2211.05100): ALiBi is added to the scores in an
# operation of its own, norms and activations are not fused, and the allocator of 2022 loses more memory.
# The speed of products is fitted.
BIGSCIENCE = replace(MEGATRON_DEEPSPEED, name="bigscience", products=0.894, elementwise=1.5, reserved=0.12)
# With more than 160 devices it hung unless each kernel was waited for (its chronicles-prequel.md, "dealing
# with JZ hanging"). There, 200B on 80 devices with micro-batches of 1 took 6.8 % longer with that: 3.5 ms for
# the 72 kernels of a layer, forward, computed again and backward.
BIGSCIENCE_BLOCKED = replace(BIGSCIENCE, blocked_s=50e-6)
# NVIDIA's NeMo and Megatron-Bridge since 2024: Transformer Engine with cuDNN's attention, fused norms and
# activations, gradients averaged in bf16, all-reduces of tp inside the kernels of products. Speeds and
# overlap are fitted (benchmarks/published.py --fit).
NEMO = replace(
    MEGATRON_CORE,
    name="nemo",
    products=1.135,
    grouped=0.792,
    attention=1.169,
    native_attention=True,
    merge=12.0,
    gradient=2.0,
    reduce=2.0,
    elementwise=0.812,
    cast_traffic=2.95,
    overlaps_tensor=0.74,
    selective="products",
    loss=4.0,
    deduplicates=True,  # DeepEP or HybridEP
)
# Megatron-Bridge since 26.06, for gated experts in MXFP8 on Blackwell (its pull requests 3983, 4249 and 4606,
# 2026): the products of all experts are one kernel, as fast as other products; their traffic overlaps with
# computing, for which DeepSeek-AI 2024 (arXiv 2412.19437, section 3.2.1) hides it completely; and CUDA graphs
# start whole steps. Nothing of it is fitted.
NEMO_FUSED = replace(
    NEMO, name="nemo-26.06", grouped=1.0, fused_experts=True, graphs=True, overlaps_experts=0.8
)
# Megatron-Core with its overlaps switched off and its fused loss, which computes gradients in place; speeds
# are fitted
MEGATRON_PLAIN = replace(
    MEGATRON_CORE,
    name="megatron-plain",
    products=0.931,
    grouped=0.802,
    overlaps_data=False,
    overlaps_tensor=0.0,
    gathers_again=True,
    loss=4.0,
)
# DeepSeek-AI's HAI-LLM for V3 (arXiv 2412.19437, sections 3.2 and 3.3): blockwise fp8; tokens are sent in fp8
# with a scale for 128 elements, and returned in bf16, once for each node, behind computing; moments in bf16.
# Nothing of it is fitted.
HAI_LLM = replace(
    MEGATRON_CORE,
    name="hai-llm",
    dtype="fp8",
    optimizer=4.0,
    dispatch=1.0 + 4 / 128,
    deduplicates=True,
    is_fitted=False,
    overlaps_experts=0.8,
)
# MaxText and PaxML: XLA compiles the step; weights are sharded, and gathered for each layer
MAXTEXT = replace(FSDP_COMPILED, name="maxtext", products=1.135, attention=1.169, native_attention=True)

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        PACELINE,
        PACELINE_FP16,
        FLOAT32,
        MEGATRON,
        MEGATRON_CORE,
        DEEPSPEED,
        MEGATRON_DEEPSPEED,
        FSDP,
        FSDP_COMPILED,
        LLM_FOUNDRY,
        BIGSCIENCE,
        NEMO,
        NEMO_FUSED,
        MEGATRON_PLAIN,
        HAI_LLM,
        MAXTEXT,
    )
}


PRECISION_RECIPES: Mapping[str, Recipe] = {"fp32": FLOAT32, "bf16": PACELINE, "fp16": PACELINE_FP16}


def recipe_of_precision(precision: str) -> Recipe:
    """Return Paceline's recipe for a precision. Raises PlanError for a precision that cannot be predicted."""
    if precision not in PRECISION_RECIPES:
        raise PlanError(
            f"a step in {precision} cannot be predicted{suggest_precision(precision, PRECISION_RECIPES)}"
            + (", or --system NAME for another training system" if precision in LOW_DTYPES else "")
        )
    return PRECISION_RECIPES[precision]


def suggest_precision(precision: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that refuses a precision: the nearest known name, and all known names."""
    names = list(known)
    nearest = get_close_matches(precision.lower(), names, 1)
    is_name = precision in ("fp64", *LOW_DTYPES, *PRECISION_RECIPES)  # which is not a spelling mistake
    meant = f" (did you mean {nearest[0]}?)" if nearest and not is_name else ""
    return f"{meant}; use --precision {', '.join(names)}"
