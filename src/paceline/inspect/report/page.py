"""The page of a report: one HTML file that needs no network. All names and texts are escaped."""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from paceline.inspect.report.figures import (
    AXIS_TITLES,
    Figure,
    list_curve_figures,
    list_machine_figures,
    list_zero_samples,
)
from paceline.inspect.report.html_head import build_head, read_asset
from paceline.inspect.report.images import RunImage, build_images
from paceline.inspect.report.run_record import Record
from paceline.inspect.report.sections import (
    build_breakdown,
    build_events,
    build_findings,
    build_machine_notes,
    build_notes,
    build_provenance,
    build_summary,
)
from paceline.inspect.report.svg import NUM_COLOURS, draw_lines


def build_page(
    records: Sequence[Record],
    differences: Record,
    requests: Sequence[str],
    images: Sequence[Sequence[RunImage]],
    written: str,
) -> str:
    """Return the HTML of a report.

    requests: the texts of the files spec.toml. images: of each run. written: when the report was written, as
    text."""
    drawn = build_images(records, images)
    style, script = read_asset("report.css"), read_asset("report.js")
    curves, machine = list_curve_figures(records), list_machine_figures(records)
    names = ", ".join(record["label"] for record in records)
    title = f"{names if len(names) < 80 else names[:79] + '…'} – Paceline"
    sections = {
        "summary": ("Summary", build_summary(records, differences)),
        "findings": ("Findings", build_findings(records)),
        "curves": ("Curves", _build_curves(records, curves)),
        "images": ("Images", drawn),
        "breakdown": ("Time and memory", build_breakdown(records)),
        "machine": ("Machine", _build_machine(records, machine, len(curves))),
        "events": ("Events", build_events(records)),
        "provenance": ("Provenance", build_provenance(records, requests)),
    }
    shown = {name: section for name, section in sections.items() if section[1]}
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, (heading, _) in shown.items())
    body = "\n".join(
        f'<section id="{name}"><h2>{heading}</h2>\n{content}</section>'
        for name, (heading, content) in shown.items()
    )
    head = build_head(title, style, script, has_images=bool(drawn))
    return f"""{head}
<body>
<header>
<h1>{escape(_describe(records))}</h1>
<p class="dim">{escape(written)}</p>
{build_notes(records)}
<nav>{links}</nav>
</header>
<main>
{body}
</main>
<script type="application/json" id="data">{_embed(_build_data([*curves, *machine], records))}</script>
<script>{script}</script>
</body>
</html>
"""


def _describe(records: Sequence[Record]) -> str:
    if len(records) == 1:
        return f"{records[0]['label']}: {records[0]['state']}"
    return f"Comparison of {len(records)} runs"


def _embed(tree: Any) -> str:
    """Return JSON that cannot end the element which contains it."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _round(values: Iterable[float | None]) -> list[float | int | None]:
    """Return values with 7 digits, of which more cannot be seen; None for what is not finite."""
    return [
        None
        if value is None or not math.isfinite(value)
        else value
        if isinstance(value, int)
        else _short(value)
        for value in values
    ]


def _short(value: float) -> float | int:
    if isinstance(value, int):
        return value
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _build_data(figures: Sequence[Figure], records: Sequence[Record]) -> Record:
    """Return what the script draws: the axes of each run, and the figures with their values."""
    axes: Record = {}
    for at, record in enumerate(records):
        for kind, key in (("curves", "axes"), ("metrics", "evaluation_axes")):
            axes[f"{kind}{at}"] = {axis: _round(values) for axis, values in record[key].items()}
    drawn = []
    for number, figure in enumerate(figures):
        lines = []
        for at, line in enumerate(figure.lines):
            name = f"{figure.kind}{line.colour}"
            if figure.kind == "machine":
                name = f"machine{number}.{at}"
                axes[name] = {"time": _round(line.x)}
            mean, low, high = _round(line.mean), _round(line.low), _round(line.high)
            values: Record = {"label": line.label, "colour": line.colour, "axes": name, "mean": mean}
            lines.append(values if low == high else values | {"low": low, "high": high})
        drawn.append({"title": figure.title, "kind": figure.kind, "unit": figure.unit, "lines": lines})
    return {"axes": axes, "figures": drawn}


def _build_figures(figures: Sequence[Figure], first: int) -> str:
    return "\n".join(
        f'<figure id="figure-{at}"><figcaption>{escape(figure.title)}'
        f' <span class="unit">{escape(figure.unit)}</span></figcaption>\n'
        f'<div class="plot">{draw_lines(figure)}</div></figure>'
        for at, figure in enumerate(figures, first)
    )


def _build_curves(records: Sequence[Record], figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    axes = [axis for axis in AXIS_TITLES if any(axis in record["axes"] for record in records)]
    options = "".join(f'<option value="{axis}">{AXIS_TITLES[axis][0]}</option>' for axis in axes)
    runs = "".join(
        f'<label><input type="checkbox" checked data-run="{at}">'
        f'<svg width="10" height="10"><rect class="f{at % NUM_COLOURS}" width="10" height="10"/></svg>'
        f"{escape(record['label'])}</label>"
        for at, record in enumerate(records)
    )
    return f"""<form id="controls" class="controls" hidden>
<label>x axis <select id="axis" autocomplete="off">{options}</select></label>
<label><input type="checkbox" id="log-y" autocomplete="off"> log y</label>
<label><input type="checkbox" id="log-x" autocomplete="off"> log x</label>
<label>smoothing <input type="range" id="smooth" min="0" max="99" value="0" autocomplete="off"></label>
<button type="button" id="reset" disabled>reset zoom</button>
{runs if len(records) > 1 else ""}</form>
<p class="dim">A band shows the lowest and highest value of the steps of each point. Drag to zoom.</p>
<div class="grid">
{_build_figures(figures, 0)}
</div>
"""


def _build_machine(records: Sequence[Record], figures: Sequence[Figure], first: int) -> str:
    zero = list_zero_samples(records)
    notes = f'<p class="dim">0 everywhere: {escape(", ".join(zero))}</p>' if zero else ""
    notes += build_machine_notes(records)
    if not figures:
        return notes
    parts = []
    for at, figure in enumerate(figures, first):
        legend = "".join(
            f'<span><svg width="10" height="10"><rect class="f{line.colour % NUM_COLOURS}" width="10" '
            f'height="10"/></svg>{escape(line.label)}</span>'
            for line in figure.lines[:16]
        )
        shown = f'<div class="legend">{legend}</div>' if len(figure.lines) > 1 else ""
        parts.append(_build_figures([figure], at).replace("</figure>", f"{shown}</figure>"))
    return '<div class="grid">\n' + "\n".join(parts) + f"\n</div>\n{notes}"
