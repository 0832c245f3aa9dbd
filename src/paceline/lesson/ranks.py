"""The ranks of a lesson: how many they are, and a function called on each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from paceline.errors import SpecError

T = TypeVar("T")
DEFAULT_RANKS = 4
TIMEOUT_S = 120.0
_ranks = DEFAULT_RANKS


def num_ranks() -> int:
    """Return the number of ranks of this lesson: `--ranks` of the command line, or 4."""
    return _ranks


def set_ranks(ranks: int) -> None:
    """Set the number of ranks of the calls of `run` that follow. Raises SpecError."""
    global _ranks
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SpecError(f"ranks must be an integer of at least 1, got {ranks!r:.40}")
    _ranks = ranks


@contextmanager
def use_ranks(ranks: int) -> Iterator[None]:
    """Set the number of ranks inside the context."""
    before = num_ranks()
    set_ranks(ranks)
    try:
        yield
    finally:
        set_ranks(before)


def run(function: Callable[..., T], *args: Any, ranks: int | None = None) -> list[T]:
    """Call `function(*args)` on every rank, each a process of this machine, and return the results by rank.

    ranks: number of ranks [default: that of the lesson].

    Raises what `paceline.spawn` raises.
    """
    from paceline.launch.call_on_ranks import spawn

    return spawn(function, num_ranks() if ranks is None else ranks, *args, timeout_s=TIMEOUT_S)
