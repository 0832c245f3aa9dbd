"""The styles in which a layer is split over the ranks of a tensor axis, as one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.parallel.tensor.linear import (
    ForwardBuilder,
    build_column_forward,
    build_gather_forward,
    build_head_forward,
    build_loss_forward,
    build_row_forward,
    build_vocabulary_forward,
)
from paceline.parallel.tensor.tracer import (
    is_embedding,
    is_linear,
    is_loss_head,
    is_parametrized,
    is_transposed,
    linear_features,
)


@dataclass(frozen=True)
class SplitStyle:
    """How a layer is split, and what that means for its input, its output and its cost."""

    split_dims: Mapping[str, int]  # parameter -> dimension that is split, for a weight of shape (out, in)
    build_forward: ForwardBuilder
    for_embedding: bool = False  # splits an embedding; else a linear layer
    for_loss: bool = False  # splits a linear layer that returns the losses of its targets
    takes_whole_input: bool = False  # the gradient of the input is summed over the ranks
    allows_uneven: bool = False  # the last part may be smaller: vocabularies are seldom divisible
    sums: float = 0.0  # all-reduces of the output per forward pass; an all-gather counts half
    product_split: Literal["columns", "inner"] | None = None  # dimension of its matrix product that is split
    tp_plan: tuple[str, ...] = ()  # its names in transformers' tp_plan


STYLES: dict[str, SplitStyle] = {
    "column": SplitStyle(
        {"weight": 0, "bias": 0},
        build_column_forward,
        takes_whole_input=True,
        product_split="columns",
        tp_plan=("colwise",),
    ),
    "row": SplitStyle(
        {"weight": 1}, build_row_forward, sums=1.0, product_split="inner", tp_plan=("rowwise",)
    ),
    "gather": SplitStyle(
        {"weight": 0, "bias": 0},
        build_gather_forward,
        takes_whole_input=True,
        sums=0.5,
        product_split="columns",
        tp_plan=("colwise_rep", "colwise_gather_output"),
    ),
    "head": SplitStyle(
        {"weight": 0, "bias": 0},
        build_head_forward,
        takes_whole_input=True,
        allows_uneven=True,
        product_split="columns",
    ),
    "loss": SplitStyle(
        {"weight": 0, "bias": 0},
        build_loss_forward,
        for_loss=True,
        takes_whole_input=True,
        allows_uneven=True,
        product_split="columns",
    ),
    "vocabulary": SplitStyle(
        {"weight": 0}, build_vocabulary_forward, for_embedding=True, allows_uneven=True, sums=1.0
    ),
}
WHOLE = "whole"  # a layer that is not split; only a task's layout names it
HUGGING_FACE = {name: style for style, row in STYLES.items() for name in row.tp_plan}


def can_split(module: Any, style: str) -> bool:
    """Return whether a style applies to a module of this kind, whatever its size."""
    if STYLES[style].for_embedding:
        return is_embedding(module)
    if STYLES[style].for_loss:
        return is_loss_head(module)
    # A head is split unevenly, and its loss reads the mesh of its weight.
    return is_linear(module) and not (style == "head" and is_parametrized(module))


def split_size(module: Any, style: str) -> int:
    """Return the size of the dimension that a style splits: embeddings, input features or output features."""
    if STYLES[style].for_embedding:
        return int(module.num_embeddings)
    features_in, features_out = linear_features(module)
    return features_in if STYLES[style].split_dims["weight"] else features_out


def split_dims(module: Any, style: str | None) -> dict[str, int]:
    """Return parameter -> the dimension that a style splits; empty without a style."""
    if style in (None, WHOLE):
        return {}
    dims = dict(STYLES[style].split_dims)
    if is_transposed(module):
        dims["weight"] = 1 - dims["weight"]
    return dims
