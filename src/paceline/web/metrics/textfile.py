"""Metrics as a file for the textfile collector of node_exporter, written while a server runs."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import LaunchError
from paceline.files import replaced

EVERY_S = 15.0


@contextlib.contextmanager
def write_regularly(path: Path, collect: Callable[[bool], str]) -> Iterator[None]:
    """Write metrics to a file every EVERY_S seconds, and delete it at the end.

    collect: returns the metrics, as `MetricsCollector.collect`. Raises LaunchError if the first write fails;
    later failures are printed once."""
    if path.suffix != ".prom":
        raise LaunchError(f"node_exporter only reads files that end in .prom, got {path.name}; rename it")
    _write(path, collect)
    is_ended = threading.Event()

    def run() -> None:
        before = ""
        while not is_ended.wait(EVERY_S):
            try:
                _write(path, collect)
                problem = ""
            except LaunchError as error:
                problem = str(error)
            if problem and problem != before:
                print(problem, file=sys.stderr, flush=True)
            before = problem

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_ended.set()
        thread.join()
        with contextlib.suppress(OSError):  # its values are no longer current
            path.unlink()


def _write(path: Path, collect: Callable[[bool], str]) -> None:
    text = collect(False)  # node_exporter does not know the format of OpenMetrics
    # It would read a temporary file that ends in .prom.
    with replaced(path, LaunchError, suffix=".tmp") as temporary:
        temporary.write_text(text, encoding="utf-8")
