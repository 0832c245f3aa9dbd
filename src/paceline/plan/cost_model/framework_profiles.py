"""Recipe: how a training system goes about a plan; in bytes a number takes, in what is computed again, and in what overlaps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.errors import PlanError


class RecomputeShares(NamedTuple):
    """Shares of the forward pass that are computed once more in the backward pass, and what of `Block.saved` is kept meanwhile."""

    kept: str
    products: float
    attention: float
    traffic: float


# core: the scores of attention alone (arXiv 2205.05198, section 5); products: whatever is no product and no attention, as Paceline does;
# half: besides that every second product, as torchtitan does (torchtitan/distributed/activation_checkpoint.py).
SELECTIVE: Mapping[str, RecomputeShares] = {
    "core": RecomputeShares("none", 0.0, 1.0, 0.0),
    "products": RecomputeShares("selective", 0.0, 0.0, 1.0),
    "half": RecomputeShares("half", 0.4, 0.0, 1.0),
}


@dataclass(frozen=True, eq=False)
class Recipe:
    """Bytes are of one number. `cast`: a copy of the weights in the type of the products that lives through a step, or 0.

    gather, reduce: of what is sent for a parameter by ZeRO and by the averaging of gradients.
    attention: speed of fused attention against FlashAttention-2. fused: attention without its scores in memory.
    elementwise: traffic of operations other than products, against kernels that are fused as far as Megatron's are.
    loss: bytes a logit takes at the worst moment: itself, in float32, as logarithm of a probability, and its gradients.
    overlaps_data, overlaps_tensor: what shares of those collectives can go on under the computing.
    rails: whether a collective over several nodes uses the network devices of all of its ranks at once (hierarchically), or one rank's.
    whole_gradients: gradients are whole and stay from one micro-batch to the next under ZeRO; else each micro-batch reduces them.
    scattered: under zero=1 each rank gets the gradients that it updates with; else all get all, and updated weights are sent afterwards.
    at_rest: under zero=2 the weights are cut between the steps. early_gradients: they have their memory before the backward pass.
    buckets: of gradients that are averaged, which are copies; 0 where the gradients lie in them.
    even: stages have equally many blocks; else they cost equally much. scatter: stages send each other a slice of each tp rank.
    sequence: activations between split layers are split along the sequence; sequence_with_cp: also where cp has cut it already.
    reserved: of the memory counted, what the allocator holds and cannot use. fixed_bytes: of the process, its context and libraries.
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
    fused: bool = True
    attention: float = 1.0
    selective: str = "products"
    sequence: bool = False
    sequence_with_cp: bool = True
    elementwise: float = 1.5
    loss: float = 14.0
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

    def splits_sequence(self, cp: int) -> bool:
        return self.sequence and (cp == 1 or self.sequence_with_cp)

    def recompute_shares(self, recompute: str) -> RecomputeShares:
        if recompute == "selective":
            return SELECTIVE[self.selective]
        return (
            RecomputeShares("full", 1.0, 1.0, 1.0)
            if recompute == "full"
            else RecomputeShares("none", 0.0, 0.0, 0.0)
        )


PACELINE = Recipe(
    "paceline", cast=2.0, sequence=True, sequence_with_cp=False, buckets=0
)  # float32 weights, autocast to bf16
PACELINE_FP16 = replace(PACELINE, name="paceline-fp16", dtype="fp16")  # for devices without bf16
FLOAT32 = Recipe(
    "float32", element=4.0, dtype="fp32", loss=12.0, sequence=True, sequence_with_cp=False, buckets=0
)

# Narayanan et al. 2021 and Korthikanti et al. 2022: fp16 with float32 main weights, kernels for softmax, GELU and dropout, the scores of
# attention in memory, gradients averaged behind the backward pass in float32.
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
)
# Megatron-Core since 2023: flash attention, sequence parallelism, averaging and tensor parallelism's sums under the computing.
MEGATRON_CORE = replace(
    MEGATRON,
    name="megatron-core",
    dtype="bf16",
    fused=True,
    sequence=True,
    overlaps_data=True,
    overlaps_tensor=0.6,
    gather=2.0,
)
# Rajbhandari et al. 2020: 2 + 2 + 12 bytes a parameter. Of DeepSpeed's first ZeRO-3 it is known that it gathers each weight by itself.
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
# FSDP with mixed precision: float32 shards, bf16 while it computes, gradients averaged in float32 after each micro-batch.
FSDP = Recipe(
    "fsdp",
    stream=2.0,
    gather=2.0,
    whole_gradients=False,
    selective="half",
    sequence=True,
    elementwise=1.5,
    reserved=0.1,
)
FSDP_COMPILED = replace(FSDP, name="fsdp-compiled", elementwise=1.0)  # blocks are compiled, the loss is not

# MosaicML's llm-foundry of 2023: attention in Triton, than which FlashAttention-2 is 1.3 to 1.5 times faster (arXiv 2307.08691,
# section 4.1), and a loss that turns 16-bit logits into their gradients in place.
LLM_FOUNDRY = replace(
    FSDP, name="llm-foundry", selective="core", elementwise=1.2, attention=0.7, loss=2.0, reserved=0.03
)
# Megatron-DeepSpeed without ZeRO: gradients stay in fp16.
MEGATRON_DEEPSPEED = replace(MEGATRON, name="megatron-deepspeed", gradient=2.0, reduce=2.0)

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
    )
}


PRECISION_RECIPES: Mapping[str, Recipe] = {"fp32": FLOAT32, "bf16": PACELINE, "fp16": PACELINE_FP16}


def recipe_of_precision(precision: str) -> Recipe:
    """How Paceline goes about a step. Raises PlanError for a precision that is not predicted."""
    if precision not in PRECISION_RECIPES:
        raise PlanError(
            f"what a step in {precision} takes is not predicted; use --precision {', '.join(PRECISION_RECIPES)}, or name a plan"
        )
    return PRECISION_RECIPES[precision]
