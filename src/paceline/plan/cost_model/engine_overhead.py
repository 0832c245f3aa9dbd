"""Measured overhead of torch's engines per step of a CPU rank: calls, hooks, copies, waiting."""

from collections.abc import Mapping
from typing import NamedTuple

from paceline.plan.cost_model.constants import OverheadCosts
from paceline.plan.cost_model.rates import DeviceRates
from paceline.plan.cost_model.work_split import StageAssignment, WorkSplit

# Units of each engine. The cost of a unit includes the start of its collectives.
#   step       none: the training loop
#   ddp        tensors; zero1: also its broadcasts
#   zero2      blocks and tensors; zero3: per micro-batch
#   tp         all-reduces over tp, forward and backward, and tensors of split blocks, per micro-batch
#   cp         ring attention calls, per micro-batch
#   pp         micro-batches of each stage
#   selective  selectively recomputed blocks, per micro-batch


class UnitCounts(NamedTuple):
    """Units and tensors of an engine; ranks: number of ranks that it connects."""

    units: float = 0.0
    tensors: float = 0.0
    ranks: int = 1


def engines_s(assignment: StageAssignment, split: WorkSplit, rates: DeviceRates) -> float:
    """Return the overhead of all engines of a rank, in seconds per step."""
    return sum(
        _overhead_s(rates.engines[name], counts)
        for name, counts in count_units(assignment, split).items()
        if name in rates.engines
    )


def _overhead_s(measured: Mapping[int, OverheadCosts], counts: UnitCounts) -> float:
    """Return the overhead by the measurement with the nearest number of ranks."""
    costs = measured[min(measured, key=lambda ranks: abs(ranks - counts.ranks))]
    return costs.step + counts.units * costs.unit + counts.tensors * costs.tensor


def count_units(assignment: StageAssignment, split: WorkSplit) -> dict[str, UnitCounts]:
    """Return the units of each engine that a rank uses."""
    tensors = float(sum(block.tensors * count for block, count in assignment.parts))
    blocks = float(sum(count for block, count in assignment.parts if block.params))
    counts = {"step": UnitCounts()}
    if split.tp > 1:
        all_reduces = sum(block.sums * count for block, count in assignment.parts)
        split_tensors = sum(block.tensors * count for block, count in assignment.parts if block.split_params)
        counts["tp"] = UnitCounts(
            split.microbatches * all_reduces, float(split.microbatches * split_tensors), split.tp
        )
    if split.cp > 1:
        counts["cp"] = UnitCounts(
            split.microbatches * sum(len(block.attention) * count for block, count in assignment.parts),
            ranks=split.cp,
        )
    if split.pp > 1:
        counts["pp"] = UnitCounts(split.microbatches * split.stages, ranks=split.pp)
    data_ranks = split.dp * split.cp
    if data_ranks > 1:
        if split.zero >= 2 or split.tp * split.pp > 1:
            gathers = split.zero == 3 and split.shards > 1
            times = split.microbatches if gathers else 1
            counts["zero3" if gathers else "zero2"] = UnitCounts(
                times * blocks, times * tensors, split.shards if gathers else data_ranks
            )
        else:
            counts["zero1" if split.zero else "ddp"] = UnitCounts(tensors, ranks=data_ranks)
    if split.recompute == "selective":
        counts["selective"] = UnitCounts(
            split.microbatches * sum(count for block, count in assignment.parts if "full" in block.saved)
        )
    return counts
