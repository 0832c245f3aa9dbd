"""Seconds that torch's engines add to a step of a rank on a CPU by themselves, as they were measured: calls, hooks, copies, waiting."""

from typing import NamedTuple

from paceline.plan.speeds import Speeds
from paceline.plan.split import Share, Split

# What an engine counts; what it takes for one of them has the start of its collectives in it.
#   step       nothing: the loop around all of them
#   ddp        tensors; zero1: with what it broadcasts
#   zero2      blocks, and tensors; zero3: in each micro-batch
#   tp         sums over the ranks that share features, forward and backward together, in each micro-batch; and tensors of split blocks
#   cp         attention that goes round a ring, in each micro-batch
#   pp         micro-batches of each stage
#   selective  blocks whose activations are computed again in part, in each micro-batch
NAMES = ("step", "ddp", "zero1", "zero2", "zero3", "tp", "cp", "pp", "selective")


class Units(NamedTuple):
    units: float = 0.0
    tensors: float = 0.0


def engines_s(share: Share, split: Split, speeds: Speeds) -> float:
    each = ((speeds.engines[name], found) for name, found in units(share, split).items() if name in speeds.engines)
    return sum(step_s + found.units * unit_s + found.tensors * tensor_s for (step_s, unit_s, tensor_s), found in each)


def units(share: Share, split: Split) -> dict[str, Units]:
    tensors = float(sum(block.tensors * count for block, count in share.parts))
    blocks = float(sum(count for block, count in share.parts if block.params))
    found = {"step": Units()}
    if split.tp > 1:
        sums = sum(block.sums * count for block, count in share.parts)
        found["tp"] = Units(split.micro * sums, sum(block.tensors * count for block, count in share.parts if block.split_params))
    if split.cp > 1:
        found["cp"] = Units(split.micro * sum(len(block.attention) * count for block, count in share.parts))
    if split.pp > 1:
        found["pp"] = Units(split.micro * split.stages)
    if split.dp * split.cp > 1:
        if split.zero >= 2 or split.tp * split.pp > 1:
            gathers = split.zero == 3 and split.shards > 1
            times = split.micro if gathers else 1
            found["zero3" if gathers else "zero2"] = Units(times * blocks, times * tensors)
        else:
            found["zero1" if split.zero else "ddp"] = Units(tensors)
    if split.recompute == "selective":
        found["selective"] = Units(split.micro * sum(count for block, count in share.parts if "full" in block.saved))
    return found
