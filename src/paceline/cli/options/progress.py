"""A line on the terminal that counts what is done."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

INTERVAL_S = 0.2


@contextlib.contextmanager
def count_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that updates a line on standard error, if it is a terminal."""
    last = 0.0

    def show(done: int, total: int) -> None:
        nonlocal last
        if sys.stderr.isatty() and time.monotonic() > last + INTERVAL_S:
            last = time.monotonic()
            print(f"\r\x1b[K{what}: {done:,} of {total:,}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
