"""What the page shows of a run is what its files have, which are written here by json alone."""

import contextlib
import json
import random
import threading
from typing import Any

import pytest

from paceline.report import curves as report_curves
from paceline.report.run_view import CurveReader
from paceline.web import curves, runs
from paceline.web.curves import Selection
from paceline.web.panels import build
from paceline.web.preview import PREVIEW
from paceline.web.runs import RunList, WatchedRun
from run_lines import folder, make_history, started, step

PREDICTED = {
    "plan": "ddp",
    "ranks": 2,
    "batch": 8,
    "time_s": {
        "compute": {"predicted": 0.008, "spread": 0.001},
        "step": {"predicted": 0.01, "spread": 0.001},
    },
    "memory_bytes": {"weights": {"predicted": 900, "spread": 0.0}},
}


def build_lines(steps: int) -> list[dict[str, Any]]:
    draw = random.Random(3)
    lines = [started(0, 1.7e9)]
    lines += [
        step(at, 1.7e9 + at, draw) | {"loss": 1.0, "step_s": 0.01, "data_s": 0} for at in range(1, steps + 1)
    ]
    parts = {"compute": 0.006, "communication": 0.004, "unknown part": 1.0}
    profile = {
        "step": steps, "num_steps": 1, "step_s": 0.01, "seconds": parts, "input_s": 0.0, "slowest": 0,
        "slowest_s": 0.01, "busy_s": 0.01, "fullest": 0, "memory": {"weights": 1000}, "costs_s": 0.0,
    }  # fmt: skip
    return [*lines, {"time": 1.7e9 + steps, "event": "profiled", **profile}]


@pytest.fixture
def run(tmp_path):
    return folder(tmp_path / "run", build_lines(40))


def show(run, **selection: str) -> tuple[dict[str, Any], dict[str, Any]]:
    panels, tables = build(WatchedRun("x", run), Selection(**selection))
    json.dumps([panels, tables], allow_nan=False)
    return panels, tables


def test_header_and_curves_have_the_values_of_the_events(run):
    panels, tables = show(run)
    header = panels["header"]
    assert (header["name"], header["state"], header["step"], header["steps"]) == (
        "run",
        "interrupted",
        40,
        10**6,
    )
    assert header["updated"] == 1.7e9 + 40
    assert header["left_s"] is None  # nobody trains it
    assert tables["curve:step:loss"]["x"] == [*range(1, 41)]
    assert show(run, axis="samples")[1]["curve:step:loss"]["x"] == [*range(8, 328, 8)]
    assert show(run, filter="grad")[0]["curves"]["names"] == ["step:grad_norm"]


def test_mfu_and_cost_are_shown_where_they_are_known(run, tmp_path):
    """40 steps of 10 ms in 40 s, of a start that took 20 s: 2 ranks for 60 s."""

    def find(price: float | None = None, **profile: Any) -> tuple[Any, ...]:
        run.profile.write_text(json.dumps(PREDICTED | profile))
        header = build(WatchedRun("x", run, price), Selection())[0]["header"]
        return header["mfu"], header["cost"], header["cost_to_end"]

    lines = build_lines(40)
    lines[0]["start_s"] = {"import": 15.0, "build": 5.0}
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert find() == (None, None, None)
    assert find(flops=1e9) == find(peak_flops=1e12) == find(flops=0, peak_flops=1e12) == (None, None, None)
    assert find(flops=1e9, peak_flops=1e12) == (0.1, None, None)  # 1e9 / 0.01 s / 1e12
    assert find(price_per_device_hour=3.6) == (None, 0.12, None)  # 120 device seconds
    assert find(7.2, price_per_device_hour=3.6) == (None, 0.24, None)
    assert find(flops=1e9, peak_flops=1e12, plan="zero3") == (None, None, None)
    with contextlib.closing(run.lock()):
        to_end = 3.6 * 2 * 0.01 * (10**6 - 40) / 3600
        assert find(3.6)[2] == pytest.approx(to_end, rel=1e-3)


def test_cost_counts_the_ranks_of_each_start(run):
    """A second start with 4 ranks lasts 10 s."""
    again = started(40, 1.7e9 + 100) | {"ranks": 4, "start_s": {"import": 2.0}}
    draw = random.Random(4)
    with run.events.open("a") as file:
        for line in (again, step(41, 1.7e9 + 108, draw)):
            file.write(json.dumps(line) + "\n")
    header = build(WatchedRun("x", run, 3600.0), Selection())[0]["header"]
    assert header["cost"] == pytest.approx(2 * 40 + 4 * 10)


def test_prediction_is_shown_beside_the_measurement(run):
    rows = {row[0]: row[1:] for row in show(run)[0]["parts"]["time"]}
    assert rows["compute"][1:] == [None, None]
    run.profile.write_text(json.dumps(PREDICTED))
    parts = show(run)[0]["parts"]
    rows = {row[0]: row[1:] for row in parts["time"]}
    assert rows["compute"][1:] == [0.008, 0.001]
    assert rows["communication"][1:] == [None, None]
    assert "unknown part" not in rows
    assert [row[2:] for row in parts["memory"]] == [[900, 0.0]]
    assert parts["unpredicted"] == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[]", "is damaged"),
        ("[" * 100_000, "cannot read"),
        (json.dumps(PREDICTED | {"plan": "zero3"}), "belongs to another plan"),
        (json.dumps(PREDICTED | {"ranks": 4}), "belongs to another plan"),
        (json.dumps(PREDICTED | {"time_s": {"compute": {"predicted": "1"}}}), "has no prediction"),
        (json.dumps(PREDICTED | {"time_s": {"compute": {"predicted": -1}}}), "has no prediction"),
        (json.dumps(PREDICTED | {"time_s": 3}), "has no prediction"),
        (
            '{"plan": "ddp", "ranks": 2, "batch": 8, "time_s": {"compute": {"predicted": 1e999}}}',
            "has no prediction",
        ),
    ],
)
def test_damaged_or_foreign_prediction_is_not_shown(run, content, message):
    run.profile.write_text(content)
    parts = show(run)[0]["parts"]
    assert message in parts["unpredicted"]
    assert "paceline profile" in parts["unpredicted"]
    assert all(row[2:] == [None, None] for row in [*parts["time"], *parts["memory"]])


def test_marks_lie_on_the_axis(run):
    extra = [
        {"time": 1.7e9 + 41, "event": "saved", "step": 40, "path": "ckpt/step_40", "bytes": 1, "seconds": 1,
         "blocked_s": 0},
        {"time": 1.7e9 + 42, "event": "failed", "what": "run", "message": "gone", "step": 40},
        started(40, 1.7e9 + 100),
    ]  # fmt: skip
    with run.events.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in extra)
    marks = [(mark["kind"], mark["x"]) for mark in show(run, axis="samples")[0]["curves"]["marks"]]
    assert marks == [("save", 320.0), ("failure", 320.0), ("restart", 320.0)]
    assert show(run)[1]["log"]["kind"] == ["started", "profiled", "saved", "failed", "started"]


def test_many_metrics_are_bounded(run):
    """10,000 metrics: 24 curves are sent, and the filter finds others that are kept."""
    metrics = {f"metric {number}": 0.5 for number in range(10_000)}
    line = {"time": 1.7e9 + 50, "event": "evaluated", "step": 40, "metrics": metrics, "seconds": 0.1}
    with run.events.open("a") as file:
        file.write(json.dumps(line) + "\n")
    panels, tables = show(run)
    assert len([name for name in tables if name.startswith("curve:")]) == 24
    assert panels["curves"]["count"] == 64 + 6
    assert any("only the first 64 of 10,000 metrics are kept" in text for text in panels["problems"])
    assert show(run, filter="metric 63")[0]["curves"]["names"] == ["metric:metric 63"]
    assert len(json.dumps([panels, tables])) < 200_000


@pytest.mark.parametrize("axis", ["step", "samples", "time"])
def test_a_page_that_continues_shows_the_same(axis, tmp_path, monkeypatch):
    """As one that is opened: also after resumes, and when buckets and points were merged."""
    monkeypatch.setattr(report_curves, "MAX_BUCKETS", 64)
    monkeypatch.setattr(curves, "MAX_POINTS", 16)
    draw = random.Random(7)
    lines = make_history(draw, 150, 4)
    run = folder(tmp_path / "run", lines[:1])
    watched, at, seen = WatchedRun("x", run), 1, set()
    while at < len(lines):
        new = lines[at : (at := at + draw.randint(1, 20))]
        with run.events.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
        panels, tables = build(watched, Selection(axis=axis))
        fresh, expected = show(run, axis=axis)
        width = fresh["curves"]["count"] and watched.view.curves.width
        if width == 1:  # a view that continues has merged other steps than one that reads all at once
            assert tables == expected
            assert panels == fresh
        seen.add(width)
        whole = curves.CurveTables().build(watched.view, axis, panels["curves"]["names"])
        assert {name: tables[name] for name in whole} == whole
    assert len(seen) > 1, "buckets were merged"
    watched.view.curves.columns["loss"].low[0] = -1.0
    kept = watched.curves.build(watched.view, axis, ["step:loss"])["curve:step:loss"]["low"]
    assert kept[0] != -1.0, "points that cannot change are not computed again"


def test_list_follows_the_folder(tmp_path):
    runs = RunList(tmp_path / "runs")
    assert runs.rows() == []
    assert "No such file" in runs.problem
    (tmp_path / "runs").mkdir()
    made = folder(tmp_path / "runs/a", build_lines(5))
    runs._looked = -1e9
    [row] = runs.rows()
    assert (row["name"], row["step"], row["loss"]) == ("a", 5, 1.0)
    with made.events.open("a") as file:
        file.write(json.dumps(step(6, 1.7e9 + 6, random.Random(1)) | {"loss": 0.5}) + "\n")
    runs._looked = -1e9
    [again] = runs.rows()
    assert (again["id"], again["step"], again["loss"]) == (row["id"], 6, 0.5)


def test_long_run_shows_a_sample_of_its_steps_first(run, monkeypatch):
    """While the steps are read, the page has curves of evenly spaced steps; then those of all steps."""
    monkeypatch.setattr(runs, "MIN_PREVIEW_BYTES", 0)
    may_read = threading.Event()

    class SlowReader(CurveReader):
        def refresh(self) -> None:
            assert may_read.wait(60)
            super().refresh()

    monkeypatch.setattr(runs, "CurveReader", SlowReader)
    watched = WatchedRun("x", run)
    before = watched.sign()
    panels, tables = build(watched, Selection(axis="samples"))
    assert panels["problems"] == [PREVIEW]
    assert panels["header"]["step"] == 40
    assert panels["header"]["updated"] == 1.7e9 + 40
    assert panels["curves"]["names"] == ["step:loss", "step:samples_per_s", "step:step_s", "step:data_s"]
    assert tables["curve:step:loss"]["x"] == [*range(1, 41)]
    assert {*tables["curve:step:loss"]["mean"]} == {1.0}
    assert tables["parts"]["x"] == [40]
    json.dumps([panels, tables], allow_nan=False)
    watched.sign()
    build(watched, Selection())
    may_read.set()
    assert watched._reading is not None
    watched._reading.join()
    with run.events.open("a") as file:  # after the thread has read the others
        file.write(json.dumps(step(41, 1.7e9 + 41, random.Random(1))) + "\n")
    with watched.lock:
        watched.refresh()
        watched.wait_for_curves()
    assert watched.sign() != before
    panels, tables = build(watched, Selection(axis="samples"))
    assert PREVIEW not in panels["problems"]
    assert tables["curve:step:loss"]["x"] == [*range(8, 336, 8)]
    with run.events.open("a") as file:
        file.write(json.dumps(step(42, 1.7e9 + 42, random.Random(1))) + "\n")
    assert build(watched, Selection())[1]["curve:step:loss"]["x"][-1] == 42
