"""Seconds that a rank on a CPU computes on one block: each operation is started and done before the next."""

from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.op_times import BACKWARD, OpTimeTable
from paceline.plan.cost_model.work_split import MicrobatchKey
from paceline.plan.model.facts import Attention, BlockFacts, Product
from paceline.plan.model.operations import Operation


def products_s(
    paces: OpTimeTable, products: list[tuple[Product, float, float]]
) -> tuple[float, float, float]:
    """Forward, for the inputs and for the weights, of (product, multiplications, count) on a rank."""
    forward = inputs = weights = 0.0
    for product, volume, count in products:
        kind = "convolution" if product.convolution else "linear"
        back = paces.seconds(kind + BACKWARD, volume) * count / 2
        forward += paces.seconds(kind, volume) * count
        inputs += 0.0 if product.first else back
        weights += back
    return forward, inputs, weights


def _assumed_operations(block: BlockFacts) -> tuple[Operation, ...]:
    """Where they were not counted one by one: all alike."""
    count = max(1, block.kernels)
    return (Operation("move", sum(block.traffic[:3]) / count, True, count),)


def attention_s(
    paces: OpTimeTable, attention: tuple[Attention, ...], cut: MicrobatchKey
) -> tuple[float, float]:
    """Forward and backward."""
    volumes = [one.flops / 2 * cut.micro_batch / (cut.tp * cut.cp) for one in attention]
    return sum(paces.seconds("attention", v) for v in volumes), sum(
        paces.seconds("attention" + BACKWARD, v) for v in volumes
    )


def others_s(
    paces: OpTimeTable, block: BlockFacts, recipe: Recipe, cut: MicrobatchKey
) -> tuple[float, float]:
    """Of operations that are no products, forward and backward. What is split along the sequence is smaller, and as often."""
    split = cut.micro_batch / (cut.cp * (cut.tp if recipe.splits_sequence(cut.cp) and not block.whole else 1))
    forward = backward = 0.0
    for one in block.operations or _assumed_operations(block):
        size = one.size if one.kind == "view" else one.size * split
        forward += one.count * paces.seconds(one.kind, size)
        backward += one.count * paces.seconds(one.kind + BACKWARD, size) if one.back else 0.0
    return forward, backward
