"""Flatten the arguments and results of modules."""

from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten


def flatten(arguments: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and structure of tuples, lists and dicts; other objects (a cache) are leaves."""
    return tree_flatten(arguments, is_leaf=lambda value: type(value) not in (tuple, list, dict))
