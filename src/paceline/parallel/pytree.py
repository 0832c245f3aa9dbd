"""Flatten what a module takes and returns."""

from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten


def flatten(arguments: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves of tuples, lists and dicts; whatever else there is (a cache) is a leaf."""
    return tree_flatten(arguments, is_leaf=lambda value: type(value) not in (tuple, list, dict))
