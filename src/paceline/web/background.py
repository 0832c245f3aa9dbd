"""A panel that takes long to compute: a thread computes it when its files changed."""

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.errors import Error

MAX_SHARE = 0.003  # of a core that computations may take


class BackgroundPanel:
    """Computes a panel in a thread. `panel` is the last result, and `version` counts changes of it.

    every_s: at least between the end of a computation and the next."""

    def __init__(self, compute: Callable[[], dict[str, Any] | None], every_s: float):
        self.panel: dict[str, Any] | None = None
        self.version = 0
        self._compute, self._every_s = compute, every_s
        self._seen: object = None  # what the last computation has read
        self._is_final = False
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def poll(self, signature: object, is_final: bool = False) -> None:
        """Start a computation if it is due, and the files changed since the last computation.

        is_final: whether the run has ended. Then the first computation is due at once."""
        if self._thread is not None and self._thread.is_alive():
            return
        is_due = time.monotonic() >= self._due or (is_final and not self._is_final)
        if signature != self._seen and is_due:
            self._seen, self._is_final = signature, is_final
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        began_s = time.thread_time()
        try:
            panel = self._compute()
        except (Error, OSError) as error:
            panel = {"problem": str(error)}
        if panel != self.panel:
            self.panel = panel
            self.version += 1
        spent_s = time.thread_time() - began_s
        self._due = time.monotonic() + max(self._every_s, spent_s / MAX_SHARE)
