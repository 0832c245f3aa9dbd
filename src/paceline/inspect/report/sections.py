"""The sections of a report that are text, tables and bars, as HTML in which every value is escaped."""

import datetime
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from paceline.inspect.report.figures import list_bar_figures
from paceline.inspect.report.run_record import Record
from paceline.inspect.report.svg import draw_bars
from paceline.units import format_bytes, format_count, format_seconds, several

MAX_ROWS = 200
MAX_NOTES = 50


def build_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table. Numbers are aligned to the right."""
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = []
    for row in rows[:MAX_ROWS]:
        first, *others = row
        begin = f'<th scope="row">{escape(str(first))}</th>'
        lines.append(f"<tr>{begin}{''.join(f'<td>{escape(_format(value))}</td>' for value in others)}</tr>")
    if len(rows) > MAX_ROWS:
        lines.append(f'<tr><td colspan="{len(head)}">and {len(rows) - MAX_ROWS:,} more</td></tr>')
    return (
        f'<div class="scroll"><table><thead><tr>{cells}</tr></thead>\n<tbody>{"".join(lines)}</tbody>'
        "</table></div>\n"
    )


def _format(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def build_notes(records: Sequence[Record]) -> str:
    """Return the visible notes about data that is absent, damaged or cannot be drawn."""
    notes = [
        (f"{record['label']}: " if len(records) > 1 else "") + problem
        for record in records
        for problem in record["problems"]
    ]
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes[:MAX_NOTES])
    more = f"<li>and {len(notes) - MAX_NOTES:,} more</li>" if len(notes) > MAX_NOTES else ""
    return f'<div class="notes" role="note"><ul>{items}{more}</ul></div>'


def build_summary(records: Sequence[Record], differences: Record) -> str:
    columns = [dict(_summarize(record)) for record in records]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name) for column in columns)] for name in names]
    text = build_table(["", *(record["label"] for record in records)], rows)
    notes = list(dict.fromkeys(note for record in records for note in record["summary"]["notes"]))
    if notes:
        text += "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes[:MAX_NOTES]) + "</ul>"
    if differences:
        head = ["key", *(record["label"] for record in records)]
        text += "<h3>Different settings</h3>\n" + build_table(
            head, [[key, *values] for key, values in differences.items()]
        )
    elif len(records) > 1:
        text += "<p>The requests of these runs have the same settings.</p>"
    return text


def _summarize(record: Record) -> list[tuple[str, str]]:
    facts = record["summary"]
    rows: list[tuple[str, str | None]] = [
        ("state", record["state"]),
        ("task", facts["task"]),
        ("plan", f"{facts['plan']} on {several(facts['ranks'], 'rank')}" if facts["plan"] else None),
        ("device", _join(facts["device"], facts["precision"])),
        ("parameters", format_count(facts["parameters"]) if facts["parameters"] is not None else None),
        ("steps", _of(facts["steps"], facts["of_steps"])),
        ("batch", _with("samples", facts["batch"])),
        ("samples", _with("seen", facts["samples_done"]) if facts["samples_done"] else None),
        ("loss", _arrow(facts["first_loss"], facts["last_loss"])),
        *((f"loss {name}", f"{value:.5g}") for name, value in list(facts["losses"].items())[:16]),
        *(
            (f"evaluation: {name}", f"{value:.5g}" if math.isfinite(value) else "not finite")
            for name, value in list(facts["metrics"].items())[:64]
        ),
        ("throughput", f"{facts['samples_per_s']:,.4g} samples/s" if facts["samples_per_s"] else None),
        ("step time", _median(facts)),
        ("time", _shares(facts["total_s"], facts["shares"])),
        ("wall time", _wall(facts["wall_s"])),
        ("energy", f"{facts['energy_J'] / 3.6e6:.4g} kWh" if facts["energy_J"] is not None else None),
        ("starts", f"{facts['starts']:,}" if facts["starts"] > 1 else None),
        ("last checkpoint", _checkpoint(facts["checkpoint"])),
    ]
    return [(name, value) for name, value in rows if value]


def _join(*parts: str | None) -> str | None:
    return ", ".join(part for part in parts if part) or None


def _with(noun: str, value: float | None) -> str | None:
    return f"{value:,} {noun}" if value is not None else None


def _of(done: int, total: int | None) -> str:
    return f"{done:,} of {total:,}" if total is not None and total != done else f"{done:,}"


def _arrow(first: float | None, last: float | None) -> str | None:
    return f"{first:.5g} → {last:.5g}" if first is not None and last is not None else None


def _median(facts: Record) -> str | None:
    if not facts["step_s"]:
        return None
    of = f" of {facts['sampled']:,} evenly spaced steps" if facts["sampled"] is not None else ""
    return f"{format_seconds(facts['step_s'])} (median{of})"


def _shares(total_s: float, shares: Record) -> str | None:
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"{format_seconds(total_s)}: {parts}" if parts else None


def _wall(wall_s: Record) -> str | None:
    total = sum(wall_s.values())
    parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in wall_s.items())
    return f"{format_seconds(total)}: {parts}" if total else None


def _checkpoint(saved: Record | None) -> str | None:
    if saved is None:
        return None
    blocked = f"training was blocked for {format_seconds(saved['blocked_s'])}"
    return f"step {saved['step']:,}, {format_bytes(saved['bytes'])}, {blocked}"


def build_findings(records: Sequence[Record]) -> str:
    """Return what doctor found in each run; empty if findings were not looked for."""
    parts = []
    for record in records:
        found = record["findings"]
        if found is None:
            continue
        parts.append(f"<h3>{escape(record['label'])}</h3>" if len(records) > 1 else "")
        items = []
        for finding in found["findings"]:
            fix = f"<br><code>{escape(finding['fix'])}</code>" if finding["fix"] else ""
            items.append(f"<li>{escape(finding['text'])}{fix}</li>")
        parts.append(f"<ul>{''.join(items)}</ul>" if items else "<p>Nothing found.</p>")
        checked = f"checked: {', '.join(found['checked'])}" if found["checked"] else ""
        missing = [f"not checked: {what}: {why}" for what, why in found["not_checked"].items()]
        rest = "".join(f"<li>{escape(text)}</li>" for text in [checked, *missing, *found["notes"]] if text)
        parts.append(f"<details><summary>What was checked</summary><ul>{rest}</ul></details>")
    return "\n".join(parts)


def build_breakdown(records: Sequence[Record]) -> str:
    """Return bars of time and memory, measured and predicted."""
    figures = list_bar_figures(records)
    if not figures:
        return "<p>No step was profiled, so there is no breakdown: paceline train --profile measures it.</p>"
    notes = [
        note
        for record in records
        if record["breakdown"] is not None
        for note in _describe_breakdown(record, len(records) > 1)
    ]
    drawn = "".join(
        f"<figure><figcaption>{escape(figure.title)}</figcaption>{draw_bars(figure)}</figure>"
        for figure in figures
    )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="grid">{drawn}</div>\n<ul>{items}</ul>\n{_build_comparison(records)}'


def _describe_breakdown(record: Record, is_named: bool) -> list[str]:
    found, name = record["breakdown"], f"{record['label']}: " if is_named else ""
    profiles = several(found["profiles"], "profile")
    sentences = [
        f"{name}mean of {several(found['steps'], 'step')}, parts from {profiles}; memory is that of rank "
        f"{found['memory_rank']}"
    ]
    if found["slow_rank"] is not None:
        sentences.append(
            f"{name}rank {found['slow_rank']} is busy for {format_seconds(found['slow_rank_busy_s'])} of a "
            f"step, the mean rank for {format_seconds(found['mean_rank_busy_s'])}: the others wait for it"
        )
    if found["not_predicted"]:
        sentences.append(f"{name}not predicted: {found['not_predicted']}")
    return sentences + [f"{name}{note}" for note in found["notes"]]


def _build_comparison(records: Sequence[Record]) -> str:
    """Return a table of measured and predicted values for the runs that have a prediction."""
    rows = []
    for record in records:
        found = record["breakdown"]
        if found is None or found["predicted_for"] is None:
            continue
        for key, show in (("time_s", format_seconds), ("memory_bytes", format_bytes)):
            for part, values in found[key].items():
                measured, predicted = values["measured"], values["predicted"]
                off = (predicted - measured) / measured if predicted is not None and measured else None
                shown = show(predicted) if predicted is not None else None
                rows.append(
                    [
                        f"{record['label']}: {part}",
                        shown,
                        show(measured),
                        f"{off:+.0%}" if off is not None else None,
                    ]
                )
    return build_table(["part", "predicted", "measured", "error"], rows) if rows else ""


def build_machine_notes(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        for node in record["machine"]:
            where = f"{record['label']}: {node['node']}" if len(records) > 1 else node["node"]
            rows += [[where, f"{topic}: {text}"] for topic, text in node["hardware"].items()]
            rows += [[where, f"absent: {sensor}: {why}"] for sensor, why in node["absent"].items()]
    if not rows:
        return ""
    return f"<details><summary>Sensors</summary>{build_table(['node', 'sensor'], rows)}</details>"


def build_events(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        for event in record["events"]:
            when = datetime.datetime.fromtimestamp(event["time"], datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
            run = [record["label"]] if len(records) > 1 else []
            rows.append([when, *run, event["text"]])
    if not rows:
        return ""
    head = ["time (UTC)", *(["run"] if len(records) > 1 else []), "event"]
    table = build_table(head, rows[-MAX_ROWS:])
    return f"<details><summary>{several(len(rows), 'event')} besides steps</summary>{table}</details>"


def build_provenance(records: Sequence[Record], requests: Sequence[str]) -> str:
    keys = dict.fromkeys(key for record in records for key in record["provenance"])
    rows: list[list[Any]] = [["folder of the run", *(record["run"] for record in records)]]
    rows += [[key, *(record["provenance"].get(key) for record in records)] for key in keys]
    text = build_table(["", *(record["label"] for record in records)], rows)
    for record, request in zip(records, requests, strict=True):
        text += (
            f"<details><summary>spec.toml of {escape(record['label'])}</summary>"
            f"<pre>{escape(request)}</pre></details>\n"
        )
    return text
