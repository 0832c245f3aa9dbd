"""Reports show what the events of runs say, which are read here by json alone, also for damaged runs."""

import itertools
import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mounts import mount_tmpfs
from paceline import cli
from paceline.inspect.conclude import conclude
from paceline.inspect.report import write
from paceline.inspect.report.write import Report
from paceline.report import curves
from paceline.report.run_view import view
from paceline.run import RunFolder
from run_lines import folder, make_history, started, step

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def command(monkeypatch, capsys, *words: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["paceline", "report", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr()
    return left.value.code or 0, shown.out + shown.err


class Page(HTMLParser):
    """The text of a page, its elements, and the data of its script."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self._json = ""
        self.feed(html)
        self.close()
        self.data: dict[str, Any] = json.loads(self._json) if self._json else {}
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = [tag]

    def handle_data(self, data):
        if self._inside == ["script"] and self.elements[-1][1].get("id") == "data":
            self._json += data
        elif self._inside not in (["script"], ["style"]):
            self.words.append(data)


def build_lines(steps: int, **changes: object) -> list[dict[str, Any]]:
    draw = random.Random(2)
    fixed = {"loss": 1.5, "grad_norm": 1.0}
    lines = [started(0, 1.7e9)]
    lines += [step(n, 1.7e9 + n / 10, draw) | fixed | changes for n in range(1, steps + 1)]
    return lines


def read_last_lines(path: Path) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["event"] == "started":
            steps = {number: entry for number, entry in steps.items() if number <= line["step"]}
        elif line["event"] == "step":
            steps[line["step"]] = line
    return steps


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def check_page(page: Page, run: Path, number: int = 0) -> None:
    """Compare all curves of a run on a page with its events."""
    steps = read_last_lines(run / "events.jsonl")
    axes = page.data["axes"][f"curves{number}"]
    assert axes["step"][-1] == max(steps)
    assert axes["samples"] == [8 * number for number in axes["step"]]
    names = {"Loss": "loss", "Gradient norm": "grad_norm", "Learning rate": "lr", "Step time": "step_s"}
    names |= {"Waiting for data": "data_s", "Throughput": "samples_per_s"}
    drawn = {figure["title"]: figure for figure in page.data["figures"] if figure["kind"] == "curves"}
    assert names.keys() <= drawn.keys()
    for title, name in names.items():
        line = drawn[title]["lines"][number]
        for at, (before, last) in enumerate(itertools.pairwise([0, *axes["step"]])):
            values = [line[name] for key, line in steps.items() if before < key <= last]
            finite = [value for value in values if is_finite(value)]
            found = (line.get("low", line["mean"])[at], line.get("high", line["mean"])[at], line["mean"][at])
            if finite:
                mean = sum(finite) / len(finite)
                assert found == pytest.approx((min(finite), max(finite), mean), rel=1e-6)
            else:
                assert found == (None, None, None)


@pytest.mark.parametrize(("seed", "max_points"), [(1, 1000), (2, 40), (3, 7)])
def test_the_page_has_the_values_of_the_events(seed, max_points, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "MAX_POINTS", max_points)
    monkeypatch.setattr(write, "MIN_POINTS", 1)
    monkeypatch.setattr(curves, "MAX_BUCKETS", 128)
    runs = [folder(tmp_path / name, make_history(random.Random(seed), 300, 3)) for name in ("a", "b")]
    page = Page(Report([view(run) for run in runs]).to_html())
    for number, run in enumerate(runs):
        check_page(page, run.path, number)
    changed = json.loads(json.dumps(page.data))
    changed["figures"][0]["lines"][0]["mean"][3] = 77.0
    page.data = changed
    with pytest.raises(AssertionError):
        check_page(page, runs[0].path)


def read_scale(texts: list[tuple[float, str]]) -> tuple[float, float]:
    """Return the value at 0 and the value of one unit of an axis, from the positions of its labels."""
    (begin, first), *_, (end, last) = texts
    unit = (float(last) - float(first)) / (end - begin)
    return float(first) - begin * unit, unit


def read_points(svg: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the points of the only line of a figure in the units of its labels."""
    labels = [(label.attrib, label.text or "") for label in svg.iter(f"{SVG}text")]
    x = [(float(at["x"]), text) for at, text in labels if at["text-anchor"] == "middle" and text.isdigit()]
    y = [(float(at["y"]) - 4, text) for at, text in labels if at["text-anchor"] == "end"]
    (x0, x1), (y0, y1) = read_scale(x), read_scale(y)
    [line] = svg.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    return [(x0 + x1 * across, y0 + y1 * down) for across, down in points]


def test_svg_figures_are_drawn_to_scale(tmp_path, monkeypatch, capsys):
    draw = random.Random(1)
    lines = build_lines(80)
    for line in lines[1:]:
        line["loss"] = draw.uniform(-3, 3)
    run = folder(tmp_path / "r", lines)
    status, text = command(
        monkeypatch, capsys, run.path, "-o", tmp_path / "r.html", "--figures", tmp_path / "f"
    )
    assert (status, "6 figures in" in text) == (0, True), text
    svg = ElementTree.parse(tmp_path / "f" / "curves-loss.svg").getroot()
    for (x, y), line in zip(read_points(svg), lines[1:], strict=True):
        assert (x, y) == pytest.approx((line["step"], line["loss"]), abs=0.05)
    assert "--c0" in (tmp_path / "f" / "curves-loss.svg").read_text(), "it has its colours"


def test_the_json_has_every_value(tmp_path, monkeypatch, capsys):
    lines = build_lines(50)
    lines.append(
        {"time": 1.7e9 + 9, "event": "evaluated", "step": 50, "metrics": {"f1": 0.25}, "seconds": 0.1}
    )
    run = folder(tmp_path / "r", lines)
    output = tmp_path / "r.json"
    assert command(monkeypatch, capsys, run.path, "-o", tmp_path / "r.html", "--json", output)[0] == 0
    [record] = json.loads(output.read_text())["runs"]
    assert record["axes"]["step"] == list(range(1, 51))
    assert record["curves"]["lr"]["mean"] == [line["lr"] for line in lines[1:51]]
    assert record["metrics"]["f1"]["mean"] == [0.25]
    assert record["summary"]["last_loss"] == 1.5


def test_without_o_the_report_is_in_the_folder_of_the_run(tmp_path, monkeypatch, capsys):
    run = folder(tmp_path / "r", build_lines(5))
    status, text = command(monkeypatch, capsys, run.path)
    assert (status, text.startswith(f"{run.path}/report.html: ")) == (0, True)
    check_page(Page((run.path / "report.html").read_text()), run.path)


def test_a_folder_stands_for_its_runs_and_settings_are_compared(tmp_path, monkeypatch, capsys):
    for name, seed in (("a", 1), ("b", 2)):
        run = folder(tmp_path / name, make_history(random.Random(seed), 60, 1))
        spec, launch = run.request()
        run.write_request(spec.model_copy(update={"seed": seed}), launch)
    status, text = command(monkeypatch, capsys, tmp_path)
    assert (status, text) == (2, "paceline: a report of 2 runs requires a file; add -o report.html\n")
    status, text = command(monkeypatch, capsys, tmp_path, tmp_path / "b", "-o", tmp_path / "ab.html")
    page = Page((tmp_path / "ab.html").read_text())
    assert status == 0
    assert "Comparison of 2 runs" in page.text
    assert "Different settings key a b seed 1 2" in page.text
    for number, name in enumerate(("a", "b")):
        check_page(page, tmp_path / name, number)


# Damaged and unusual runs: one sentence, or a note on the page


def build(run: Any) -> Page:
    return Page(Report([view(run)]).to_html())


def test_a_run_without_events_has_a_report_that_says_so(tmp_path):
    for lines in ([], [started(0, 1.7e9)]):
        page = build(folder(tmp_path / f"r{len(lines)}", lines))
        assert "the run has no steps yet, so that there are no curves" in page.text


def test_damage_is_noted(tmp_path):
    run = folder(tmp_path / "r", build_lines(20))
    with open(run.events, "a") as file:
        file.write('{"time": 1.0, "event": "paused"}\n\0\n{"time": 1.7e9, "event": "st')
    run.spec.write_text("[save\n")
    run.provenance.write_text(json.dumps({"packages": {"paceline": "99.0"}, "host": "\ud800"}))
    page = build(run)
    assert "skipped 1 damaged line and 1 event of an unknown kind (paused) in events.jsonl" in page.text
    assert "the request is not shown: " in page.text
    assert "Paceline 99.0 made this run" in page.text
    check_page(page, folder(tmp_path / "whole", build_lines(20)).path)


def test_values_that_are_not_finite_are_gaps_with_a_note(tmp_path):
    lines = build_lines(30)
    lines[7]["loss"], lines[9]["loss"], lines[20]["loss"] = float("nan"), float("inf"), -1.7e308
    lines[21]["loss"] = 1.7e308
    lines[11]["grad_norm"] = None
    run = folder(tmp_path / "r", lines)
    page = build(run)
    assert "loss is not finite in 2 steps, first at step 7" in page.text
    assert "grad_norm overflowed in 1 step, first at step 11" in page.text
    check_page(page, run.path)
    svg = next(iter(re.findall(r"<svg class=\"figure\".*?</svg>", Report([view(run)]).to_html(), re.S)))
    assert "nan" not in svg
    assert "inf" not in svg.replace("infinite", "")


def test_ten_thousand_metrics_are_bounded_and_noted(tmp_path):
    lines = build_lines(40)
    for number in (20, 40):
        metrics = {f"metric {k}": k + number for k in range(10_000)}
        lines.append(
            {"time": 1.7e9 + 5, "event": "evaluated", "step": number, "metrics": metrics, "seconds": 0.1}
        )
    html = Report([view(folder(tmp_path / "r", lines))]).to_html()
    assert len(html) < 1e6
    assert "only the first 64 of 10,000 metrics are kept" in Page(html).text


def test_a_page_that_is_too_large_has_fewer_points(tmp_path, monkeypatch):
    run = folder(tmp_path / "r", make_history(random.Random(1), 3000, 1))
    whole = Report([view(run)])
    monkeypatch.setattr(write, "MAX_BYTES", 120_000)
    assert len(whole.to_html()) <= 120_000
    monkeypatch.setattr(curves, "MAX_BUCKETS", 4096)
    check_page(Page(whole.to_html()), run.path)


def test_samples_that_are_zero_are_named_except_those_of_gpus(tmp_path):
    run = folder(tmp_path / "r", build_lines(9))
    run.monitor.mkdir()
    head = "time [s],swap used [MiB],disk read [MB/s],gpu0 utilization [%]"
    rows = [f"{1.7e9 + k:.0f},0,{k % 2},0" for k in range(9)]
    (run.monitor / "n.csv").write_text("\n".join(["# paceline samples 1", "# node: n", head, *rows]) + "\n")
    page = build(run)
    titles = [figure["title"] for figure in page.data["figures"] if figure["kind"] == "machine"]
    assert titles == ["Disk read", "GPU utilization"]
    assert "0 everywhere: swap used" in page.text


def test_too_many_runs_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write, "MAX_RUNS", 2)
    for name in "abc":
        folder(tmp_path / name, build_lines(3))
    status, text = command(monkeypatch, capsys, tmp_path, "-o", tmp_path / "r.html")
    assert (status, text) == (2, "paceline: a report shows at most 2 runs, got 3; name fewer of them\n")


BAD = {
    "no such folder": (["nowhere"], "no such run: nowhere"),
    "no run": (["empty"], "empty is not a run folder: it has no spec.toml"),
    "output is a folder": (["r", "-o", "empty"], "cannot write empty: it is a folder"),
    "output is a link": (["r", "-o", "link"], "cannot write link: it is a link"),
    "no folder for the output": (["r", "-o", "no/r.html"], "cannot write no/r.html: no such folder: no"),
    "figures is a file": (["r", "--figures", "file"], "cannot create file: File exists"),
    "json is a link": (["r", "--json", "link"], "cannot write link: it is a link"),
    "cluster without predict": (["r", "--cluster", "c.json"], "--cluster is for a prediction; add --predict"),
}


@pytest.mark.parametrize(("words", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder(Path("r"), build_lines(5))
    Path("empty").mkdir()
    Path("file").write_text("mine")
    Path("link").symlink_to("file")
    status, text = command(monkeypatch, capsys, *words)
    assert (status, text.count("\n")) == (2, 1), text
    assert text.startswith(f"paceline: {sentence}")
    assert Path("file").read_text() == "mine"


def test_a_full_disk_is_one_sentence_and_a_note(tmp_path, monkeypatch, capsys):
    run = folder(tmp_path / "r", build_lines(500))
    disk = tmp_path / "disk"
    disk.mkdir()
    with mount_tmpfs(disk, "size=64k"):
        status, text = command(monkeypatch, capsys, run.path, "-o", disk / "r.html")
        assert (status, text) == (2, f"paceline: cannot write {disk}/r.html: No space left on device\n")
        assert list(disk.iterdir()) == []
        status, text = command(monkeypatch, capsys, run.path, "--figures", disk / "f")
        assert (status, text.count("\n"), "No space left on device" in text) == (2, 1, True), text
        (disk / "f").rename(disk / "r")
        for name in ("events.jsonl", "spec.toml"):
            (disk / "r" / name).symlink_to(run.path / name)
        assert "No space left on device" in "\n".join(conclude(RunFolder(disk / "r")))


# Long runs

PEAK = """
import re
from pathlib import Path
from paceline.cli import main
try:
    main()
finally:
    print("peak", 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_report_of_a_million_steps_is_small_and_exact(tmp_path):
    draw = random.Random(1)
    run = folder(tmp_path / "r", [started(0, 1.7e9)])
    losses = [draw.random() + 100 / n for n in range(1, 10**6 + 1)]
    losses[654_320] = 1e4  # a spike of one step
    rest = '"grad_norm": 0.5, "lr": 0.1, "step_s": 0.05, "data_s": 0.01, "samples_per_s": 160.0'
    with open(run.events, "a") as file:
        for n, loss in enumerate(losses, 1):
            at = 1.7e9 + n / 20
            head = f'{{"time": {at}, "event": "step", "step": {n}, "samples": {8 * n}, "loss": {loss!r}'
            file.write(f"{head}, {rest}}}\n")
    output = tmp_path / "r.html"
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "report", str(run.path), "-o", str(output)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("peak ")[1]) < 300e6
    assert output.stat().st_size < 2e6
    page = Page(output.read_text())
    x = page.data["axes"]["curves0"]["step"]
    assert x[-1] == 10**6
    line = page.data["figures"][0]["lines"][0]
    for (before, last), low, high, mean in zip(
        itertools.pairwise([0, *x]), line["low"], line["high"], line["mean"], strict=True
    ):
        values = losses[before:last]
        expected = (min(values), max(values), sum(values) / len(values))
        assert (low, high, mean) == pytest.approx(expected, rel=1e-6)
    assert max(line["high"]) == 1e4
