"""The splits of work that a row of published measurements allows."""

import re
from collections.abc import Mapping
from itertools import product
from math import gcd, prod

from paceline.plan import schedules
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.model.transformer import Transformer
from published_cells import NotPredictable, read_int, whole_number

SCHEDULES = {
    "GPIPE": "gpipe",
    "1F1B-I": "interleaved",
    "ZB-1P": "zb-h1",
    "ZB-H1": "zb-h1",
    "ZB-2P": "zb-2p",
    "ZB-H2": "zb-h2",
    "ZB-V": "zb-v",
}
# Degrees that are tried if a row does not name them.
TENSOR, PIPELINE, CONTEXT = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)
# How sources name what is recomputed; other words, such as `yes`, do not say how much.
RECOMPUTES = (
    (r"none|no\b|off|false|without", "none"),
    (r"sel|partial|core", "selective"),
    (r"full|uniform|block", "full"),
)


def find_splits(row: Mapping[str, str], model: Transformer) -> tuple[WorkSplit, ...]:
    """Return all splits that the row allows: the fastest that fits is the likely choice of a tuned run."""
    splits: list[WorkSplit] = []
    reason = None
    for degree, ep in product(_degrees(row), _expert_degrees(row, model)):
        try:
            splits += _splits_of(row, model, *degree, ep)
        except NotPredictable as found:
            reason = reason or found
    if not splits and reason is not None:
        raise reason
    return tuple(splits)


def _degrees(row: Mapping[str, str]) -> list[tuple[int, int, int]]:
    """Return the degrees of tp, pp and cp that a row allows."""
    tp, pp, cp, dp, ranks = (whole_number(row[key]) for key in ("tp", "pp", "cp", "dp", "n_gpus"))
    if dp and ranks:
        degrees = [
            each
            for each in product([tp] if tp else TENSOR, [pp] if pp else PIPELINE, [cp] if cp else CONTEXT)
            if prod(each) * dp == ranks
        ]
        if degrees:
            return degrees
    if not tp and not pp and not _is_sharded(row):  # the source names only the number of devices
        return list(product(TENSOR, PIPELINE, [cp or 1]))
    return [(tp or 1, pp or 1, cp or 1)]


def _is_sharded(row: Mapping[str, str]) -> bool:
    """Return whether FSDP shards the weights, without another split."""
    text = f"{row['model']} {row['notes']} {row['zero_stage']}".lower()
    return bool(re.search("fsdp|hsdp|fully.?shard|maxtext|paxml", text))


def _expert_degrees(row: Mapping[str, str], model: Transformer) -> list[int]:
    """Return the degrees of expert parallelism that a row allows: its own, or else all usual ones."""
    if model.experts == 1:
        return [1]
    if ep := whole_number(row["ep"]):
        return [ep]
    return [ep for ep in (1, 2, 4, 8, 16, 32, 64) if model.experts % ep == 0]


def _splits_of(
    row: Mapping[str, str], model: Transformer, tp: int, pp: int, cp: int, ep: int
) -> list[WorkSplit]:
    given_dp = whole_number(row["dp"])
    ranks = read_int(row, "n_gpus", given_dp * tp * pp * cp or None)
    batch, model_ranks = read_int(row, "global_batch"), tp * pp * cp
    if not model_ranks or not ranks or ranks % model_ranks or pp > model.layers or model.heads % tp:
        raise NotPredictable(
            f"tp × pp × cp = {tp} × {pp} × {cp} does not divide "
            f"{ranks} devices, {model.layers} layers and {model.heads} heads"
        )
    if ep > ranks // pp:
        raise NotPredictable(f"ep {ep} is more than the {ranks // pp} ranks of a pipeline stage")
    dp = ranks // model_ranks
    if batch < dp:
        raise NotPredictable(f"global_batch {batch} is less than {dp} data ranks")
    stage = re.match(r"(?:zero|stage|\W|_)*([0-3])\b", row["zero_stage"].lower())
    zero = int(stage[1]) if stage else None
    if _is_sharded(row):
        zero = 3
    rank_samples = batch // dp
    given = read_int(row, "micro_batch", 0)
    if given:  # a batch that is not a multiple of it ends with smaller micro-batches
        given = gcd(given, rank_samples)
    micro_batches = [given] if given else [b for b in (1, 2, 4, 8) if rank_samples % b == 0]
    if zero == 3 and pp > 1:
        zero = 2
    # Some sources give the samples of a data rank as the micro-batch.
    if given and pp > 1 and given * dp == batch and rank_samples > 1:
        micro_batches = [max(1, rank_samples // pp)]
    text = row["recompute"].lower()
    known = next((kind for pattern, kind in RECOMPUTES if re.match(pattern, text)), None)
    recomputes = [known] if known else ["none", "selective", "full"]
    stages = _stages(row, model, pp)
    name = row.get("schedule", "").upper().rstrip("*").replace("_", "-").replace("ZBV", "ZB-V")
    schedule = "interleaved" if "INTERLEAVE" in name else SCHEDULES.get(name, "")
    if schedule == "zb-v" or (schedule == "interleaved" and stages == [1]):
        stages = [2]
    splits = []
    for b, recompute, v in product(micro_batches, recomputes, stages):
        if b < 1 or rank_samples % b:
            continue
        kind = schedule or ("interleaved" if v > 1 else "1f1b")
        is_guess = v > 1 and not (schedule or row["vp"])
        if is_guess and not schedules.SCHEDULES[kind].allows(rank_samples // b, pp):
            continue
        for stage in (0, 1) if zero is None else (zero,):
            splits.append(
                WorkSplit(
                    dp, tp, pp, cp, ep, stage, 1, b, rank_samples // b, kind, v if pp > 1 else 1, recompute
                )
            )
    if not splits:
        raise NotPredictable(f"global_batch {batch} is not dp × micro_batch × a whole number")
    return splits


def _stages(row: Mapping[str, str], model: Transformer, pp: int) -> list[int]:
    text, stage_layers = row.get("vp", ""), model.layers // pp
    if text.startswith("max"):
        return [-(-model.layers // pp)]
    if stages := whole_number(text):
        return [stages]
    unspecified = row["micro_batch"] == "" and pp > 1
    return [v for v in range(1, stage_layers + 1) if stage_layers % v == 0] if unspecified else [1]
