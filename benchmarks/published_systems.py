"""The training system of a row of published measurements, as a Recipe."""

import re
from collections.abc import Mapping
from dataclasses import replace

from paceline.plan.cost_model.framework_profiles import (
    BIGSCIENCE,
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
    Recipe,
)
from published_cells import whole_number

LOW = {"nvfp4": "fp4", "mxfp8": "mxfp8", "fp8": "fp8"}


def find_recipe(row: Mapping[str, str]) -> Recipe:
    text = " ".join(
        row.get(key, "") for key in ("dataset", "source", "notes", "zero_stage", "url_or_path")
    ).lower()
    if "deepspeed" in text and row["zero_stage"].startswith("3"):
        recipe = DEEPSPEED
    elif re.search(r"maxtext|paxml", f"{text} {row['model'].lower()}"):
        recipe = MAXTEXT
    elif re.search(r"\bnemo\b|bridge|dgxc", text):
        # Megatron recomputes norms and activations alone since 2025.
        recipe = NEMO if "bridge" in text else replace(NEMO, selective="core")
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
        recipe = BIGSCIENCE
    elif "deepspeed" in text:
        recipe = MEGATRON_DEEPSPEED
    elif "simumax" in text:
        recipe = MEGATRON_PLAIN
    elif row["gpu_type"].startswith(("H", "B", "GH", "GB", "MI")) or re.search(
        r"\bm?core\b|nemo\b|flash|transformer.?engine|mlperf", text
    ):
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
    precision = row["precision"].lower()
    # Products with row-wise scaling were not faster than bf16 in 2025.
    if dtype := next((name for name in LOW if name in precision and "rowwise" not in precision), None):
        recipe = replace(
            recipe, dtype=LOW[dtype], gather=1.0 if recipe.name.startswith("fsdp") else recipe.gather
        )
    if "zero bubble" in text:
        recipe = replace(recipe, gradient=2.0, scatter=False, sequence=False)
    if "<=18b" in text:  # according to the notes of Narayanan et al.
        recipe = replace(recipe, overlaps_data=float(row["n_params"]) <= 1.9e10)
    return recipe
