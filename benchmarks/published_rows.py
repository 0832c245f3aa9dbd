"""Rows of published measurements as questions to the planner: which model, cut how, on what, by which system."""

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
from paceline.spec import explain

# GB/s of one device in one direction: (memory, inside a node, between nodes where a row does not say), by data sheets and the usual nodes
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


VOCAB = (
    32000  # where a row has none: n_params of the four zero-bubble models leave room for 28 to 34 thousand
)


class Unpriced(Exception):
    """Why a row cannot be priced."""


@dataclass(frozen=True)
class Row:
    """A measurement. Seconds are those of a step, however the source says it; `splits` has several where the source does not say all."""

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


class Answer(NamedTuple):
    """`fits`: with MARGIN to spare."""

    time: TimeCost
    memory: MemoryCost
    fits: bool
    split: WorkSplit


MARGIN = 0.03  # of a device's memory that its driver, context and libraries take (about 1 GiB, and what a data sheet counts otherwise)


def answer(row: Row, constants: Constants) -> Answer:
    """Of the splits that a row leaves open the fastest one that fits; the leanest one where none does."""
    found = []
    on = device_rates(row.cluster, constants)
    for split in row.splits:
        memory_ = predict_memory(row.facts, split, row.recipe, row.limit_bytes)
        found.append(
            Answer(predict_time(row.facts, split, row.recipe, on), memory_, memory_.fits(MARGIN), split)
        )
    fitting = [one for one in found if one.fits]
    if fitting:
        return min(fitting, key=lambda one: one.time.step_s)
    return min(found, key=lambda one: one.memory.peak_bytes)


def read(path: Path) -> Iterator[Row | tuple[str, str]]:
    """Rows, or the id of a row that cannot be priced and why."""
    with path.open(newline="") as lines:
        for cells in csv.DictReader(lines):
            row = {key: (value or "").strip() for key, value in cells.items() if key}
            try:
                yield _row(row)
            except Unpriced as why:
                yield row["row_id"], str(why)
            except ValidationError as error:
                yield row["row_id"], explain(error, [])


def _row(row: Mapping[str, str]) -> Row:
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
        raise Unpriced(f"{key} is not said")
    return default


def _float(row: Mapping[str, str], key: str) -> float:
    try:
        return float(row.get(key, ""))
    except ValueError:
        raise Unpriced(f"{key} is not said") from None


def _recipe(row: Mapping[str, str]) -> Recipe:
    said = " ".join(
        row.get(key, "") for key in ("dataset", "source", "notes", "zero_stage", "url_or_path")
    ).lower()
    if "deepspeed" in said and row["zero_stage"].startswith("3"):
        recipe = DEEPSPEED
    elif "fsdp" in said or "torchtitan" in said:
        compiled = "compile" in row.get("notes", "").lower() and "without" not in row.get("notes", "").lower()
        recipe = FSDP_COMPILED if compiled else FSDP
        if compiled and "2025" in said:  # since when torchtitan compiles the loss too
            recipe = replace(recipe, loss=8.0)
        if "foundry" in said:
            recipe = LLM_FOUNDRY
        if row["precision"] == "bf16" and "foundry" in said:  # PURE: gradients averaged in bf16
            recipe = replace(recipe, reduce=2.0)
    elif "deepspeed" in said:
        recipe = MEGATRON_DEEPSPEED
    elif row["gpu_type"].startswith(("H", "B", "GH", "GB", "MI")) or re.search(
        r"\bm?core\b|nemo\b|flash|transformer.?engine|mlperf", said
    ):
        recipe = MEGATRON_CORE
    else:
        recipe = replace(MEGATRON, sequence="2205.05198" in said and row["recompute"].startswith("selective"))
    if "asynctp" in said and "vanilla" not in said:
        recipe = replace(recipe, overlaps_tensor=0.6)
    if (
        recipe.name.startswith("fsdp") and _int(row, "tp", 1) > 1
    ):  # the loss of split logits has two more copies of them in float32
        recipe = replace(recipe, loss=recipe.loss + 8.0)
    if (
        recipe.name.startswith("fsdp") and _int(row, "pp", 1) > 1
    ):  # torchtitan keeps a stage's weights and gradients whole in a step
        recipe = replace(recipe, whole_gradients=True)
    if (
        "fp8" in row["precision"] and "rowwise" not in row["precision"]
    ):  # products scaled by row were no faster than bf16 in 2025
        recipe = replace(recipe, dtype="fp8", gather=1.0 if recipe.name.startswith("fsdp") else recipe.gather)
    if "zero bubble" in said:
        recipe = replace(recipe, gradient=2.0, scatter=False, sequence=False)
    if "<=18b" in said:  # as the notes of Narayanan et al. say
        recipe = replace(recipe, overlaps_data=float(row["n_params"]) <= 1.9e10)
    return recipe


def _model(row: Mapping[str, str], recipe: Recipe, seq: int) -> Transformer:
    if _int(row, "ep", 1) > 1:
        raise Unpriced("the experts are not told")
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
        vocab=_int(row, "vocab", VOCAB),
        seq=seq,
        gated=gated,
        norm="rms" if gated else "layer",
        bias=not gated and "mpt" not in name,
        tied=not gated,
        positions=0 if gated else seq,
        dropout=not gated and not recipe.fused,
    )


def _splits(row: Mapping[str, str], model: Transformer) -> tuple[WorkSplit, ...]:
    """What is not told is left open: the planner takes what is fastest and fits, as those who tuned the run will have."""
    ranks, tp, pp, cp = _int(row, "n_gpus"), _int(row, "tp", 1), _int(row, "pp", 1), _int(row, "cp", 1)
    cut, batch = tp * pp * cp, _int(row, "global_batch")
    if not cut or not ranks or ranks % cut or pp > model.layers or model.heads % tp:
        raise Unpriced(
            f"tp × pp × cp = {tp} × {pp} × {cp} do not cut {ranks} devices, {model.layers} layers and {model.heads} heads"
        )
    dp = ranks // cut
    if batch < dp:
        raise Unpriced(f"global_batch {batch} is less than {dp} data ranks")
    zero = int(row["zero_stage"][:1]) if row["zero_stage"][:1].isdigit() else None
    each = batch // dp
    told = _int(row, "micro_batch", 0)
    micro_batches = [told] if told else [b for b in (1, 2, 4, 8) if each % b == 0]
    if zero == 3 and pp > 1:
        zero = 2
    if (
        told and pp > 1 and told * dp == batch and each > 1
    ):  # the samples of a data rank, and not of a micro-batch
        micro_batches = [max(1, each // pp)]
    recompute = row["recompute"].split("(")[0].split("+")[0].strip().split(" ")[0]
    recomputes = [recompute] if recompute in ("none", "selective", "full") else ["none", "selective", "full"]
    stages = _stages(row, model, pp)
    said = row.get("schedule", "").upper().rstrip("*")
    schedule = "interleaved" if said.startswith("INTERLEAVED") else SCHEDULES.get(said, "")
    if schedule == "zb-v" or (schedule == "interleaved" and stages == [1]):
        stages = [2]
    found = []
    for b, recompute, v in product(micro_batches, recomputes, stages):
        if b < 1 or each % b:
            continue
        kind = schedule or ("interleaved" if v > 1 else "1f1b")
        for stage in (0, 1) if zero is None else (zero,):
            found.append(
                WorkSplit(dp, tp, pp, cp, 1, stage, 1, b, each // b, kind, v if pp > 1 else 1, recompute)
            )
    if not found:
        raise Unpriced(f"global_batch {batch} is not dp × micro_batch × a whole number")
    return tuple(found)


def _stages(row: Mapping[str, str], model: Transformer, pp: int) -> list[int]:
    text, each = row.get("vp", ""), model.layers // pp
    if text.startswith("max"):
        return [-(-model.layers // pp)]
    if text.isdigit():
        return [int(text)]
    open_ = row["micro_batch"] == "" and pp > 1
    return [v for v in range(1, each + 1) if each % v == 0] if open_ else [1]


def _cluster(row: Mapping[str, str]) -> Cluster:
    kind = row["gpu_type"].upper().removeprefix("NVIDIA ").removeprefix("TESLA ")
    name = f"{kind.split('-')[0]}-{row['gpu_mem_GB']}"
    found = next((DEVICES[key] for key in DEVICES if name.startswith(key)), None)
    if found is None:
        raise Unpriced(f"memory bandwidth and links of {row['gpu_type']} are not known")
    memory, node, across = found
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
    """Of a sample, as the source counts them."""
    said, h, s, layers = row["flops_convention"], m.hidden, m.seq, m.layers
    if "hardware" in said:  # arXiv 2104.04473, equation 3
        return 96 * s * layers * h**2 * (1 + s / (6 * h) + m.vocab / (16 * layers * h))
    if "2N*S" in said:  # llm-foundry
        return 3 * (2 * float(row["n_params"]) * s + layers * 4 * h * s**2)
    return m.facts().training_flops


def _memory_bytes(row: Mapping[str, str]) -> float | None:
    if not row["peak_memory_GB"]:
        return None
    return float(row["peak_memory_GB"]) * (2**30 if "gib" in row["notes"].lower() else 1e9)
