"""Rows of published measurements as inputs of the planner: model, split, cluster and training system."""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from paceline.cluster.facts import Cluster, Device, Fact, Link
from paceline.errors import Error, PlanError
from paceline.plan.cost_model.constants import Constants
from paceline.plan.cost_model.cost import CostPart, MemoryCost, TimeCost
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.memory import predict_memory
from paceline.plan.cost_model.rates import DeviceRates, device_rates
from paceline.plan.cost_model.step_time import predict_time
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.model.facts import ModelFacts
from paceline.plan.model.transformer import Transformer
from paceline.spec import describe_error
from published_cells import NotPredictable, find_number, find_parameters, find_rate, read_float, read_int
from published_devices import find_rates, strip_maker, with_published_device
from published_models import build_model
from published_splits import find_splits
from published_systems import find_recipe, with_release

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


# By name in lower case: columns whose names have capital letters.
COLUMNS = {
    name.lower(): name
    for name in (
        "gpu_mem_GB",
        "peak_TFLOPs_bf16",
        "internode_GBps",
        "measured_TFLOPs_per_gpu",
        "peak_memory_GB",
        "MFU",
    )
}


@dataclass(frozen=True)
class Row:
    """A measurement. Seconds are per step; `splits` has several if the source does not specify all."""

    id: str
    file: str
    model: Transformer
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
    memory_tool: str


class Prediction(NamedTuple):
    """The prediction of a row. `fits`: within memory, with MARGIN to spare.

    shown_bytes: the part of the memory that the source's tool shows. split: of several, the likely one.
    """

    time: TimeCost
    memory: MemoryCost
    fits: bool
    split: WorkSplit
    shown_bytes: float


NVLINK_RACK = 64  # devices of a job in a rack of 72
# Devices that reach the memory of a Grace processor over NVLink-C2C: two share 480 GB, and 900 GB/s in both
# directions together (NVIDIA GB200 NVL72).
GRACE, GRACE_Bps, GRACE_BYTES = ("GB200", "GB300"), 225e9, 240e9
MARGIN = 0.01  # share of a device's memory that data sheets count differently
# Parts of the memory that a tool does not show.
UNSEEN = {
    "nvidia-smi": (),  # everything
    "allocated": ("allocator", "process"),  # torch.cuda.max_memory_allocated
    "reserved": ("process",),  # torch.cuda.max_memory_reserved
}


def predict_row(row: Row, constants: Constants) -> Prediction:
    """Return the prediction of the fastest split that fits; if none fits, of the split with least memory."""
    rates = device_rates(row.cluster, constants)
    predictions, reason = [], None
    for split in row.splits:
        try:
            predictions.append(_predict(row, split, rates))
        except PlanError as error:
            reason = error
    if not predictions and reason is not None:
        raise reason
    partial = [*_partly_recomputed(row, predictions), *_offloaded(row, predictions)]
    if fitting := [item for item in [*predictions, *partial] if item.fits]:
        return min(fitting, key=lambda item: item.time.step_s)
    return min(predictions, key=lambda item: item.memory.peak_bytes)


def _predict(row: Row, split: WorkSplit, rates: DeviceRates) -> Prediction:
    memory = predict_memory(row.facts, split, row.recipe, row.limit_bytes)
    shown = sum(part.value for part in memory.parts if part.name not in UNSEEN[row.memory_tool])
    time = predict_time(row.facts, split, row.recipe, rates)
    return Prediction(time, memory, memory.fits(MARGIN), split, shown)


def _partly_recomputed(row: Row, predictions: Sequence[Prediction]) -> Iterator[Prediction]:
    """Yield splits that recompute only as many blocks as they have to (Megatron's recompute-num-layers).

    Time and memory lie between those without and with recomputation.
    """
    by_split = {item.split: item for item in predictions}
    for split, none in by_split.items():
        full = by_split.get(replace(split, recompute="full"))
        if split.recompute != "none" or none.fits or full is None or not full.fits:
            continue
        least, most = full.memory.peak_bytes, none.memory.peak_bytes
        share = min(1.0, max(0.0, (most - row.limit_bytes * (1 - MARGIN)) / (most - least)))
        time = replace(none.time, parts=_mix(none.time.parts, full.time.parts, share))
        memory = replace(none.memory, parts=_mix(none.memory.parts, full.memory.parts, share))
        shown = none.shown_bytes * (1 - share) + full.shown_bytes * share
        yield Prediction(time, memory, True, replace(split, recompute="full"), shown)


def _offloaded(row: Row, predictions: Sequence[Prediction]) -> Iterator[Prediction]:
    """Yield splits without recomputation that move what does not fit to the memory of a Grace processor.

    Transformer Engine moves activations only without pipelines. NVIDIA trains Llama 3 70B on GB200 with 40 of
    80 layers moved (Megatron-Bridge, issue 1976). Transfers overlap with computing.
    """
    if not strip_maker(row.device).startswith(GRACE) or len(row.splits) == 1:
        return
    for item in predictions:
        moved = item.memory.peak_bytes - row.limit_bytes * (1 - MARGIN)
        kept = sum(part.value for part in item.memory.parts if part.name == "activations")
        copying_s = 2 * moved / GRACE_Bps * item.split.microbatches
        if item.split.recompute != "none" or item.split.pp > 1 or item.fits:
            continue
        if moved <= min(kept, GRACE_BYTES) and copying_s <= item.time.step_s:
            yield Prediction(item.time, item.memory, True, item.split, row.limit_bytes * (1 - MARGIN))


def _mix(none: Sequence[CostPart], full: Sequence[CostPart], share: float) -> tuple[CostPart, ...]:
    """Return parts between those of two predictions."""
    both = {part.name: part for part in (*none, *full)}
    before, after = ({part.name: part.value for part in parts} for parts in (none, full))
    return tuple(
        replace(part, value=before.get(name, 0.0) * (1 - share) + after.get(name, 0.0) * share)
        for name, part in both.items()
    )


def read_cells(path: Path) -> Iterator[Mapping[str, str]]:
    """Yield the cells of each row, by the names of this project's columns; columns may be missing."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        for number, cells in enumerate(csv.DictReader(lines)):
            row = defaultdict(str)
            for key, value in cells.items():
                if key and isinstance(value, str) and value.strip():
                    row[COLUMNS.get(key.strip().lower(), key.strip().lower())] = value.strip()
            row["row_id"] = row["row_id"] or f"{path.stem}#{number}"
            yield row


def read(path: Path) -> Iterator[Row | tuple[str, str]]:
    """Yield rows; for a row that cannot be predicted, its id and the reason."""
    for row in read_cells(path):
        try:
            yield _parse_row(with_published_device(row))
        except (NotPredictable, Error) as reason:
            yield row["row_id"], str(reason)
        except ValidationError as error:
            yield row["row_id"], describe_error(error, [])


def _parse_row(row: Mapping[str, str]) -> Row:
    recipe = find_recipe(row)
    model = _model(row, recipe)
    seq = model.seq
    splits = find_splits(row, model)
    tokens = splits[0].batch * seq
    return Row(
        id=row["row_id"],
        file=row["dataset"] or row["row_id"].split("#")[0],
        model=model,
        facts=model.facts(),
        cluster=_cluster(row),
        recipe=with_release(row, recipe, model),
        splits=splits,
        step_s=_step_s(row, model, splits[0], tokens),
        memory_bytes=_memory_bytes(row),
        limit_bytes=read_float(row, "gpu_mem_GB") * 2**30,
        oom=bool(re.match(r"1|y|t|oom", row["oom"].lower())),
        gib=_is_in_gib(row),
        group=row.get("rank_group", ""),
        device=row["gpu_type"],
        memory_tool=_memory_tool(row),
    )


def _model(row: Mapping[str, str], recipe: Recipe) -> Transformer:
    return build_model(row, recipe.fused)


def _cluster(row: Mapping[str, str]) -> Cluster:
    kind = strip_maker(row["gpu_type"])
    name = f"{kind.split('-')[0]}-{row['gpu_mem_GB']}"
    has_bus = re.search(r"PCIE|NVL(?!\d)", kind)  # other cards of the same name
    common = None if has_bus else next((DEVICES[key] for key in DEVICES if name.startswith(key)), None)
    rates = common or find_rates(row)
    if rates is None:
        raise NotPredictable(f"memory bandwidth and links of {row['gpu_type']} are unknown")
    memory, node, across = rates
    peak = read_float(row, "peak_TFLOPs_bf16") * 1e12
    nic = find_rate(row["internode_GBps"]) or across
    peaks = {"bf16": peak, "fp16": peak} | (
        {"fp8": 2 * peak} if not kind.startswith(("A100", "V100")) else {}
    )
    if kind.startswith(("B2", "B3", "GB2", "GB3", "MI35")):
        peaks["fp4"] = 4 * peak
    ranks = read_int(row, "n_gpus")
    per_node = min(ranks, read_int(row, "gpus_per_node", 8))
    if kind.startswith(("GB200", "GB300")):  # NVLink connects the nodes of a rack
        per_node = min(NVLINK_RACK, ranks)
    return Cluster(
        name=row["gpu_type"],
        nodes=-(-ranks // per_node),
        devices_per_node=per_node,
        device=Device(
            name=kind,
            memory_bytes=Fact(value=read_float(row, "gpu_mem_GB") * 2**30),
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
    if step_s := find_number(row["measured_step_time_s"]):
        return step_s
    if tokens_per_s := find_number(row["tokens_per_s_per_gpu"]):
        return tokens / (tokens_per_s * split.ranks)
    if rate := find_number(row["measured_TFLOPs_per_gpu"]):
        return _flops(row, m) * split.batch / (rate * 1e12 * split.ranks)
    if share := find_number(row["MFU"]):
        share /= 100 if share > 1 else 1
        return (
            _flops(row, m) * split.batch / (share * read_float(row, "peak_TFLOPs_bf16") * 1e12 * split.ranks)
        )
    return None


def _flops(row: Mapping[str, str], m: Transformer) -> float:
    """Return the FLOP of a sample, as the source counts them."""
    convention, h, s, layers = row["flops_convention"], m.hidden, m.seq, m.layers
    if "hardware" in convention:  # arXiv 2104.04473, equation 3
        return 96 * s * layers * h**2 * (1 + s / (6 * h) + m.vocab / (16 * layers * h))
    if "2N*S" in convention:  # llm-foundry
        params = find_parameters(row["n_params"]) or float(m.facts().params)
        return 3 * (2 * params * s + layers * 4 * h * s**2)
    return m.facts().training_flops


def _memory_tool(row: Mapping[str, str]) -> str:
    notes = row["notes"].lower()
    return next((tool for tool in ("nvidia-smi", "allocated") if tool in notes), "reserved")


def _memory_bytes(row: Mapping[str, str]) -> float | None:
    if (peak := find_number(row["peak_memory_GB"])) is None:
        return None
    return peak * (2**30 if _is_in_gib(row) else 1e9)


def _is_in_gib(row: Mapping[str, str]) -> bool:
    return bool(re.search("gib|mib", f"{row['notes']} {row['peak_memory_GB']}".lower()))
