"""Other trackers read runs without a network, by the code of the page."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.report.tensorboard.scalar_writer import ScalarWriter
from pages import read_blocks
from run_lines import folder, started, step

# A Python in whose environment trackers are installed: they require other versions than Paceline may have.
PYTHON = os.environ.get("TRACKERS_PYTHON") or shutil.which("python") or sys.executable
pytestmark = pytest.mark.slow


def skip_without(package: str, *modules: str) -> None:
    code = f"import importlib.util as u; print(all(u.find_spec(name) for name in {modules}))"
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    if result.stdout.strip() != "True":
        pytest.skip(f"{modules[0]} is not installed for TRACKERS_PYTHON: pip install {package!r}")


def run_python(words: list[str], at: Path) -> str:
    environment = os.environ | {
        "TRACKIO_DIR": str(at / "data"), "HF_HUB_OFFLINE": "1", "HOME": str(at), "WANDB_SILENT": "true",
    }  # fmt: skip
    result = subprocess.run(
        [PYTHON, *words], cwd=at, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_trackio_imports_the_scalars(tmp_path):
    skip_without("trackio[tensorboard]", "trackio", "tbparse")
    values = {step: 1.0 / step for step in range(1, 30)}
    writer = ScalarWriter(tmp_path / "runs/a/tensorboard")
    for number, loss in values.items():
        writer.write({"train/loss": loss, "train/lr": 0.5}, number, 1.7e9 + number)
    writer.write_text("request", "text", 0, 1.7e9)
    writer.close()
    run_python(["-c", read_blocks("docs/trackers.md")["trackio.py"]], tmp_path)
    words = ["get", "metric", "--project", "digits", "--run", "a/tensorboard", "--metric", "train/loss"]
    answer = run_python([str(Path(PYTHON).with_name("trackio")), *words, "--json"], tmp_path)
    found = {point["step"]: point["value"] for point in json.loads(answer)["values"]}
    assert found == pytest.approx(values)


# The file is a log of LevelDB: blocks of 32 KiB with records of checksum, length, type and data.
READ_WANDB = """
import glob, json, struct
from wandb.proto import wandb_internal_pb2

[path] = glob.glob("wandb/offline-run-*/*.wandb")
data, at, whole, found = open(path, "rb").read(), 7, b"", {}
while at + 7 <= len(data):
    if 2**15 - at % 2**15 < 7:
        at += 2**15 - at % 2**15
        continue
    size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
    whole += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):
        record = wandb_internal_pb2.Record.FromString(whole)
        whole = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in items}
            found[record.history.step.num] = row
print(json.dumps(found))
"""


def test_wandb_stores_the_run_offline(tmp_path):
    skip_without("wandb", "wandb")
    (tmp_path / "runs").mkdir()
    draw = random.Random(1)
    lines = [started(0, 1.7e9), *(step(at, 1.7e9 + at, draw) | {"loss": 1 / at} for at in range(1, 9))]
    evaluated = {
        "time": 1.7e9 + 9,
        "event": "evaluated",
        "step": 8,
        "seconds": 0.1,
        "metrics": {"accuracy": 0.5},
    }
    repeated = step(8, 1.7e9 + 20, draw) | {"loss": 7.0}
    folder(tmp_path / "runs/a", [*lines, evaluated, repeated])
    run_python(["-c", read_blocks("docs/trackers.md")["wandb.py"]], tmp_path)
    rows = json.loads(run_python(["-c", READ_WANDB], tmp_path))
    losses = {int(at): row["train/loss"] for at, row in rows.items()}
    assert losses == pytest.approx({at: 1 / at for at in range(1, 8)} | {8: 7.0})
    assert rows["8"]["validation/accuracy"] == 0.5
