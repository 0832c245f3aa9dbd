"""The report that a training writes at its end, which must never make the training fail."""

import json
import re
from pathlib import Path

import pytest

from command import succeed
from paceline import Spec, train
from paceline.inspect.conclude import conclude
from paceline.inspect.report import write
from run_lines import folder, started

pytestmark = pytest.mark.processes
TRAIN = ("train", "digits", "--steps", "12", "--run-dir", "run")


def read_data(path: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)[1])


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_training_writes_its_report(ranks, tmp_path):
    succeed(*TRAIN, "--ranks", ranks, at=tmp_path)
    data = read_data(tmp_path / "run/report.html")
    losses = [
        line["loss"]
        for line in map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
        if line["event"] == "step"
    ]
    assert data["axes"]["curves0"]["step"] == list(range(1, 13))
    assert data["figures"][0]["lines"][0]["mean"] == pytest.approx(losses, rel=1e-6)


def test_no_report_on_request_until_resume(tmp_path):
    succeed(*TRAIN, "--ranks", "1", "--no-report", at=tmp_path)
    report = tmp_path / "run/report.html"
    assert not report.exists()
    succeed("resume", "run", "--steps", "14", at=tmp_path)
    assert not report.exists(), "the request is kept"
    succeed("resume", "run", "--steps", "16", "--report", at=tmp_path)
    assert read_data(report)["axes"]["curves0"]["step"] == list(range(1, 17))


def test_a_report_that_cannot_be_written_is_a_note(tmp_path):
    run = folder(tmp_path / "run", [started(0, 1.7e9)])
    (run.path / "report.html").mkdir()
    assert f"no report: cannot write {run.path}/report.html: it is a folder" in "\n".join(conclude(run))


def test_a_mistake_in_the_report_is_a_note(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", [started(0, 1.7e9)])
    monkeypatch.setattr(write, "build_page", lambda *rest: 1 / 0)
    assert "no report: ZeroDivisionError: division by zero" in conclude(run)


def test_a_training_without_a_kept_folder_has_no_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sum(1 for _ in train(Spec(task="digits", steps=4), ranks=1))
    assert not list(tmp_path.rglob("report.html"))


def test_a_prediction_is_shown_beside_the_measured_values(tmp_path):
    succeed(*TRAIN[:3], "40", *TRAIN[4:], "--ranks", "1", "--profile", "--no-report", at=tmp_path)
    succeed("report", "run", "--predict", "--json", "r.json", at=tmp_path)
    [record] = json.loads((tmp_path / "r.json").read_text())["runs"]
    breakdown = record["breakdown"]
    assert breakdown["predicted_for"]
    assert breakdown["not_predicted"] is None
    assert breakdown["time_s"]["compute"]["predicted"] > 0
    assert breakdown["memory_bytes"]["peak"]["predicted"] > 0
    page = (tmp_path / "run/report.html").read_text()
    assert ">predicted</text>" in page
    assert ">measured</text>" in page
