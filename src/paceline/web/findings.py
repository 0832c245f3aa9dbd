"""The findings of a run, computed beside its page: they read all files of the run again."""

import threading
import time
from typing import Any

from paceline.errors import Error
from paceline.inspect.find import find
from paceline.inspect.read_facts import read_facts
from paceline.inspect.text import to_json
from paceline.run import RunFolder
from paceline.units import without_controls

EVERY_S = 10.0  # at least, between the end of a computation and the next
MAX_SHARE = 0.05  # of the time that computations may take


class FindingsWatch:
    """Computes the findings in a thread when files changed. `panel` is the last result."""

    def __init__(self, run: RunFolder):
        self.panel: dict[str, Any] | None = None
        self.version = 0
        self._run = run
        self._seen: object = None  # what the last computation has read
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def poll(self, signature: object) -> None:
        """Start a computation if the files have another signature than at the last one, and it is due."""
        if self._thread is not None and self._thread.is_alive():
            return
        if signature != self._seen and time.monotonic() >= self._due:
            self._seen = signature
            self._thread = threading.Thread(target=self._compute, daemon=True)
            self._thread.start()

    def _compute(self) -> None:
        began = time.monotonic()
        try:
            tree = _clean(to_json(find(read_facts(self._run))))
            panel = tree | {"problem": ""}
        except (Error, OSError) as error:
            panel = {"findings": [], "checked": [], "not_checked": {}, "problem": str(error)}
        if panel != self.panel:
            self.panel = panel
            self.version += 1
        now = time.monotonic()
        self._due = now + max(EVERY_S, (now - began) / MAX_SHARE)


def _clean(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {_clean(key): _clean(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_clean(value) for value in tree]
    if isinstance(tree, float):
        return float(f"{tree:.4g}")
    return without_controls(tree) if isinstance(tree, str) else tree
