"""Seconds that torch's engines add to a step of a rank on a CPU by themselves, as they were measured: calls, hooks, copies, waiting."""

from paceline.plan.speeds import Speeds
from paceline.plan.split import Share, Split

# What an engine counts; what it takes for one of them has the start of its collectives in it.
#   step   nothing: the loop around all of them
#   ddp    tensors; zero1: with what it broadcasts
#   zero2  blocks; zero3: in each micro-batch
#   tp     sums over the ranks that share features, forward and backward together, in each micro-batch
#   cp     attention that goes round a ring, in each micro-batch
#   pp     micro-batches of each stage
NAMES = ("step", "ddp", "zero1", "zero2", "zero3", "tp", "cp", "pp")


def engines_s(share: Share, split: Split, speeds: Speeds) -> float:
    found = speeds.engines
    return sum(found[name][0] + units * found[name][1] for name, units in _units(share, split).items() if name in found)


def _units(share: Share, split: Split) -> dict[str, float]:
    tensors = sum(block.tensors * count for block, count in share.parts)
    blocks = sum(count for block, count in share.parts if block.params)
    units: dict[str, float] = {"step": 0.0}
    if split.tp > 1:
        units["tp"] = split.micro * sum(block.sums * count for block, count in share.parts)
    if split.cp > 1:
        units["cp"] = float(split.micro * sum(len(block.attention) * count for block, count in share.parts))
    if split.pp > 1:
        units["pp"] = float(split.micro * split.stages)
    if split.dp * split.cp > 1:
        if split.zero >= 2 or split.tp * split.pp > 1:
            units["zero3" if split.zero == 3 else "zero2"] = float(blocks * (split.micro if split.zero == 3 else 1))
        else:
            units["zero1" if split.zero else "ddp"] = float(tensors)
    return units
