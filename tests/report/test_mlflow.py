"""Runs in MLflow: a store in SQLite, read by MLflow's own client, and servers that do not answer."""

import importlib.util
import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from command import checkpoint_weights, paceline, succeed, unequal_tensors, write_task
from pages import read_blocks

if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
    pytest.skip("mlflow-skinny, sqlalchemy and alembic are not installed", allow_module_level=True)

TRAIN = ("train", "my.py:Regression", "--batch", "8", "--set", "validation=16", "--steps", "12")
# In a process of its own: MLflow and SQLAlchemy emit warnings, which are errors here.
READ = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
found = []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        id = run.info.run_id
        history = {key: [(metric.step, metric.value) for metric in client.get_metric_history(id, key)]
                   for key in run.data.metrics}
        found.append({"experiment": experiment.name, "name": run.info.run_name, "status": run.info.status,
                      "params": run.data.params, "metrics": history,
                      "files": [file.path for file in client.list_artifacts(id)]})
json.dump(found, open(sys.argv[2], "w"))
"""


def read_store(uri: str, at: Path) -> list[dict]:
    subprocess.run([sys.executable, "-c", READ, uri, "found.json"], cwd=at, check=True, capture_output=True)
    return json.loads((at / "found.json").read_text())


def read_lines(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


@pytest.mark.processes
@pytest.mark.slow
def test_commands_of_the_page(tmp_path):
    """The commands of the page, with a database in place of the server that they name."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for line in read_blocks("docs/trackers.md")["commands"].splitlines():
        program, *words = line.replace("http://tracking.example.org:5000", uri).split()
        assert program == "paceline"
        succeed(*words, at=tmp_path)
    [run] = read_store(uri, tmp_path)
    assert (run["experiment"], run["status"]) == ("digits", "FINISHED")
    assert max(step for step, _ in run["metrics"]["validation/loss"]) == 40


@pytest.mark.processes
@pytest.mark.slow
def test_mlflow_reads_the_run_and_its_continuation(tmp_path):
    write_task(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    result = succeed(*TRAIN, "--ranks", "2", "--mlflow", uri, "--run-dir", "runs/a", at=tmp_path)
    assert "MLflow" not in result.all
    [run] = read_store(uri, tmp_path)
    assert (run["experiment"], run["name"], run["status"]) == ("my.py:Regression", "a", "FINISHED")
    assert run["params"]["set.validation"] == "16"
    assert run["params"]["plan"] == "ddp"
    assert {"spec.toml", "provenance.json", "report.html"} <= {*run["files"]}
    losses = {line["step"]: line["loss"] for line in read_lines(tmp_path / "runs/a", "step")}
    sent = dict(run["metrics"]["train/loss"])
    assert sent.items() <= losses.items()
    assert sent
    [evaluated] = [line for line in read_lines(tmp_path / "runs/a", "evaluated") if line["step"] == 12]
    assert dict(run["metrics"]["validation/loss"])[12] == evaluated["metrics"]["loss"]

    succeed("resume", "runs/a", "--steps", "16", at=tmp_path)
    [again] = read_store(uri, tmp_path)
    assert again["status"] == "FINISHED"
    assert {step for step, _ in again["metrics"]["validation/loss"]} > {
        step for step, _ in run["metrics"]["validation/loss"]
    }
    assert len(again["metrics"]["validation/loss"]) == len(dict(again["metrics"]["validation/loss"]))


@pytest.mark.processes
def test_server_that_never_answers_costs_one_note(tmp_path):
    write_task(tmp_path)
    succeed(*TRAIN, "--ranks", "1", "--run-dir", "plain", at=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        quick = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
        result = succeed(*TRAIN, "--ranks", "1", "--mlflow", uri, "--run-dir", "sent", at=tmp_path, **quick)
    assert result.all.count("MLflow") == 1, result.all
    assert f"note: MLflow at {uri} failed: " in result.out
    assert "Traceback" not in result.all
    both = [checkpoint_weights(tmp_path / name) for name in ("plain", "sent")]
    assert not unequal_tensors(*both)


def test_unsent_events_are_sent_later_and_none_twice(tmp_path):
    """A request that fails is repeated; the file with the position survives the process."""
    from paceline.report.mlflow_client import MlflowRun
    from run_lines import folder, started

    step = {"samples": 8, "loss": 0.5, "grad_norm": None, "lr": 0.1, "step_s": 0.1, "data_s": 0.0,
            "samples_per_s": 80.0, "event": "step"}  # fmt: skip
    lines = [started(0, 1.7e9), *({"time": 1.7e9 + at, "step": at} | step for at in range(1, 2001))]
    lines[5]["loss"] = math.nan
    run = folder(tmp_path / "a", lines)

    class Client:
        """Counts what arrives, and refuses the second request."""

        def __init__(self) -> None:
            self.calls, self.points = 0, []

        def log_batch(self, run_id, metrics):
            self.calls += 1
            if self.calls == 2:
                raise ConnectionError("gone")
            assert len(metrics) <= 1000
            self.points += [(metric.key, metric.step) for metric in metrics]

    sender, client = MlflowRun.__new__(MlflowRun), Client()
    sender.__init__(run, "http://127.0.0.1:1")
    sender._client, sender.id = client, "x"
    with pytest.raises(ConnectionError):
        sender.send_new()
    sender.send_new()
    assert [step for key, step in client.points if key == "train/loss"] == [*range(1, 2001)]
    after = MlflowRun(run, "http://127.0.0.1:1")
    after._client = other = Client()
    after.send_new()
    assert after.id == "x"
    assert other.points == []


@pytest.mark.parametrize(
    "uri",
    [
        "mlruns",
        "http://",
        "sqlite:///mlflow.db",
        "http://me:secret@host",
        "file://host/x",
        "http://a b",
        "x:y",
    ],
)
def test_bad_addresses_are_refused(tmp_path, uri):
    result = paceline("train", "digits", "--mlflow", uri, at=tmp_path)
    assert result.status == 2, result.all
    assert "mlflow" in result.err
    assert "secret" not in result.all
    assert "Traceback" not in result.all
    assert not (tmp_path / "runs").exists()


def test_missing_extra_is_named(tmp_path):
    code = "import sys; sys.modules['mlflow'] = None; from paceline.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "train", "--mlflow", "http://host:5000"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert 'pip install "paceline[mlflow]"' in result.stderr
