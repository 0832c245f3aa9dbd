"""A panel that takes long to compute: a thread computes it when its files changed."""

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.errors import Error

MAX_SHARE = 0.05  # of the time that computations may take


class BackgroundPanel:
    """Computes a panel in a thread. `panel` is the last result, and `version` counts changes of it.

    every_s: at least between the end of a computation and the next."""

    def __init__(self, compute: Callable[[], dict[str, Any] | None], every_s: float):
        self.panel: dict[str, Any] | None = None
        self.version = 0
        self._compute, self._every_s = compute, every_s
        self._seen: object = None  # what the last computation has read
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def poll(self, signature: object) -> None:
        """Start a computation if the files have another signature than at the last one, and it is due."""
        if self._thread is not None and self._thread.is_alive():
            return
        if signature != self._seen and time.monotonic() >= self._due:
            self._seen = signature
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            panel = self._compute()
        except (Error, OSError) as error:
            panel = {"problem": str(error)}
        if panel != self.panel:
            self.panel = panel
            self.version += 1
        now = time.monotonic()
        self._due = now + max(self._every_s, (now - began) / MAX_SHARE)
