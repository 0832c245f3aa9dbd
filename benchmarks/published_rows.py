"""Rows of published measurements as inputs of the planner: model, split, cluster and training system."""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from paceline.cluster.facts import Cluster, Device, Fact, Link
from paceline.plan.cost_model.constants import Constants
from paceline.plan.cost_model.cost import MemoryCost, TimeCost
from paceline.plan.cost_model.framework_profiles import (
    DEEPSPEED,
    FSDP,
    FSDP_COMPILED,
    LLM_FOUNDRY,
    MEGATRON,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    Recipe,
)
from paceline.plan.cost_model.memory import predict_memory
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.step_time import predict_time
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.model.facts import ModelFacts
from paceline.plan.model.transformer import Transformer
from paceline.spec import describe_error

# GB/s of one device in one direction: (memory, within a node, between nodes unless a row specifies it).
# Sources: data sheets and common nodes.
DEVICES = {
    "A100-40": (1555, 300, 25),
    "A100": (2039, 300, 25),
    "H100-96": (2400, 450, 50),
    "H100": (3350, 450, 50),
    "H200": (4800, 450, 50),
    "GH200": (4000, 450, 50),
    "H800": (3350, 200, 50),
    "A800": (2039, 200, 25),
    "GB200": (8000, 900, 50),
    "B200": (8000, 900, 50),
    "V100": (900, 150, 12.5),
    "MI250": (1638, 200, 25),
    "MI300": (5300, 448, 50),
}
SCHEDULES = {
    "GPIPE": "gpipe",
    "1F1B-I": "interleaved",
    "ZB-1P": "zb-h1",
    "ZB-H1": "zb-h1",
    "ZB-2P": "zb-2p",
    "ZB-H2": "zb-h2",
    "ZB-V": "zb-v",
}


# If a row has no vocabulary: n_params of the four zero-bubble models allow 28 to 34 thousand.
DEFAULT_VOCAB = 32000


class NotPredictable(Exception):
    """The reason why a row cannot be predicted."""


@dataclass(frozen=True)
class Row:
    """A measurement. Seconds are per step; `splits` has several if the source does not specify all."""

    id: str
    file: str
    facts: ModelFacts
    cluster: Cluster
    recipe: Recipe
    splits: tuple[WorkSplit, ...]
    step_s: float | None
    memory_bytes: float | None
    limit_bytes: float
    oom: bool
    gib: bool
    group: str
    device: str


class Prediction(NamedTuple):
    """The prediction of a row. `fits`: within memory, with MARGIN to spare."""

    time: TimeCost
    memory: MemoryCost
    fits: bool
    split: WorkSplit


# Share of a device's memory that driver, context and libraries use (about 1 GiB), or that data sheets count
# differently.
MARGIN = 0.03


def predict_row(row: Row, constants: Constants) -> Prediction:
    """Return the prediction of the fastest split that fits; if none fits, of the split with least memory."""
    predictions = []
    rates = device_rates(row.cluster, constants)
    for split in row.splits:
        cost = predict_memory(row.facts, split, row.recipe, row.limit_bytes)
        step = predict_time(row.facts, split, row.recipe, rates)
        predictions.append(Prediction(step, cost, cost.fits(MARGIN), split))
    fitting = [item for item in predictions if item.fits]
    if fitting:
        return min(fitting, key=lambda item: item.time.step_s)
    return min(predictions, key=lambda item: item.memory.peak_bytes)


def read(path: Path) -> Iterator[Row | tuple[str, str]]:
    """Yield rows; for a row that cannot be predicted, its id and the reason."""
    with path.open(newline="") as lines:
        for cells in csv.DictReader(lines):
            row = {key: (value or "").strip() for key, value in cells.items() if key}
            try:
                yield _parse_row(row)
            except NotPredictable as reason:
                yield row["row_id"], str(reason)
            except ValidationError as error:
                yield row["row_id"], describe_error(error, [])


def _parse_row(row: Mapping[str, str]) -> Row:
    recipe = _recipe(row)
    seq = _int(row, "seq_len")
    model = _model(row, recipe, seq)
    splits = _splits(row, model)
    tokens = splits[0].batch * seq
    return Row(
        id=row["row_id"],
        file=row["dataset"] or row["row_id"].split("#")[0],
        facts=model.facts(),
        cluster=_cluster(row),
        recipe=recipe,
        splits=splits,
        step_s=_step_s(row, model, splits[0], tokens),
        memory_bytes=_memory_bytes(row),
        limit_bytes=_float(row, "gpu_mem_GB") * 2**30,
        oom=row.get("oom") == "1",
        gib="gib" in row["notes"].lower(),
        group=row.get("rank_group", ""),
        device=row["gpu_type"],
    )


def _int(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key, "")
    if re.fullmatch(r"\d+(\.0+)?(e\+?\d+)?", text):
        return int(float(text))
    if default is None:
        raise NotPredictable(f"{key} is missing")
    return default


def _float(row: Mapping[str, str], key: str) -> float:
    try:
        return float(row.get(key, ""))
    except ValueError:
        raise NotPredictable(f"{key} is missing") from None


def _recipe(row: Mapping[str, str]) -> Recipe:
    text = " ".join(
        row.get(key, "") for key in ("dataset", "source", "notes", "zero_stage", "url_or_path")
    ).lower()
    if "deepspeed" in text and row["zero_stage"].startswith("3"):
        recipe = DEEPSPEED
    elif "fsdp" in text or "torchtitan" in text:
        compiled = "compile" in row.get("notes", "").lower() and "without" not in row.get("notes", "").lower()
        recipe = FSDP_COMPILED if compiled else FSDP
        if compiled and "2025" in text:  # since 2025 torchtitan compiles the loss too
            recipe = replace(recipe, loss=8.0)
        if "foundry" in text:
            recipe = LLM_FOUNDRY
        if row["precision"] == "bf16" and "foundry" in text:  # PURE: gradients are averaged in bf16
            recipe = replace(recipe, reduce=2.0)
    elif "deepspeed" in text:
        recipe = MEGATRON_DEEPSPEED
    elif row["gpu_type"].startswith(("H", "B", "GH", "GB", "MI")) or re.search(
        r"\bm?core\b|nemo\b|flash|transformer.?engine|mlperf", text
    ):
        recipe = MEGATRON_CORE
    else:
        recipe = replace(MEGATRON, sequence="2205.05198" in text and row["recompute"].startswith("selective"))
    if "asynctp" in text and "vanilla" not in text:
        recipe = replace(recipe, overlaps_tensor=0.6)
    # The loss of sharded logits stores two more float32 copies of them.
    if recipe.name.startswith("fsdp") and _int(row, "tp", 1) > 1:
        recipe = replace(recipe, loss=recipe.loss + 8.0)
    # torchtitan keeps the weights and gradients of a stage unsharded during a step.
    if recipe.name.startswith("fsdp") and _int(row, "pp", 1) > 1:
        recipe = replace(recipe, whole_gradients=True)
    # Products with row-wise scaling were not faster than bf16 in 2025.
    if "fp8" in row["precision"] and "rowwise" not in row["precision"]:
        recipe = replace(recipe, dtype="fp8", gather=1.0 if recipe.name.startswith("fsdp") else recipe.gather)
    if "zero bubble" in text:
        recipe = replace(recipe, gradient=2.0, scatter=False, sequence=False)
    if "<=18b" in text:  # according to the notes of Narayanan et al.
        recipe = replace(recipe, overlaps_data=float(row["n_params"]) <= 1.9e10)
    return recipe


def _model(row: Mapping[str, str], recipe: Recipe, seq: int) -> Transformer:
    if _int(row, "ep", 1) > 1:
        raise NotPredictable("the sizes of the experts are missing")
    name = row["model"].lower()
    hidden, heads = _int(row, "hidden"), _int(row, "heads")
    kv, ffn = _int(row, "kv_heads", heads), _int(row, "ffn", 4 * hidden)
    gated = (
        any(word in name for word in ("llama", "qwen", "mistral", "deepseek", "gemma")) or ffn % hidden != 0
    )
    return Transformer(
        name=row["model"],
        layers=_int(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        ffn=ffn,
        vocab=_int(row, "vocab", DEFAULT_VOCAB),
        seq=seq,
        gated=gated,
        norm="rms" if gated else "layer",
        bias=not gated and "mpt" not in name,
        tied=not gated,
        positions=0 if gated else seq,
        dropout=not gated and not recipe.fused,
    )


def _splits(row: Mapping[str, str], model: Transformer) -> tuple[WorkSplit, ...]:
    """Return all splits that the row allows: the fastest that fits is the likely choice of a tuned run."""
    ranks, tp, pp, cp = _int(row, "n_gpus"), _int(row, "tp", 1), _int(row, "pp", 1), _int(row, "cp", 1)
    model_ranks, batch = tp * pp * cp, _int(row, "global_batch")
    if not model_ranks or not ranks or ranks % model_ranks or pp > model.layers or model.heads % tp:
        raise NotPredictable(
            f"tp × pp × cp = {tp} × {pp} × {cp} does not divide "
            f"{ranks} devices, {model.layers} layers and {model.heads} heads"
        )
    dp = ranks // model_ranks
    if batch < dp:
        raise NotPredictable(f"global_batch {batch} is less than {dp} data ranks")
    zero = int(row["zero_stage"][:1]) if row["zero_stage"][:1].isdigit() else None
    rank_samples = batch // dp
    given = _int(row, "micro_batch", 0)
    micro_batches = [given] if given else [b for b in (1, 2, 4, 8) if rank_samples % b == 0]
    if zero == 3 and pp > 1:
        zero = 2
    # Some sources give the samples of a data rank as the micro-batch.
    if given and pp > 1 and given * dp == batch and rank_samples > 1:
        micro_batches = [max(1, rank_samples // pp)]
    recompute = row["recompute"].split("(")[0].split("+")[0].strip().split(" ")[0]
    recomputes = [recompute] if recompute in ("none", "selective", "full") else ["none", "selective", "full"]
    stages = _stages(row, model, pp)
    name = row.get("schedule", "").upper().rstrip("*")
    schedule = "interleaved" if name.startswith("INTERLEAVED") else SCHEDULES.get(name, "")
    if schedule == "zb-v" or (schedule == "interleaved" and stages == [1]):
        stages = [2]
    splits = []
    for b, recompute, v in product(micro_batches, recomputes, stages):
        if b < 1 or rank_samples % b:
            continue
        kind = schedule or ("interleaved" if v > 1 else "1f1b")
        for stage in (0, 1) if zero is None else (zero,):
            splits.append(
                WorkSplit(
                    dp, tp, pp, cp, 1, stage, 1, b, rank_samples // b, kind, v if pp > 1 else 1, recompute
                )
            )
    if not splits:
        raise NotPredictable(f"global_batch {batch} is not dp × micro_batch × a whole number")
    return tuple(splits)


def _stages(row: Mapping[str, str], model: Transformer, pp: int) -> list[int]:
    text, stage_layers = row.get("vp", ""), model.layers // pp
    if text.startswith("max"):
        return [-(-model.layers // pp)]
    if text.isdigit():
        return [int(text)]
    unspecified = row["micro_batch"] == "" and pp > 1
    return [v for v in range(1, stage_layers + 1) if stage_layers % v == 0] if unspecified else [1]


def _cluster(row: Mapping[str, str]) -> Cluster:
    kind = row["gpu_type"].upper().removeprefix("NVIDIA ").removeprefix("TESLA ")
    name = f"{kind.split('-')[0]}-{row['gpu_mem_GB']}"
    rates = next((DEVICES[key] for key in DEVICES if name.startswith(key)), None)
    if rates is None:
        raise NotPredictable(f"memory bandwidth and links of {row['gpu_type']} are unknown")
    memory, node, across = rates
    peak = _float(row, "peak_TFLOPs_bf16") * 1e12
    nic = float(row["internode_GBps"]) if row["internode_GBps"] else across
    peaks = {"bf16": peak, "fp16": peak} | (
        {"fp8": 2 * peak} if not kind.startswith(("A100", "V100")) else {}
    )
    return Cluster(
        name=row["gpu_type"],
        nodes=-(-_int(row, "n_gpus") // _int(row, "gpus_per_node", 8)),
        devices_per_node=_int(row, "gpus_per_node", 8),
        device=Device(
            name=kind,
            memory_bytes=Fact(value=_float(row, "gpu_mem_GB") * 2**30),
            memory_Bps=Fact(value=memory * 1e9),
            power_W=Fact(value=float(watts[1])) if (watts := re.search(r"\((\d+)W\)", kind)) else None,
            peaks_flops={dtype: Fact(value=value) for dtype, value in peaks.items()},
        ),
        links=(
            Link(axis="node", beta_Bps=Fact(value=node * 1e9)),
            Link(axis="across", beta_Bps=Fact(value=nic * 1e9)),
        ),
    )


def _step_s(row: Mapping[str, str], m: Transformer, split: WorkSplit, tokens: int) -> float | None:
    if row["measured_step_time_s"]:
        return float(row["measured_step_time_s"])
    if row["tokens_per_s_per_gpu"]:
        return tokens / (float(row["tokens_per_s_per_gpu"]) * split.ranks)
    if row["measured_TFLOPs_per_gpu"]:
        return _flops(row, m) * split.batch / (float(row["measured_TFLOPs_per_gpu"]) * 1e12 * split.ranks)
    if row["MFU"]:
        share = _float(row, "MFU")
        share /= 100 if share > 1 else 1
        return _flops(row, m) * split.batch / (share * _float(row, "peak_TFLOPs_bf16") * 1e12 * split.ranks)
    return None


def _flops(row: Mapping[str, str], m: Transformer) -> float:
    """Return the FLOP of a sample, as the source counts them."""
    convention, h, s, layers = row["flops_convention"], m.hidden, m.seq, m.layers
    if "hardware" in convention:  # arXiv 2104.04473, equation 3
        return 96 * s * layers * h**2 * (1 + s / (6 * h) + m.vocab / (16 * layers * h))
    if "2N*S" in convention:  # llm-foundry
        return 3 * (2 * float(row["n_params"]) * s + layers * 4 * h * s**2)
    return m.facts().training_flops


def _memory_bytes(row: Mapping[str, str]) -> float | None:
    if not row["peak_memory_GB"]:
        return None
    return float(row["peak_memory_GB"]) * (2**30 if "gib" in row["notes"].lower() else 1e9)
