"""Assign things of different sizes to ranks."""

from collections.abc import Sequence


def balance_by_size(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that each size is assigned to: the largest first, to the rank with the least so far."""
    load, owners = [0] * ranks, [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        owners[at] = load.index(min(load))
        load[owners[at]] += sizes[at]
    return owners
