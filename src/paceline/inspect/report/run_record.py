"""The record of a run: everything that a report shows of it, as a tree of plain values.

Page, figures and JSON show nothing else. Names and texts come from files that other users may have written.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.errors import Error, RunError
from paceline.files import open_regular, reason
from paceline.inspect.finding import Findings
from paceline.inspect.text import format_finding, to_json
from paceline.plan.cost_model.compare import ComparisonRow
from paceline.report.breakdown import RunBreakdown
from paceline.report.curve_points import CurvePoints
from paceline.report.curves import BucketColumn
from paceline.report.machine_samples import NodeSamples
from paceline.report.profile import PredictionReport
from paceline.report.run_state import describe_run
from paceline.report.run_view import RunView
from paceline.report.text import format_event
from paceline.units import without_controls
from paceline.version import __version__

MAX_TEXT = 400  # characters of a sentence or a name
MAX_EVENTS = 100  # besides steps, the last ones
MAX_REQUEST_BYTES = 2**15
MAX_MACHINE_POINTS = 300
MAX_MACHINE_COLUMNS = 40  # of all nodes

STARTED_KEYS = (
    "task",
    "plan",
    "ranks",
    "device",
    "precision",
    "threads",
    "batch",
    "samples",
    "parameters",
)

Record = dict[str, Any]


def build_record(
    view: RunView, limit: int, prediction: PredictionReport | None = None, findings: Findings | None = None
) -> Record:
    """Return the record of a run with at most `limit` points per curve.

    prediction: of its plan, next to the measured values; None if it was not predicted.
    findings: those of the run; None if they were not looked for."""
    request, problem = read_request(view)
    origin, note = view.run.origin()
    problems = [*filter(None, (problem, note)), *_compare_version(origin), *view.problems]
    summary = view.summary
    if not view.curves.columns:
        problems.append("the run has no steps yet, so that there are no curves")
    return {
        "run": _shorten(str(view.run.path)),
        "name": _shorten(view.run.path.absolute().name),
        "state": _shorten(describe_run(view.run, summary)),
        "problems": [_shorten(text) for text in problems],
        "summary": _summarize(view),
        "axes": _build_axes(view, limit),
        "curves": {
            _shorten(name): _build_curve(view.curve(name, limit=limit)) for name in view.curves.columns
        },
        "evaluation_axes": _build_evaluation_axes(view, limit),
        "metrics": {
            _shorten(name): _build_curve(view.metric_curve(name, limit=limit)) for name in view.metrics
        },
        "breakdown": _build_breakdown(view, prediction),
        "machine": _build_machine(view),
        "findings": _build_findings(findings) if findings is not None else None,
        "events": _list_events(view),
        "provenance": flatten_tables(origin),
        "request": request,
    }


def _shorten(text: str) -> str:
    """Return a text for a page: bounded, and without what UTF-8 or a terminal cannot show."""
    clean = without_controls(text.encode("utf-8", "replace").decode())
    return clean if len(clean) <= MAX_TEXT else clean[: MAX_TEXT - 1] + "…"


def _compare_version(origin: Mapping[str, Any]) -> list[str]:
    packages = origin.get("packages")
    version = packages.get("paceline") if isinstance(packages, dict) else None
    if version in (None, __version__):
        return []
    return [
        f"Paceline {version} made this run, and {__version__} this report; they may name values differently"
    ]


def read_request(view: RunView) -> tuple[Record, str]:
    """Return the request by key, and why it cannot be read (else an empty string)."""
    try:
        spec, launch = view.run.request()
        given = launch.model_dump(exclude_none=True, exclude={"run"})
        return flatten_tables(spec.model_dump(mode="json") | given), ""
    except Error as error:
        return {}, f"the request is not shown: {error}"


def flatten_tables(tree: Any, before: str = "") -> Record:
    """Return the leaves of nested tables by their dotted keys."""
    if isinstance(tree, Mapping):
        found: Record = {}
        for key, value in tree.items():
            found |= flatten_tables(value, f"{before}.{key}" if before else str(key))
        return found
    if isinstance(tree, (list, tuple)):
        return {_shorten(before): _shorten(" ".join(map(str, tree)))}
    return {_shorten(before): _shorten(tree) if isinstance(tree, str) else tree}


def _summarize(view: RunView) -> Record:
    summary, log = view.summary, view.log
    started, saved = summary.started, summary.saved[-1] if summary.saved else None
    record: Record = {key: getattr(started, key, None) for key in STARTED_KEYS}
    curves = view.curves
    record |= {
        "steps": summary.steps,
        "of_steps": started.steps if started is not None else None,
        "samples_done": curves.samples[-1] if len(curves) else 0,
        "first_loss": summary.first_loss,
        "last_loss": summary.last_loss,
        "losses": summary.losses,
        "metrics": {
            name: column.last[-1] for name, column in log.evaluations.columns.items() if len(column.last)
        },
        "samples_per_s": summary.samples_per_s,
        "step_s": summary.step_s,
        "sampled": summary.sampled,
        "total_s": summary.total_s,
        "shares": summary.shares,
        "wall_s": summary.wall_s,
        "starts": summary.starts,
        "energy_J": view.machine.find_energy_J(math.inf) if view.machine.has_energy else None,
        "checkpoint": asdict(saved) if saved is not None else None,
        "ended": summary.ended.describe() if summary.ended is not None else None,
        "notes": [*(started.notes if started is not None else ()), *summary.notes],
    }
    return _clean(record)


def _clean(tree: Any) -> Any:
    """Return a tree in which every text is short and safe to show."""
    if isinstance(tree, Mapping):
        return {_shorten(str(key)): _clean(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_clean(value) for value in tree]
    return _shorten(tree) if isinstance(tree, str) else tree


def _build_axes(view: RunView, limit: int) -> Record:
    """Return the values of each axis at the points of the curves, which are the same for all curves."""
    name = next(iter(view.curves.columns), None)
    if name is None:
        return {}
    return {axis: list(view.curve(name, axis, limit=limit).x) for axis in view.axes}


def _build_curve(points: CurvePoints) -> Record:
    return {"mean": list(points.mean), "low": list(points.low), "high": list(points.high)}


def _build_evaluation_axes(view: RunView, limit: int) -> Record:
    name = next(iter(view.metrics), None)
    return {axis: list(view.metric_curve(name, axis, limit).x) for axis in view.axes} if name else {}


def _build_breakdown(view: RunView, prediction: PredictionReport | None) -> Record | None:
    try:
        measured = prediction.measured if prediction is not None else view.break_down()
    except RunError:  # no step was profiled
        return None
    report = prediction or PredictionReport(measured, None)
    return _clean(
        {
            "time_s": _list_rows([*report.time, report.step]),
            "memory_bytes": _list_rows([*report.memory, report.peak]),
            "predicted_for": report.cluster if report.cost is not None else None,
            "not_predicted": report.unpredicted or None,
            "notes": list(report.notes),
            **_list_facts(measured),
        }
    )


def _list_rows(rows: Sequence[ComparisonRow]) -> Record:
    return {row.name: {"measured": row.measured, "predicted": row.predicted} for row in rows}


def _list_facts(measured: RunBreakdown) -> Record:
    return {
        "steps": measured.steps,
        "profiles": measured.profiles,
        "profiling_share": measured.profiling_share,
        "memory_rank": measured.peak_rank,
        "slow_rank": measured.straggler,
        "slow_rank_busy_s": measured.straggler_busy_s if measured.straggler is not None else None,
        "mean_rank_busy_s": measured.mean_busy_s if measured.straggler is not None else None,
    }


def _build_findings(findings: Findings) -> Record:
    tree = to_json(findings)
    for entry, finding in zip(tree["findings"], findings.findings, strict=True):
        entry["text"] = format_finding(finding).removeprefix("- ")
    found: Record = _clean(tree)
    return found


def _build_machine(view: RunView) -> list[Record]:
    nodes = [node for node in view.machine.nodes.values() if len(node.times)]
    begin = view.log.first_start.time if view.log.first_start is not None else None
    left, records = MAX_MACHINE_COLUMNS, []
    for node in nodes:
        columns = dict(list(node.columns.items())[:left])
        left -= len(columns)
        records.append(_build_node(node, columns, begin if begin is not None else node.times[0]))
    return records


def _build_node(node: NodeSamples, columns: Mapping[str, BucketColumn], begin: float) -> Record:
    size = max(1, -(-len(node.times) // MAX_MACHINE_POINTS))
    groups = [(at, min(at + size, len(node.times))) for at in range(0, len(node.times), size)]
    return _clean(
        {
            "node": node.node,
            "time_s": [node.times[end - 1] - begin for _, end in groups],
            "columns": {name: _group(column, groups, node.units[name]) for name, column in columns.items()},
            "totals": node.totals,
            "hardware": node.comments,
            "absent": node.absent,
        }
    )


def _group(column: BucketColumn, groups: Sequence[tuple[int, int]], unit: str) -> Record:
    found = [column.group(begin, end) for begin, end in groups]
    return {
        "unit": unit,
        "mean": [total / count if count else None for _, _, _, total, count in found],
        "low": [low if count else None for low, _, _, _, count in found],
        "high": [high if count else None for _, high, _, _, count in found],
    }


def _list_events(view: RunView) -> list[Record]:
    log = view.log
    events: list[Any] = [*log.starts, *log.saves, *log.failures, *log.stalls, *log.notes]
    events += [view.summary.ended] if view.summary.ended is not None else []
    events.sort(key=lambda event: event.time)
    return [
        {
            "time": event.time,
            "event": type(event).__name__.lower(),
            "step": event.step,
            "text": _shorten(format_event(event)),
        }
        for event in events[-MAX_EVENTS:]
    ]


def read_request_text(view: RunView) -> str:
    """Return the text of spec.toml, or its beginning."""
    try:
        with open_regular(view.run.spec) as file:
            text = file.read(MAX_REQUEST_BYTES + 1).decode("utf-8", "replace")
    except OSError as error:
        return f"cannot be read: {reason(error)}"
    clean = without_controls(text)
    return clean if len(clean) <= MAX_REQUEST_BYTES else clean[:MAX_REQUEST_BYTES] + "…"


def find_differences(records: Sequence[Record]) -> Record:
    """Return the keys of the requests that differ, each with its value in every run (None: not set)."""
    requests = [record["request"] for record in records]
    keys = dict.fromkeys(key for request in requests for key in request)
    values = {key: [request.get(key) for request in requests] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}
