"""Published numbers other than step times: closed forms of memory, bubbles, single matrix products."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.cluster.facts import Cluster, Device, Fact
from paceline.plan.cost_model.compute_time import product_s
from paceline.plan.cost_model.constants import CONSTANTS
from paceline.plan.cost_model.framework_profiles import DEEPSPEED, MEGATRON
from paceline.plan.cost_model.memory import predict_memory, state_bytes
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.model.facts import ModelFacts
from paceline.plan.model.transformer import Transformer
from paceline.plan.schedules import StageTimes, bubble_share
from published_cells import NotPredictable

Score = tuple[str, float, float]  # (id, predicted, published)
MODELS = {  # layers, hidden, heads, tp, pp, stages, micro-batch
    "22B": (48, 6144, 64, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (105, 20480, 128, 8, 35, 3, 1),
    "1T": (128, 25600, 160, 8, 64, 1, 1),
}
# Ranks p₀ and their times from other tables, for rows without times: on p ranks, a rank has p₀/p as many
# blocks and sends the same amount.
TIMES = {
    "6.2B": (8, (29.7, 29.4, 19.5), 0.55),
    "14.6B": (16, (11.3, 11.25, 8.1), 0.378),
    "28.3B": (32, (10.4, 10.2, 7.7), 0.42),
}
LAYERS = {"1.5B": 22, "6.2B": 30, "14.6B": 46, "28.3B": 62}
BUBBLES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zb-h1",
    "ZB-1p": "zb-h1",
    "ZB-H2": "zb-h2",
    "ZB-2p": "zb-2p",
    "ZB-V": "zb-v",
}


def zero_table1(row: Mapping[str, str]) -> Score:
    """Return the GB of model state per device."""
    stage = int(row["stage"][5])
    per_parameter = state_bytes(replace(DEEPSPEED, at_rest=False), stage, int(row["dp_degree"])).total
    return (
        f"{row['model']} {row['stage']} on {row['dp_degree']}",
        float(row["params"]) * per_parameter / 1e9,
        float(row["formula_GB"]),
    )


def zero_table2(row: Mapping[str, str]) -> Score:
    """Return the largest model whose state fits into 32 GB, in 10⁹ parameters, with ZeRO-1 (column Pos)."""
    mp, gpus = int(row["mp"]), int(row["gpus"])
    per_parameter = state_bytes(DEEPSPEED, 1, gpus // mp).total
    return f"mp {mp} on {gpus}", 32e9 / per_parameter * mp / 1e9, float(row["theory_Pos_B"])


def _korthikanti(name: str) -> tuple[ModelFacts, WorkSplit]:
    layers, hidden, heads, tp, pp, stages, micro_batch = MODELS[name]
    facts = Transformer(
        layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048, dropout=True, positions=2048
    ).facts()
    kind = "interleaved" if stages > 1 else "1f1b"
    return facts, WorkSplit(
        tp=tp, pp=pp, micro_batch=micro_batch, microbatches=4 * pp, schedule=kind, stages=stages
    )


def selective_recompute(row: Mapping[str, str]) -> Score:
    """Return the GiB of activations on the first stage, without embedding and head.

    Source: arXiv 2205.05198, figure 1.
    """
    if row["figure"] != "Fig 1" or row["quantity"] != "activations":
        raise NotPredictable("not a number of bytes")
    facts, split = _korthikanti(row["model"])
    recipe = replace(MEGATRON, sequence="sequence" in row["technique"], reserved=0.0)
    split = replace(split, recompute="selective" if "selective" in row["technique"] else "none")
    bare = replace(facts, first=replace(facts.first, saved={}), last=replace(facts.last, saved={}))
    parts = {part.name: part.value for part in predict_memory(bare, split, recipe, 0.0).parts}
    return f"{row['model']} {row['technique']}", parts["activations"] / 2**30, float(row["value"])


def pipeline_bubble(row: Mapping[str, str]) -> Score:
    """Return the idle share of a step, in percent."""
    if row["schedule"] not in BUBBLES or not row["bubble_rate"]:
        raise NotPredictable(f"no bubble rate of {row['schedule']}")
    p, m, model = int(row["stages_p"]), int(row["microbatches_m"]), row["model"]
    has_times = row["TF_ms"] != ""
    if has_times:
        *passes, send = (float(row[key]) for key in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms"))
    else:
        ranks, times, send = TIMES[model]
        passes = [time * ranks / p for time in times]
    kind = BUBBLES[row["schedule"]]
    stages = {"interleaved": (LAYERS[model] + 2) // p if has_times else 2, "zb-v": 2}.get(kind, 1)
    return (
        f"{model} {row['schedule']} {p} × {m}",
        100 * bubble_share(kind, p, m, stages, StageTimes(*passes), send),
        100 * float(row["bubble_rate"]),
    )


def gemm(row: Mapping[str, str]) -> Score:
    """Return the TFLOP/s of a single matrix product."""
    sizes = re.findall(r"\b[mkn]=(\d+)", row["shape"])
    batch = re.match(r"b=(\d+)", row["shape"])
    if (
        "matmul" not in row["kind"]
        or "group" in row["kind"]
        or len(sizes) != 3
        or not batch
        or batch[1] != "1"
    ):
        raise NotPredictable(f"{row['kind']} is not a plain product")
    m, k, n = map(int, sizes)
    peak = float(row["theory_TFLOPs"]) * 1e12
    memory_Bps = 1935e9 if "A100" in row["gpu"] else 8000e9
    device = Device(
        name=row["gpu"],
        memory_bytes=Fact(value=8e10),
        memory_Bps=Fact(value=memory_Bps),
        peaks_flops={"bf16": Fact(value=peak)},
    )
    rates = device_rates(Cluster(device=device), CONSTANTS)
    return (
        f"{row['gpu']} {row['shape']}",
        2e-12 * m * n * k / product_s(rates, "bf16", m, n, k),
        float(row["measured_TFLOPs"]),
    )


# by a column that only files of this kind have: (quantity, prediction of a row)
FORMS: Mapping[str, tuple[str, Callable[[Mapping[str, str]], Score]]] = {
    "formula_GB": ("state of a model, GB", zero_table1),
    "theory_Pos_B": ("largest model, 10⁹ parameters", zero_table2),
    "figure": ("activations, GiB", selective_recompute),
    "bubble_rate": ("bubble, percent", pipeline_bubble),
    "measured_TFLOPs": ("one product, TFLOP/s", gemm),
}
