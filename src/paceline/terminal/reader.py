"""Reads runs in a thread, and hands over what changed: the panels of the page, ranks and nodes."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import Error
from paceline.web.background import BackgroundPanel
from paceline.web.curves import Selection
from paceline.web.machine import list_last_values
from paceline.web.panels import build
from paceline.web.ranks import LIST_S, list_ranks, read_log
from paceline.web.runs import RunList, WatchedRun

EVERY_S = 1.0  # at least between two looks at the files
MAX_SHARE = 0.25  # of a core that reading may use


@dataclass(frozen=True)
class Request:
    """What to show. run_id: None for the list only. rank: whose output is shown; None for no rank."""

    run_id: str | None = None
    selection: Selection = field(default_factory=Selection)
    rank: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """What the files contain at one moment.

    runs: rows of the list. problem: why the list is empty or incomplete. panels, tables: as for the page;
    empty without a run. ranks: see `list_ranks`. nodes: see `list_last_values`. output: of a rank."""

    request: Request = field(default_factory=Request)
    runs: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    panels: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    ranks: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""


class Reader:
    """Looks at the files about once a second, and calls `publish` from its thread with what changed.

    An error that nobody expects goes to `fail`, and ends the thread."""

    def __init__(
        self, runs: RunList, publish: Callable[[Snapshot], None], fail: Callable[[BaseException], None]
    ):
        self._runs, self._publish, self._fail = runs, publish, fail
        self._request = Request()
        self._wake, self._is_closed = threading.Event(), False
        self._ranks: tuple[str, BackgroundPanel] | None = None
        # It does not keep the program alive: a read from a disk that is gone may never return.
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def request(self) -> Request:
        return self._request

    @property
    def path(self) -> Path:
        return self._runs.path

    def ask(self, **changes: Any) -> None:
        """Change what to show, and read it now."""
        self._request = replace(self._request, **changes)
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        seen: object = None
        try:
            while not self._is_closed:
                self._wake.clear()
                began, request = time.thread_time(), self._request
                now, watched = self._sign(request)
                if (now, request) != seen:
                    seen = (now, request)
                    self._publish(self.read(request, watched))
                spent_s = time.thread_time() - began
                self._wake.wait(max(EVERY_S, spent_s / MAX_SHARE))
        except BaseException as error:
            self._fail(error)

    def _sign(self, request: Request) -> tuple[object, WatchedRun | None]:
        """Return a value that differs when there is something new, and the run that is shown."""
        rows = [tuple(row.values()) for row in self._runs.rows()]
        watched = None
        if request.run_id is not None:
            try:
                watched = self._runs.watch(request.run_id)
            except Error:
                return (rows, "gone"), None
        if watched is None:
            return (rows, self._runs.problem), None
        ranks = self._poll_ranks(watched)
        output = None
        if request.rank is not None:
            output = _sign_output(watched, request.rank)
        return (rows, watched.sign(), ranks.version, watched.folder.path.is_dir(), output), watched

    def _poll_ranks(self, watched: WatchedRun) -> BackgroundPanel:
        if self._ranks is None or self._ranks[0] != watched.id:
            self._ranks = (watched.id, BackgroundPanel(lambda: list_ranks(watched.folder), LIST_S))
        panel = self._ranks[1]
        panel.poll(time.monotonic())  # heartbeats are always new
        return panel

    def read(self, request: Request, watched: WatchedRun | None) -> Snapshot:
        """Return what the files contain now."""
        snapshot = Snapshot(request, self._runs.rows(), self._runs.problem)
        if watched is None:
            return replace(snapshot, panels={"gone": True} if request.run_id is not None else {})
        with watched.lock:
            panels, tables = build(watched, request.selection)
            nodes = [] if panels["gone"] else list_last_values(watched.view)
        output = ""
        if request.rank is not None:
            try:
                output = read_log(watched.folder, str(request.rank)) or "it has printed nothing"
            except Error as error:
                output = str(error)
        ranks = self._ranks[1].panel if self._ranks is not None else None
        return replace(snapshot, panels=panels, tables=tables, nodes=nodes, ranks=ranks, output=output)


def _sign_output(watched: WatchedRun, rank: int) -> tuple[int, int] | None:
    try:
        status = watched.folder.rank_log(rank).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
