"""Operation: what the planner counts of a model besides products."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the forward pass of one sample that is not a product.

    size: elements read and written. back: whether gradients flow through it. count: number of equal
    operations.
    """

    kind: str
    size: float
    back: bool = True
    count: float = 1.0
