"""The report that a training writes at its end, which must never make the training fail."""

import json
import os
import re
import signal
import textwrap
from pathlib import Path

import pytest

from command import TORCHRUN, paceline, set_sample_delay, start, succeed, write_task
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


@pytest.mark.parametrize(
    "program",
    [pytest.param(None, id="local"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow)],
)
def test_a_training_that_fails_writes_its_report(program, tmp_path):
    """The first update makes the loss infinite, on both ranks; the report has the steps before."""
    ranks = ("--ranks", "2") if program is None else ()
    words = (*TRAIN, "--lr", "1e30", *ranks)
    result = paceline(*words, at=tmp_path, program=program, OMP_NUM_THREADS="1")
    assert result.status != 0
    assert "the loss is " in result.err, result.all
    assert "finding: the loss was not finite after step " in result.all
    data = read_data(tmp_path / "run/report.html")
    steps = sum('"step_s"' in line for line in (tmp_path / "run/events.jsonl").read_text().splitlines())
    assert data["axes"]["curves0"]["step"] == list(range(1, steps + 1))
    assert "not finite" in (tmp_path / "run/report.html").read_text()


def test_a_training_that_is_killed_writes_its_report(tmp_path):
    """The launcher writes it; the ranks are gone. A training that never started has none."""
    write_task(tmp_path)
    slow = str(set_sample_delay(tmp_path / "slow", 0.01))
    words = ("train", "my.py:Regression", "--batch", "16", "--steps", "500", "--ranks", "2")
    with start(*words, "--run-dir", "run", at=tmp_path, SLOW=slow) as running:
        running.wait_for_step(tmp_path / "run", 5)
        beats = [json.loads(path.read_text()) for path in (tmp_path / "run/ranks").glob("*.alive")]
        os.kill(beats[0]["pid"], signal.SIGKILL)
        result = running.wait()
    assert result.status == 2, result.all
    assert read_data(tmp_path / "run/report.html")["axes"]["curves0"]["step"][:5] == [1, 2, 3, 4, 5]
    result = paceline(*words, "--run-dir", "never", "--set", "schedule.warmup=100000 steps", at=tmp_path)
    assert result.status == 2
    assert "finding" not in result.all
    assert not (tmp_path / "never/report.html").exists()


@pytest.mark.slow
def test_a_training_that_hangs_writes_its_report(tmp_path):
    """Rank 1 is stopped; its peer fails after the timeout, and the launcher ends both."""
    write_task(tmp_path)
    slow = str(set_sample_delay(tmp_path / "slow", 0.01))
    words = ("train", "my.py:Regression", "--batch", "16", "--steps", "500", "--ranks", "2", "--timeout", "5")
    with start(*words, "--run-dir", "run", at=tmp_path, SLOW=slow) as running:
        running.wait_for_step(tmp_path / "run", 5)
        os.kill(json.loads((tmp_path / "run/ranks/1.alive").read_text())["pid"], signal.SIGSTOP)
        result = running.wait()
    assert result.status == 2, result.all
    assert "rank 1" in result.all
    assert read_data(tmp_path / "run/report.html")["axes"]["curves0"]["step"][:5] == [1, 2, 3, 4, 5]


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


def test_a_training_without_a_kept_folder_has_no_report(tmp_path):
    script = """
        from paceline import Spec, train

        print(*(type(event).__name__ for event in train(Spec(task="digits", steps=4), ranks=2)))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    assert succeed("python", "script.py", at=tmp_path).out.endswith("Ended\n")
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
