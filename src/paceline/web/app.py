"""The addresses that a server answers."""

import asyncio
import csv
import gzip
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import Error, LaunchError, RunError
from paceline.events import nan_to_null
from paceline.run import RunFolder
from paceline.web.access import METRICS, Access, App, Guard
from paceline.web.curves import Selection, find_curve, to_columns
from paceline.web.delta import SentState
from paceline.web.figures import read_figure
from paceline.web.metrics.collector import MetricsCollector
from paceline.web.metrics.exposition import OPEN_METRICS, PROMETHEUS
from paceline.web.panels import build, build_comparison
from paceline.web.ranks import read_log, read_rank
from paceline.web.runs import RunList, WatchedRun

STATIC = Path(__file__).parent / "static"
FILES = {"": "index.html", "page.js": "page.js", "page.css": "page.css", "icon.svg": "icon.svg"}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MAX_STREAMS = 32
MAX_COMPARED = 6  # runs beside the shown run
POLL_S = 0.25
# Messages take at most SHARE of a core if that delays none by more than PAUSE_S, or by more than BUSY_PAUSE_S
# while trainings use the whole machine, and at most MAX_SHARE otherwise.
SHARE, MAX_SHARE = 0.01, 0.25
PAUSE_S, BUSY_PAUSE_S = 0.7, 2.0
BUSY_PERCENT = 90.0  # of the processors
KEEP_ALIVE_S = 15.0
T = TypeVar("T")
ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


StudyPanel = dict[str, Any]


def build_app(
    runs: RunList,
    access: Access,
    is_closing: Callable[[], bool] = lambda: False,
    study: Callable[[], StudyPanel | None] = lambda: None,
) -> App:
    """Return the application. Raises LaunchError if the page was not built.

    study: returns the panel of the study whose trials the runs are; the same object until it changes.
    """
    server = PageServer(runs, is_closing, study)
    routes = [Route(f"/{path}", _serve(name), methods=["GET"]) for path, name in FILES.items()]
    routes += [
        Route("/stream", server.stream),
        Route("/curve", server.curve),
        Route("/curve.csv", server.curve_as_csv),
        Route("/rank", server.rank),
        Route("/log", server.log),
        Route("/figure", server.figure),
    ]
    if access.metrics_token is not None:
        routes.append(Route(METRICS, _serve_metrics(MetricsCollector(runs))))
    return Guard(Starlette(routes=routes, exception_handlers={Error: _refuse}), access)


def _serve(name: str) -> Callable[[Request], Response]:
    path = STATIC / name
    try:
        whole = path.read_bytes()
    except OSError:
        raise LaunchError(
            "the page of paceline watch was not built when Paceline was installed; in a checkout of Paceline "
            "run: make page"
        ) from None
    packed = gzip.compress(whole, mtime=0)
    media_type = f"{TYPES[path.suffix]}; charset=utf-8"

    def respond(request: Request) -> Response:
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=media_type, headers={"content-encoding": "gzip"})
        return Response(whole, media_type=media_type)

    return respond


def _serve_metrics(collector: MetricsCollector) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        is_open = "application/openmetrics-text" in request.headers.get("accept", "")
        text = await asyncio.to_thread(collector.collect, is_open)
        headers = {"content-type": OPEN_METRICS if is_open else PROMETHEUS}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(gzip.compress(text.encode(), 1), headers=headers | {"content-encoding": "gzip"})
        return Response(text, headers=headers)

    return respond


def _refuse(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 404)


def _select(request: Request) -> Selection:
    query = request.query_params
    return Selection(**{name: query[name] for name in ("axis", "filter", "node", "map") if name in query})


def choose_pause_s(spent_s: float, is_busy: bool) -> float:
    """Return the pause after a message that took so much processor time. is_busy: whether none is free"""
    return max(POLL_S, min(spent_s / SHARE, BUSY_PAUSE_S if is_busy else PAUSE_S), spent_s / MAX_SHARE)


class PageServer:
    """Answers the requests of pages. Files are read in threads, so that a slow disk stops nobody else."""

    def __init__(self, runs: RunList, is_closing: Callable[[], bool], study: Callable[[], StudyPanel | None]):
        self._runs, self._is_closing, self._study, self._streams = runs, is_closing, study, 0

    async def stream(self, request: Request) -> Response:
        """Send the state of the list and of one run, and then what changes, as server-sent events."""
        selection, run_id = _select(request), request.query_params.get("run")
        if self._streams >= MAX_STREAMS:
            return PlainTextResponse(f"{MAX_STREAMS} pages are open; close one", 503)
        ids = [*filter(None, request.query_params.get("with", "").split(","))][:MAX_COMPARED]
        watched = await asyncio.to_thread(self._find_run, run_id) if run_id else None
        found = [await asyncio.to_thread(self._find_run, other) for other in ids if other != run_id]
        others = tuple(other for other in found if other is not None)
        is_gone = run_id is not None and watched is None
        changes = self._send_changes(watched, others, selection, {"gone": True} if is_gone else {})
        return StreamingResponse(changes, media_type="text/event-stream")

    def _find_run(self, run_id: str) -> WatchedRun | None:
        try:
            return self._runs.watch(run_id)
        except RunError:
            return None

    async def _send_changes(
        self,
        watched: WatchedRun | None,
        others: tuple[WatchedRun, ...],
        selection: Selection,
        fixed: dict[str, object],
    ) -> AsyncIterator[str]:
        self._streams += 1
        try:
            sent, signature, silent_since = SentState(), None, time.monotonic()
            while not self._is_closing():
                spent_s = 0.0
                now = await asyncio.to_thread(self._sign, watched, *others)
                if now != signature:
                    signature = now
                    message, spent_s = await asyncio.to_thread(
                        self._build_message, sent, watched, others, selection, fixed
                    )
                    if message:
                        yield f"data: {message}\n\n"
                        silent_since = time.monotonic()
                if time.monotonic() - silent_since > KEEP_ALIVE_S:
                    yield ": nothing new\n\n"
                    silent_since = time.monotonic()
                await asyncio.sleep(choose_pause_s(spent_s, is_busy=psutil.cpu_percent() > BUSY_PERCENT))
        finally:
            self._streams -= 1

    def _sign(self, *watched: WatchedRun | None) -> object:
        rows = [tuple(row.values()) for row in self._runs.rows()]
        return rows, self._study(), [run.sign() for run in watched if run is not None]

    def _build_message(
        self,
        sent: SentState,
        watched: WatchedRun | None,
        others: tuple[WatchedRun, ...],
        selection: Selection,
        fixed: dict[str, object],
    ) -> tuple[str, float]:
        """Return a message, and the processor time that it took in seconds."""
        began = time.thread_time()
        rows = nan_to_null(self._runs.rows())
        panels = {"runs_problem": self._runs.problem, "study": self._study(), **fixed}
        tables: dict[str, dict[str, list[object]]] = {}
        if watched is not None:
            with watched.lock:
                of_run, tables = build(watched, selection)
            comparison, of_others = build_comparison(watched, others, of_run)
            panels |= of_run | comparison
            tables |= of_others
        message = sent.advance(nan_to_null(panels), tables, {"runs": rows})
        text = ENCODER.encode(message | {"now": time.time()}) if message else ""
        return text, time.thread_time() - began

    async def curve(self, request: Request) -> Response:
        """Answer with the points of one curve between two values of the axis, for a page that zooms in."""
        columns = await asyncio.to_thread(self._read_curve, request)
        return Response(ENCODER.encode(columns), media_type="application/json")

    async def curve_as_csv(self, request: Request) -> Response:
        """Answer with all points of one curve as a file."""
        columns = await asyncio.to_thread(self._read_curve, request, 2**16)
        text = io.StringIO()
        writer = csv.writer(text)
        axis, name = (request.query_params.get(key, "") for key in ("axis", "name"))
        writer.writerow([axis or "step", *(f"{name} {key}" for key in [*columns][1:])])
        writer.writerows(zip(*columns.values(), strict=True))
        headers = {"content-disposition": 'attachment; filename="curve.csv"'}
        return Response(text.getvalue(), media_type="text/csv", headers=headers)

    def _read_curve(self, request: Request, limit: int = 800) -> dict[str, list[object]]:
        query, selection = request.query_params, _select(request)
        watched = self._runs.watch(query.get("run", ""))
        range_ = {}
        for name in ("begin", "end"):
            try:
                range_[name] = float(query[name]) if name in query else None
            except ValueError:
                raise RunError(f"{name} must be a number") from None
        with watched.lock:
            watched.refresh()
            watched.wait_for_curves()
            is_step = query.get("name", "").startswith("step:")
            points = find_curve(
                watched.view, query.get("name", ""), selection.axis, limit, **(range_ if is_step else {})
            )
        return to_columns(points)

    async def log(self, request: Request) -> Response:
        """Answer with the end of the output of a rank."""
        return PlainTextResponse(await asyncio.to_thread(self._read_of_rank, request, read_log))

    async def figure(self, request: Request) -> Response:
        """Answer with an image of `Task.figures`, or with nothing if its file was deleted meanwhile."""
        query = request.query_params
        watched = await asyncio.to_thread(self._runs.watch, query.get("run", ""))
        png = await asyncio.to_thread(read_figure, watched, query.get("figure", ""), query.get("step", ""))
        return Response(png, media_type="image/png") if png is not None else Response(status_code=204)

    async def rank(self, request: Request) -> Response:
        """Answer with the state of a rank."""
        state = await asyncio.to_thread(self._read_of_rank, request, read_rank)
        return Response(ENCODER.encode(nan_to_null(state)), media_type="application/json")

    def _read_of_rank(self, request: Request, read: Callable[[RunFolder, str], T]) -> T:
        query = request.query_params
        return read(self._runs.watch(query.get("run", "")).folder, query.get("rank", ""))
