"""The splits of work that a row of published measurements allows."""

from collections.abc import Mapping
from itertools import product
from math import gcd

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


def find_splits(row: Mapping[str, str], model: Transformer) -> tuple[WorkSplit, ...]:
    """Return all splits that the row allows: the fastest that fits is the likely choice of a tuned run."""
    tp, pp = whole_number(row["tp"]), whole_number(row["pp"])
    degrees = [(tp or 1, pp or 1)]
    if not tp and not pp and not _is_sharded(row):  # the source names only the number of devices
        degrees = list(product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32)))
    splits: list[WorkSplit] = []
    reason = None
    for degree in degrees:
        try:
            splits += _splits_of(row, model, *degree)
        except NotPredictable as found:
            reason = reason or found
    if not splits and reason is not None:
        raise reason
    return tuple(splits)


def _is_sharded(row: Mapping[str, str]) -> bool:
    """Return whether FSDP shards the weights, without another split."""
    return "fsdp" in f"{row['model']} {row['notes']} {row['zero_stage']}".lower()


def _splits_of(row: Mapping[str, str], model: Transformer, tp: int, pp: int) -> list[WorkSplit]:
    ranks, cp, batch = read_int(row, "n_gpus"), read_int(row, "cp", 1), read_int(row, "global_batch")
    ep = read_int(row, "ep", 1) if model.experts > 1 else 1
    model_ranks = tp * pp * cp
    if not model_ranks or not ranks or ranks % model_ranks or pp > model.layers or model.heads % tp:
        raise NotPredictable(
            f"tp × pp × cp = {tp} × {pp} × {cp} does not divide "
            f"{ranks} devices, {model.layers} layers and {model.heads} heads"
        )
    dp = ranks // model_ranks
    if batch < dp:
        raise NotPredictable(f"global_batch {batch} is less than {dp} data ranks")
    zero = int(row["zero_stage"][:1]) if row["zero_stage"][:1].isdigit() else None
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
