"""The panels of a page: what it shows of a run, as values for JSON."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.errors import Error, RunError
from paceline.events import Event, Profiled, Started
from paceline.plan.cost_model.compare import MEMORY_PARTS, TIME_PARTS, ComparisonRow, compare_parts
from paceline.plotting.colours import colour
from paceline.report.run_view import RunView
from paceline.report.text import format_event
from paceline.units import without_controls
from paceline.web.curves import MAX_CURVES, Selection, list_curves, round_to
from paceline.web.figures import build_figures
from paceline.web.machine import build_machine, build_map
from paceline.web.prediction import StoredPrediction, read_prediction
from paceline.web.preview import PREVIEW, build_preview
from paceline.web.runs import WatchedRun, describe_state, show_name, sign
from paceline.web.settings import build_differences, build_origin

MAX_MARKS = 300  # of each kind, on the curves
MAX_LOG_LINES = 400
MAX_TEXT = 2000  # characters of one line of the log
MAX_PROFILES = 500
# The colours of `plan --plot`. A part of a profile has that of its main part in a plan.
PART_COLOURS = {
    "compute": colour("products"),
    "communication": colour("data parallel"),
    "bubble": colour("pipeline bubble"),
    "input": colour("input"),
    "optimizer": colour("optimizer"),
    "save": colour("save"),
    "other": colour("engines"),
}
MEMORY_COLOURS = {name: colour(name) for name in MEMORY_PARTS}

Panels = dict[str, Any]
Tables = dict[str, dict[str, list[Any]]]


def build(run: WatchedRun, selection: Selection) -> tuple[Panels, Tables]:
    """Return the panels and tables of a run. The lock of the run must be held.

    A panel whose data cannot be read has the reason under "problem"; the others are not affected."""
    panels: Panels = {"gone": not run.folder.path.is_dir()}
    tables: Tables = {}
    if panels["gone"]:
        return panels, tables
    try:
        run.refresh()
        view = run.view
        has_curves = run.has_curves()
        panels["header"] = build_header(run)
        panels["curves"], of_curves = build_curves(run, selection) if has_curves else build_preview(view)
        tables |= of_curves
        panels["parts"], tables["parts"] = build_parts(run, panels["curves"]["axis"] if has_curves else None)
        tables["log"] = run.keep("log", (view.log, view.log.version), lambda: build_log(view))
        started = run.summary.started
        machine, map_ = run.keep(
            "machine",
            (run.samples, started, selection),
            lambda: (build_machine(view, selection.node), build_map(view, selection.map, started)),
        )
        panels["machine"], panels["map"] = machine[0], map_[0]
        tables |= machine[1] | map_[1]
        panels["findings"] = run.findings.panel
        panels["pipeline"] = run.pipeline.panel
        panels["figures"] = build_figures(run)
        panels["origin"] = build_origin(run)
        problems = view.problems if has_curves else [PREVIEW]
        panels["problems"] = [without_controls(text) for text in problems]
    except Error as error:
        panels["problems"] = [str(error)]
    run.was_built = True
    return panels, tables


def build_curves(run: WatchedRun, selection: Selection) -> tuple[Panels, Tables]:
    """Return which curves are shown, with the marks on them, and their tables."""
    view = run.view
    axis = selection.axis if selection.axis in view.axes else "step"
    names = list_curves(view)
    shown = [name for name in names if selection.filter.lower() in name.lower()][:MAX_CURVES]
    panel = {
        "axis": axis,
        "axes": view.axes,
        "names": shown,
        "count": len(names),
        "marks": build_marks(view, axis),
    }
    return panel, run.curves.build(view, axis, shown)


def build_comparison(run: WatchedRun, others: Sequence[WatchedRun], panels: Panels) -> tuple[Panels, Tables]:
    """Return the settings in which other runs differ from a run, and their curves of those that it shows.

    A curve of run N is the table "other:N:KEY". The locks of the other runs are taken in turn."""
    tables: Tables = {}
    shown = panels.get("curves", {})
    compared = []
    for at, other in enumerate(others):
        with other.lock:
            try:
                other.refresh()
                other.wait_for_curves()
                axis = shown.get("axis", "step")
                if axis in other.view.axes:
                    keys = [key for key in shown.get("names", ()) if key in list_curves(other.view)]
                    found = other.curves.build(other.view, axis, keys)
                    tables |= {
                        name.replace("curve:", f"other:{at}:", 1): table for name, table in found.items()
                    }
                compared.append(build_header(other))
            except Error as error:
                compared.append({"name": show_name(other.folder.path), "problem": str(error)})
    differences = build_differences([run, *others]) if others else []
    return {"comparison": {"runs": compared, "differences": differences}}, tables


def build_header(run: WatchedRun) -> dict[str, Any]:
    view = run.view
    summary, started = run.summary, run.summary.started
    state, sentence = describe_state(run.folder, summary)
    header: dict[str, Any] = {"name": show_name(run.folder.path), "state": state, "sentence": sentence}
    last = view.last_time
    header |= {"updated": last, "starts": summary.starts, "is_sampled": summary.sampled is not None}
    if started is None:
        return header
    left_s = None
    if state == "running" and summary.step_s is not None and math.isfinite(summary.step_s):
        left_s = max(0, started.steps - summary.steps) * summary.step_s
    prediction = _find_prediction(run)
    price = run.price_per_hour if run.price_per_hour is not None else prediction.price_per_hour
    cost = summary.device_s / 3600 * price if price is not None else None
    cost_to_end = left_s * started.ranks / 3600 * price if price is not None and left_s is not None else None
    return header | {
        "mfu": round_to(prediction.find_utilization(_finite(summary.step_s)), 4),
        "cost": round_to(cost, 4),
        "cost_to_end": round_to(cost_to_end, 4),
        "task": started.task.rpartition("/")[2],
        "step": summary.steps,
        "steps": started.steps,
        "left_s": round_to(left_s, 3),
        "plan": started.plan,
        "ranks": started.ranks,
        "device": started.device,
        "precision": started.precision,
        "batch": started.batch,
        "parameters": started.parameters,
        "samples_per_s": round_to(_finite(summary.samples_per_s), 4),
        "step_s": round_to(_finite(summary.step_s), 4),
        "energy_J": round_to(view.machine.find_energy_J(math.inf), 4) if view.machine.has_energy else None,
        "metrics": {name: round_to(_finite(value), 5) for name, value in [*summary.metrics.items()][:8]},
    }


def build_marks(view: RunView, axis: str) -> list[dict[str, Any]]:
    """Return saves, failures, stalls and restarts as points on the axis."""
    values = view.values_of(axis)
    log, marks = view.log, []
    for kind, events in (("save", log.saves), ("failure", log.failures), ("stall", log.stalls)):
        for event in [*events][-MAX_MARKS:]:
            marks.append((kind, event.step, format_event(event)))
    for start in [*log.starts][-MAX_MARKS:]:
        if start is not log.first_start:
            marks.append(("restart", start.step, format_event(start)))
    placed = [(kind, step, view.interpolate(step, values), text) for kind, step, text in marks]
    return [
        {"kind": kind, "step": step, "x": round_to(x, 10), "text": text[:MAX_TEXT]}
        for kind, step, x, text in placed
        if math.isfinite(x)
    ]


def build_parts(run: WatchedRun, axis: str | None) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the parts of a step and of memory, measured and predicted, and the measured parts over time.

    axis: of the times; None: steps, while the curves are being read."""
    view = run.view
    profiles = [*view.log.profiles][-MAX_PROFILES:]
    x: list[Any] = [profile.step for profile in profiles]
    if axis is not None:
        values = view.values_of(axis)
        x = [round_to(view.interpolate(step, values), 10) for step in x]
    table: dict[str, list[Any]] = {"x": x}
    for part in TIME_PARTS:
        table[part] = [round_to(_finite(profile.seconds.get(part)), 4) for profile in profiles]
    panel: dict[str, Any] = {"colours": PART_COLOURS, "memory_colours": MEMORY_COLOURS}
    try:
        measured = run.keep("parts", _sign_steps(run), view.break_down)
    except RunError as error:
        return panel | {"problem": str(error)}, table
    prediction = _find_prediction(run)
    time = compare_parts(TIME_PARTS, _known(measured.seconds, TIME_PARTS), None)
    memory = compare_parts(MEMORY_PARTS, _known(measured.memory, MEMORY_PARTS), None)
    return panel | {
        "step_s": round_to(measured.step_s, 4),
        "time": _rows(time, prediction.time_s),
        "memory": _rows(memory, prediction.memory_bytes),
        "peak_rank": measured.peak_rank,
        "straggler": measured.straggler,
        "straggler_busy_s": round_to(measured.straggler_busy_s, 4),
        "mean_busy_s": round_to(measured.mean_busy_s, 4),
        "unpredicted": prediction.problem,
    }, table


def _sign_steps(run: WatchedRun) -> object:
    """Return a value that differs if a mean over all steps may differ by more than the step is noisy.

    While a run trains, the mean is computed again after each hundredth of its steps."""
    log, count = run.view.log, len(run.view.steps)
    is_running = run.summary.ended is None and run.folder.is_locked()
    return log, log.version, round(100 * math.log1p(count)) if is_running else count


def _find_prediction(run: WatchedRun) -> StoredPrediction:
    """Return the prediction of a run, which is read if its file changed."""
    started = run.summary.started
    return run.keep(
        "prediction", (sign(run.folder.profile), started), lambda: read_prediction(run.folder, started)
    )


def build_log(view: RunView) -> dict[str, list[Any]]:
    """Return the last events besides steps and evaluations, in their order."""
    log = view.log
    events: list[Event] = [*log.starts, *log.saves, *log.failures, *log.stalls, *log.notes, *log.profiles]
    events = sorted(events, key=lambda event: event.time)[-MAX_LOG_LINES:]
    return {
        "time": [round(event.time, 1) for event in events],
        "kind": [type(event).__name__.lower() for event in events],
        "text": [_describe(event)[:MAX_TEXT] for event in events],
    }


def _describe(event: Event) -> str:
    if isinstance(event, Started):
        return f"started: {format_event(event)}"
    if isinstance(event, Profiled) and not event.step_s > 0:
        return f"step {event.step}  profiled"
    return format_event(event)


def _known(values: Any, table: Iterable[str]) -> dict[str, float]:
    """Return the finite values of known parts; another program may have written the events."""
    return {name: values[name] for name in table if name in values and math.isfinite(values[name])}


def _rows(rows: list[ComparisonRow], predicted: dict[str, tuple[float, float]]) -> list[list[Any]]:
    """Return name, measured, predicted and spread of each part that was measured or predicted."""
    measured = {row.name: row.measured for row in rows}
    names = [*measured, *(name for name in predicted if name not in measured)]
    return [
        [
            name,
            round_to(measured.get(name, 0.0), 4),
            *(round_to(value, 4) for value in predicted.get(name, (None, None))),
        ]
        for name in names
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
