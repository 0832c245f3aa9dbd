"""The training system of a row of published measurements, as a Recipe."""

import re
from collections.abc import Mapping
from dataclasses import replace

from paceline.plan.cost_model.framework_profiles import (
    BIGSCIENCE,
    BIGSCIENCE_BLOCKED,
    DEEPSPEED,
    FSDP,
    FSDP_COMPILED,
    LLM_FOUNDRY,
    MAXTEXT,
    MEGATRON,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MEGATRON_PLAIN,
    NEMO,
    NEMO_FUSED,
    Recipe,
)
from paceline.plan.model.transformer import Transformer
from published_cells import NotPredictable, find_parameters, whole_number
from published_devices import is_recent, strip_maker

# Names of low precisions, the most specific first; a name of several words may have any separators.
LOW = (
    (r"(nv|mx)?fp-?4|nvf4|mxf4|e2m1|float4", "fp4"),
    (r"mx-?fp-?8|fp-?8-?mx\w*|mxf8", "mxfp8"),
    (r"fp-?8|float-?8|e4m3|e5m2", "fp8"),
)
WIDE = r"16|amp"  # of the names with digits, these mean 16 bits
# The first release of Megatron-Bridge with fused experts on a device (its pull requests 4249 and 4606, 2026).
FIRST_FUSED = {"GB200": "26.06", "GB300": "26.06", "B200": "26.06.01", "B300": "26.06.01"}
# Its release notes 0.5.1: "GPT-OSS GB200/GB300 MXFP8 regression due to regressed CuTeDSL fused kernels".
REGRESSIONS = {("gptoss", "26.06.01")}


def find_recipe(row: Mapping[str, str]) -> Recipe:
    text = " ".join(
        row.get(key, "") for key in ("dataset", "source", "notes", "zero_stage", "url_or_path")
    ).lower()
    if "deepspeed" in text and row["zero_stage"].startswith("3"):
        recipe = DEEPSPEED
    elif re.search(r"maxtext|paxml", f"{text} {row['model'].lower()}"):
        recipe = replace(MAXTEXT, native_attention="dgxc" in text)
    elif re.search(r"\bnemo\b|bridge|dgxc|mlperf", text):
        # Megatron recomputes norms and activations alone since 2025.
        recipe = NEMO if "bridge" in text else replace(NEMO, selective="core")
        # cuDNN 9 since the end of 2024; MLPerf had it before
        recipe = replace(recipe, native_attention=bool(re.search("bridge|dgxc|mlperf", text)))
        # Megatron-FSDP scatters gradients in each micro-batch.
        recipe = replace(recipe, whole_gradients="fsdp" not in text)
    elif "fsdp" in text or "torchtitan" in text:
        compiled = "compile" in row.get("notes", "").lower() and "without" not in row.get("notes", "").lower()
        recipe = FSDP_COMPILED if compiled else FSDP
        if compiled and "2025" in text:  # since 2025 torchtitan compiles the loss too
            recipe = replace(recipe, loss=8.0)
        if "foundry" in text:
            recipe = LLM_FOUNDRY
        if row["precision"] == "bf16" and "foundry" in text:  # PURE: gradients are averaged in bf16
            recipe = replace(recipe, reduce=2.0)
    elif "bigscience" in text:
        recipe = BIGSCIENCE_BLOCKED if whole_number(row["n_gpus"]) > 160 else BIGSCIENCE
    elif "deepspeed" in text:
        recipe = MEGATRON_DEEPSPEED
    elif "simumax" in text:
        recipe = MEGATRON_PLAIN
    elif is_recent(row["gpu_type"]) or re.search(r"\bm?core\b|nemo\b|flash|transformer.?engine|mlperf", text):
        recipe = MEGATRON_CORE
    else:
        recipe = replace(MEGATRON, sequence="2205.05198" in text and row["recompute"].startswith("selective"))
    if "asynctp" in text and "vanilla" not in text:
        recipe = replace(recipe, overlaps_tensor=0.6)
    # The loss of sharded logits stores two more float32 copies of them.
    if recipe.name.startswith("fsdp") and whole_number(row["tp"]) > 1:
        recipe = replace(recipe, loss=recipe.loss + 8.0)
    # torchtitan keeps the weights and gradients of a stage unsharded during a step.
    if recipe.name.startswith("fsdp") and whole_number(row["pp"]) > 1:
        recipe = replace(recipe, whole_gradients=True)
    if dtype := find_low_precision(row["precision"]):
        recipe = replace(recipe, dtype=dtype, gather=1.0 if recipe.name.startswith("fsdp") else recipe.gather)
    if "zero bubble" in text:
        recipe = replace(recipe, gradient=2.0, scatter=False, sequence=False)
    if "<=18b" in text:  # according to the notes of Narayanan et al.
        recipe = replace(recipe, overlaps_data=(find_parameters(row["n_params"]) or 0.0) <= 1.9e10)
    return recipe


def with_release(row: Mapping[str, str], recipe: Recipe, model: Transformer) -> Recipe:
    """Return the recipe with what the release of Megatron-Bridge that a row names does differently."""
    release = re.search(r"\b2\d\.\d\d(\.\d\d)?\b", row["source"])
    name, device = re.sub(r"[^a-z0-9]", "", row["model"].lower()), strip_maker(row["gpu_type"])
    first = next((FIRST_FUSED[family] for family in FIRST_FUSED if device.startswith(family)), None)
    if recipe.name != "nemo" or recipe.dtype != "mxfp8" or release is None or first is None:
        return recipe
    if model.experts == 1 or not model.gated or release[0] < first:
        return recipe
    if any(family in name and release[0] == version for family, version in REGRESSIONS):
        return recipe
    return replace(NEMO_FUSED, dtype=recipe.dtype)


def find_low_precision(text: str) -> str | None:
    """Return the data type of products in 8 or 4 bits that a cell names, or None for 16 bits.

    A cell without a number of bits, such as `mixed`, means the usual 16. Raises NotPredictable for others.
    """
    plain = re.sub(r"[\s_/.]+", "-", text.lower())
    if re.search(r"row-?wise", plain):  # products with row-wise scaling were not faster than bf16 in 2025
        return None
    dtype = next((dtype for pattern, dtype in LOW if re.search(pattern, plain)), None)
    if dtype is None and re.search(r"\d", plain) and not re.search(WIDE, plain):
        raise NotPredictable(f"precision {text} is not known: it must be bf16, fp16, fp8, mxfp8 or fp4")
    return dtype
