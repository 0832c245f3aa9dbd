"""Seconds that torch's engines add to a step of a rank on a CPU by themselves, as they were measured: calls, hooks, copies, waiting."""

from collections.abc import Mapping
from typing import NamedTuple

from paceline.plan.cost_model.constants import OverheadCosts
from paceline.plan.cost_model.rates import DeviceRates
from paceline.plan.cost_model.work_split import StageAssignment, WorkSplit

# What an engine counts; what it takes for one of them has the start of its collectives in it.
#   step       nothing: the loop around all of them
#   ddp        tensors; zero1: with what it broadcasts
#   zero2      blocks, and tensors; zero3: in each micro-batch
#   tp         sums over the ranks that share features, forward and backward together, and tensors of split blocks, in each micro-batch
#   cp         attention that goes round a ring, in each micro-batch
#   pp         micro-batches of each stage
#   selective  blocks whose activations are computed again in part, in each micro-batch


class UnitCounts(NamedTuple):
    """`ranks`: that the engine joins."""

    units: float = 0.0
    tensors: float = 0.0
    ranks: int = 1


def engines_s(share: StageAssignment, split: WorkSplit, speeds: DeviceRates) -> float:
    return sum(
        _overhead_s(speeds.engines[name], found)
        for name, found in count_units(share, split).items()
        if name in speeds.engines
    )


def _overhead_s(measured: Mapping[int, OverheadCosts], found: UnitCounts) -> float:
    """As on the number of ranks that is nearest."""
    takes = measured[min(measured, key=lambda ranks: abs(ranks - found.ranks))]
    return takes.step + found.units * takes.unit + found.tensors * takes.tensor


def count_units(share: StageAssignment, split: WorkSplit) -> dict[str, UnitCounts]:
    tensors = float(sum(block.tensors * count for block, count in share.parts))
    blocks = float(sum(count for block, count in share.parts if block.params))
    found = {"step": UnitCounts()}
    if split.tp > 1:
        sums = sum(block.sums * count for block, count in share.parts)
        of_split = sum(block.tensors * count for block, count in share.parts if block.split_params)
        found["tp"] = UnitCounts(split.microbatches * sums, float(split.microbatches * of_split), split.tp)
    if split.cp > 1:
        found["cp"] = UnitCounts(
            split.microbatches * sum(len(block.attention) * count for block, count in share.parts),
            ranks=split.cp,
        )
    if split.pp > 1:
        found["pp"] = UnitCounts(split.microbatches * split.stages, ranks=split.pp)
    data_ranks = split.dp * split.cp
    if data_ranks > 1:
        if split.zero >= 2 or split.tp * split.pp > 1:
            gathers = split.zero == 3 and split.shards > 1
            times = split.microbatches if gathers else 1
            found["zero3" if gathers else "zero2"] = UnitCounts(
                times * blocks, times * tensors, split.shards if gathers else data_ranks
            )
        else:
            found["zero1" if split.zero else "ddp"] = UnitCounts(tensors, ranks=data_ranks)
    if split.recompute == "selective":
        found["selective"] = UnitCounts(
            split.microbatches * sum(count for block, count in share.parts if "full" in block.saved)
        )
    return found
