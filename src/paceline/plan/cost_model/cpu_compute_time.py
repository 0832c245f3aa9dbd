"""Compute time of one block on a CPU rank, which runs operations strictly one after another."""

from paceline.plan.cost_model.framework_profiles import FLOAT32, Recipe
from paceline.plan.cost_model.op_times import BACKWARD, OpTimeTable
from paceline.plan.cost_model.work_split import MicrobatchKey
from paceline.plan.model.facts import Attention, BlockFacts, ModelFacts, Product
from paceline.plan.model.operations import Operation


def products_s(
    op_times: OpTimeTable, products: list[tuple[Product, float, float]]
) -> tuple[float, float, float]:
    """Return seconds forward, backward for inputs, and backward for weights.

    products: (product, multiplications, count).
    """
    forward = inputs = weights = 0.0
    for product, volume, count in products:
        kind = "convolution" if product.convolution else "linear"
        back = op_times.seconds(kind + BACKWARD, volume) * count / 2
        forward += op_times.seconds(kind, volume) * count
        inputs += 0.0 if product.first else back
        weights += back
    return forward, inputs, weights


def step_operations_s(op_times: OpTimeTable, facts: ModelFacts, batch: int) -> float:
    """Return the sum of the operations of a step of `batch` samples on one rank, and of its update."""
    key = MicrobatchKey(1, 1, 1, batch, "none")
    seconds = 0.0
    for block, count in facts.parts():
        sides = [(p, batch * p.rows * p.columns * p.inner, p.count) for p in block.products]
        seconds += count * sum(products_s(op_times, sides))
        seconds += count * sum(attention_s(op_times, block.attention, key))
        seconds += count * sum(others_s(op_times, block, FLOAT32, key))
        if block.tensors:
            seconds += count * block.tensors * op_times.seconds("update", block.params / block.tensors)
    return seconds


def _assumed_operations(block: BlockFacts) -> tuple[Operation, ...]:
    """Return equal operations for a block whose operations were not counted."""
    count = max(1, block.kernels)
    return (Operation("move", sum(block.traffic[:3]) / count, True, count),)


def attention_s(
    op_times: OpTimeTable, attention: tuple[Attention, ...], key: MicrobatchKey
) -> tuple[float, float]:
    """Return seconds of the forward and backward pass."""
    volumes = [
        call.flops / 2 * call.slice_imbalance(key.cp) * key.micro_batch / (key.tp * key.cp)
        for call in attention
    ]
    return sum(op_times.seconds("attention", v) for v in volumes), sum(
        op_times.seconds("attention" + BACKWARD, v) for v in volumes
    )


def others_s(
    op_times: OpTimeTable, block: BlockFacts, recipe: Recipe, key: MicrobatchKey
) -> tuple[float, float]:
    """Return seconds forward and backward of all other operations.

    Splitting along the sequence makes them smaller, not fewer.
    """
    split = key.micro_batch / (key.cp * (key.tp if recipe.splits_sequence(key.cp) and not block.whole else 1))
    forward = backward = 0.0
    for op in block.operations or _assumed_operations(block):
        size = op.size if op.kind == "view" else op.size * split
        forward += op.count * op_times.seconds(op.kind, size)
        backward += op.count * op_times.seconds(op.kind + BACKWARD, size) if op.back else 0.0
    return forward, backward
