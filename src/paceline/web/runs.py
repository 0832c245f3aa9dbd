"""The runs that a page shows: found in a folder, and named to the page by random identifiers only."""

import contextlib
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline import events
from paceline.errors import Error, RunError
from paceline.events import Started
from paceline.report.figure_files import list_folders
from paceline.report.run_state import describe_run
from paceline.report.run_view import CurveReader, EarlierEvents, RunView, glance
from paceline.report.summary import Summary
from paceline.run import RunFolder, open_run
from paceline.units import several, without_controls
from paceline.web import findings, pipeline
from paceline.web.background import BackgroundPanel
from paceline.web.curves import CurveTables

MAX_RUNS = 2000  # in the list: those that were written to last
MAX_VIEWS = 8  # runs whose history is kept in memory
ROW_BYTES = 2**13  # of the last lines of a run, for its row: about 30 steps
MIN_PREVIEW_BYTES = 2**24  # of events; the page of a longer run first shows a sample of its steps
LIST_S = 1.0  # between two looks at the folder
STATES = re.compile("running|done|stopped|interrupted|failed|not started")

Signature = tuple[tuple[str, int, int], ...]
T = TypeVar("T")
UNREAD: Signature = (("", 0, 0),)


@dataclass
class ListedRun:
    """A run of the list. `row` is its state when its files had this signature.

    summary: of its last lines, see `glance`; None if they cannot be read. earlier: the events before them."""

    id: str
    folder: RunFolder
    signature: Signature
    modified: float
    row: dict[str, Any]
    summary: Summary | None
    earlier: EarlierEvents


class RunList:
    """The runs in a folder, or a single run. Methods may be called by several threads."""

    def __init__(self, path: Path, price_per_hour: float | None = None):
        self.path, self._price_per_hour = path, price_per_hour
        self.problem = ""  # why the list is empty or incomplete
        self._ids: dict[Path, str] = {}
        self._runs: dict[str, ListedRun] = {}
        self._views: OrderedDict[str, WatchedRun] = OrderedDict()
        self._looked = -LIST_S
        self._lock = threading.Lock()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each run: those that train, by name, then those that were written to last."""
        return [run.row for run in self.listed()]

    def listed(self) -> list[ListedRun]:
        """Return the runs in the order of their rows."""
        with self._lock:
            if time.monotonic() - self._looked >= LIST_S:
                self._look()
                self._looked = time.monotonic()
            return [*self._runs.values()]

    def prefetch(self) -> None:
        """Read what the first page needs, in a thread: the list, and the history of a single run."""

        def read() -> None:
            listed = self.listed()
            if self.is_single and listed:
                with contextlib.suppress(Error):
                    watched = self.watch(listed[0].id)
                    with watched.lock:
                        watched.refresh()

        threading.Thread(target=read, daemon=True).start()

    @property
    def is_single(self) -> bool:
        """Whether the folder is itself a run."""
        return _is_run(self.path)

    def _look(self) -> None:
        try:
            paths, self.problem = _find_runs(self.path), ""
        except OSError as error:
            paths, self.problem = [], f"cannot read {self.path}: {error.strerror}"
        found = []
        for path in paths:
            run_id = self._ids.setdefault(path, secrets.token_urlsafe(9))
            folder, before = RunFolder(path), self._runs.get(run_id)
            signature = sign(folder.events, folder.spec)
            if before is not None and before.signature == signature and before.row["state"] != "running":
                found.append(before)
                continue
            modified = max((mtime / 1e9 for _, mtime, _ in signature), default=0.0)
            earlier = before.earlier if before is not None else EarlierEvents()
            row = _build_row(run_id, folder, earlier)
            found.append(ListedRun(run_id, folder, signature, modified, *row, earlier))
        found.sort(key=lambda run: run.modified, reverse=True)
        found.sort(key=lambda run: (run.row["state"] != "running", _running_name(run)))  # stable
        if len(found) > MAX_RUNS:
            self.problem = f"only the {MAX_RUNS} runs that were written to last are listed, of {len(found)}"
        elif not found and not self.problem:
            self.problem = f"no runs in {self.path}; a run appears here when it starts"
        self._runs = {run.id: run for run in found[:MAX_RUNS]}

    def watch(self, run_id: str) -> "WatchedRun":
        """Return the history of a run. Raises RunError for an unknown identifier."""
        self.rows()
        with self._lock:
            run = self._runs.get(run_id)
            watched = self._views.get(run_id)
            if watched is None:
                if run is None:
                    raise RunError("no such run; it was deleted, or paceline watch was started again")
                watched = self._views[run_id] = WatchedRun(run_id, run.folder, self._price_per_hour)
            self._views.move_to_end(run_id)
            while len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
            return watched


def _running_name(run: ListedRun) -> str:
    """Return the name of a run that is written to, so that such runs do not change places all the time."""
    return run.row["name"] if run.row["state"] == "running" else ""


class WatchedRun:
    """The history of a run. A thread that uses `view` must hold `lock`.

    price_per_hour: of a device; None: that of the prediction, if it has one."""

    def __init__(self, run_id: str, folder: RunFolder, price_per_hour: float | None = None):
        self.id, self.folder, self.price_per_hour = run_id, folder, price_per_hour
        self.view = RunView(folder)
        self.summary = self.view.summary  # until the last `refresh`; it takes long for a long run
        self.lock = threading.Lock()
        self.findings = BackgroundPanel(lambda: findings.compute_findings(folder), findings.EVERY_S)
        self.pipeline = BackgroundPanel(self._compute_pipeline, pipeline.EVERY_S)
        self.curves = CurveTables()
        self.samples: Signature = UNREAD  # of the files that the last `refresh` has read
        self._kept: dict[str, tuple[object, Any]] = {}  # see `keep`
        self._signature = UNREAD
        self.was_built = False  # then long computations may begin
        self._reading: threading.Thread | None = None  # the curves of a long run
        self._reader: CurveReader | None = None

    def has_curves(self) -> bool:
        """Return whether all steps were read. The lock must be held.

        Those of a long run are read by a thread, which starts when the page has a sample of them."""
        if self.view.has_curves or self._find_size() < MIN_PREVIEW_BYTES:
            return True
        if self._reader is not None:
            self.view.use_curves(self._reader)
            return True
        if self._reading is None:
            if not self.was_built:
                return False
            self._reading = threading.Thread(target=self._read_curves, daemon=True)
            self._reading.start()
        return not self._reading.is_alive()  # it failed, and the view says why

    def wait_for_curves(self) -> None:
        """Return when all steps were read. The lock must be held."""
        self.was_built = True
        if not self.has_curves() and self._reading is not None:
            self._reading.join()
            self.has_curves()

    def _read_curves(self) -> None:
        with contextlib.suppress(RunError), events.readable(self.folder.events):
            reader = CurveReader(self.folder)
            reader.refresh()
            self._reader = reader

    def _find_size(self) -> int:
        with contextlib.suppress(OSError):
            return self.folder.events.stat().st_size
        return 0

    def refresh(self) -> None:
        """Read what was appended. The lock must be held. Raises RunError for an unreadable file."""
        self.samples = sign(*self._find_samples())
        signature = sign(self.folder.events) + self.samples
        if signature != self._signature:
            if self.view.refresh() or self._signature == UNREAD:
                self.summary = self.view.summary
            self._signature = signature

    def keep(self, name: str, key: object, compute: Callable[[], T]) -> T:
        """Return a value, computed if its key differs from that of the last call. The lock must be held.

        name: of the value. key: everything on which it depends."""
        found = self._kept.get(name)
        if found is None or found[0] != key:
            found = self._kept[name] = (key, compute())
        value: T = found[1]
        return value

    def _compute_pipeline(self) -> dict[str, Any] | None:
        return pipeline.compute_pipeline(
            self.folder, self.view.log.starts[-1] if self.view.log.starts else None
        )

    def sign(self) -> tuple[Signature, bool, tuple[bool, bool], int, int]:
        """Return a value that differs when there is something new."""
        is_locked = False
        with contextlib.suppress(RunError):
            is_locked = self.folder.is_locked()
        files = (self.folder.events, self.folder.spec, self.folder.profile)
        signature = sign(*files, *self._find_samples(), *list_folders(self.folder))
        if self.was_built:  # the first page does not wait for these
            self.findings.poll((signature, is_locked), is_final=not is_locked)
            self.pipeline.poll((sign(*pipeline.find_traces(self.folder)), len(self.view.log.starts)))
        phase = (self.was_built, self._reader is not None)
        return signature, is_locked, phase, self.findings.version, self.pipeline.version

    def _find_samples(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(self.folder.monitor.glob("*.csv"))
        return []


def sign(*paths: Path) -> Signature:
    """Return name, time and size of the files that exist."""
    signature = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            signature.append((path.name, status.st_mtime_ns, status.st_size))
    return tuple(signature)


def describe_state(run: RunFolder, summary: Summary) -> tuple[str, str]:
    """Return the state of a run in a word, and in half a sentence."""
    sentence = describe_run(run, summary)
    word = STATES.match(sentence)
    return word[0] if word is not None else "damaged", without_controls(sentence)


def show_name(path: Path) -> str:
    """Return the name of a folder without control characters and broken encodings."""
    return without_controls(path.name.encode(errors="replace").decode())


def _find_runs(path: Path) -> list[Path]:
    if _is_run(path):
        return [path]
    return [child for child in path.iterdir() if not child.name.startswith(".") and _is_run(child)]


def _is_run(path: Path) -> bool:
    return RunFolder(path).spec.is_file() or RunFolder(path).events.is_file()


def _build_row(run_id: str, run: RunFolder, earlier: EarlierEvents) -> tuple[dict[str, Any], Summary | None]:
    row: dict[str, Any] = {"id": run_id, "name": show_name(run.path), "state": "damaged", "problem": ""}
    try:
        summary = glance(open_run(run.path, needs_request=run.spec.exists()), ROW_BYTES, earlier).summary
        row["state"], row["sentence"] = describe_state(run, summary)
    except Error as error:
        return row | {"problem": str(error)}, None
    started: Started | None = summary.started
    return row | {
        "step": summary.steps,
        "steps": started.steps if started is not None else None,
        "plan": f"{started.plan} · {several(started.ranks, 'rank')}" if started is not None else "",
        "loss": summary.last_loss,
        "samples_per_s": summary.samples_per_s,
    }, summary
