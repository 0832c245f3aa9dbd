"""Operations of a model, as the planner counts them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """Other than a product, in the forward pass of one sample. `size`: elements read and written; `back`: whether gradients pass it."""

    kind: str
    size: float
    back: bool = True
    count: float = 1.0
