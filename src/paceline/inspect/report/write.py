"""Write the report of runs: the page, its figures as SVG files, and its values as JSON."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import RunError
from paceline.events import nan_to_null
from paceline.files import reason, write_whole
from paceline.inspect.find import find
from paceline.inspect.finding import Findings
from paceline.inspect.read_facts import read_facts
from paceline.inspect.report.figures import list_bar_figures, list_curve_figures, list_machine_figures
from paceline.inspect.report.html_head import read_asset
from paceline.inspect.report.images import read_images
from paceline.inspect.report.page import build_page
from paceline.inspect.report.run_record import Record, build_record, find_differences, read_request_text
from paceline.inspect.report.svg import draw_bars, draw_lines
from paceline.report.profile import PredictionReport
from paceline.report.run_view import RunView, view
from paceline.run import RunFolder, open_run
from paceline.version import __version__

MAX_RUNS = 64
MAX_BYTES = 1_900_000  # of a page
MAX_POINTS = 1000  # of a curve
MAX_VALUES = 40_000  # points of all curves together
MIN_POINTS = 20
REPORT = "report.html"  # in the folder of a run


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs at these paths; a folder of runs stands for all of them. Raises RunError."""
    found: list[RunFolder] = []
    for path in paths:
        inner = [] if (path / "spec.toml").exists() else sorted(path.glob("*/spec.toml"))
        found += [open_run(spec.parent) for spec in inner] if inner else [open_run(path)]
    found = list({run.path.resolve(): run for run in found}.values())
    if len(found) > MAX_RUNS:
        raise RunError(f"a report shows at most {MAX_RUNS} runs, got {len(found)}; name fewer of them")
    return found


class Report:
    """The records of runs, from which all outputs are made."""

    def __init__(
        self,
        views: Sequence[RunView],
        predictions: Mapping[Path, PredictionReport] | None = None,
        findings: Sequence[Findings] | None = None,
    ):
        self._views, self._predictions = views, predictions or {}
        self._findings = findings or [find(read_facts(view.run)) for view in views]
        count = sum(len(view.curves.columns) + len(view.metrics) for view in views)
        self._limit = max(MIN_POINTS, min(MAX_POINTS, MAX_VALUES // max(1, count)))
        self.records = self._build(self._limit)
        self.differences = find_differences(self.records)

    def _build(self, limit: int) -> list[Record]:
        records = [
            build_record(view, limit, self._predictions.get(view.run.path), findings)
            for view, findings in zip(self._views, self._findings, strict=True)
        ]
        names = [record["name"] for record in records]
        for record in records:
            record["label"] = record["name"] if names.count(record["name"]) == 1 else record["run"]
        return records

    def to_html(self) -> str:
        """Return the page. If it were too large, its curves have fewer points."""
        written = time.strftime("written %Y-%m-%d %H:%M:%S UTC by Paceline ", time.gmtime()) + __version__
        requests = [read_request_text(view) for view in self._views]
        images = [read_images(view.run) for view in self._views]
        records, limit = self.records, self._limit
        while True:
            page = _encodable(build_page(records, self.differences, requests, images, written))
            if len(page) <= MAX_BYTES or limit <= MIN_POINTS:
                return page
            limit = max(MIN_POINTS, limit // 2)
            records = self._build(limit)

    def to_json(self) -> str:
        tree = {"paceline": __version__, "runs": self.records, "differences": self.differences}
        return json.dumps(nan_to_null(tree), indent=1, allow_nan=False) + "\n"

    def draw_figures(self) -> dict[str, str]:
        """Return each figure as SVG, by the name of its file."""
        figures = [*list_curve_figures(self.records), *list_machine_figures(self.records)]
        drawn = {figure.name: draw_lines(figure) for figure in figures}
        drawn |= {figure.name: draw_bars(figure) for figure in list_bar_figures(self.records)}
        style = f"<style>{read_asset('report.css')}</style>"
        named: dict[str, str] = {}
        for name, svg in drawn.items():
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:80] or "figure"
            number = next(at for at in range(1, len(drawn) + 1) if _number(stem, at) not in named)
            head, _, rest = svg.partition(">")
            named[_number(stem, number)] = _encodable(f"{head}>\n{style}{rest}\n")
        return named


def _encodable(text: str) -> str:
    """Return a text without halves of UTF-16 pairs, which a name in JSON may contain."""
    return text.encode("utf-8", "replace").decode()


def _number(stem: str, number: int) -> str:
    return f"{stem}-{number}.svg" if number > 1 else f"{stem}.svg"


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Write each figure as an SVG file, and return their paths. Raises RunError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create {folder}: {reason(error)}") from error
    paths = []
    for name, svg in report.draw_figures().items():
        write_whole(folder / name, svg)
        paths.append(folder / name)
    return paths


def write_closing_report(run: RunFolder, findings: Findings) -> None:
    """Write RUN/report.html with these findings, unless the request has report = false."""
    if run.is_temporary or not run.request()[1].report:
        return
    write_whole(run.path / REPORT, Report([view(run)], findings=[findings]).to_html())
