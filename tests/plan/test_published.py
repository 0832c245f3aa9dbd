"""benchmarks/published.py on a small file: each row is predicted, or reported with the reason."""

import csv
import json
import subprocess
import sys
from pathlib import Path

from published_row import ROW

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published.py"


def test_measurements_file(tmp_path):
    rows = [
        ROW,
        ROW | {"row_id": "mine#2", "hidden": "", "n_params": "", "model": "GPT"},
        ROW | {"row_id": "mine#3", "ep": "8"},
        ROW | {"row_id": "mine#4", "gpu_type": "abacus", "peak_TFLOPs_bf16": ""},
        ROW | {"row_id": "mine#6", "kv_heads": "5"},
        ROW | {"row_id": "mine#7", "tp": "16"},
        ROW | {"row_id": "mine#5", "micro_batch": "", "recompute": ""},
    ]
    with (tmp_path / "mine.csv").open("w", newline="") as lines:
        writer = csv.DictWriter(lines, ROW)
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "mine.csv"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    predicted = {row["row_id"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    assert set(predicted) == {"mine#1", "mine#5", "mine#7"}
    assert 12 < predicted["mine#1"]["predicted_step_time_s"] < 17
    assert predicted["mine#1"]["fits"]
    assert (
        predicted["mine#7"]["predicted_step_time_s"] > 1.3 * predicted["mine#1"]["predicted_step_time_s"]
    )  # tp across nodes
    assert predicted["mine#5"]["predicted_step_time_s"] <= predicted["mine#1"]["predicted_step_time_s"]
    assert "not predicted: mine#2: hidden is missing" in done.stdout
    assert "not predicted: mine#3: the sizes of the experts are missing" in done.stdout
    assert "not predicted: mine#6: heads=64 is not divisible by kv_heads=5" in done.stdout
    assert "not predicted: mine#7" not in done.stdout
    assert "within one error bar | within two" in done.stdout
    assert "not predicted: mine#4: memory bandwidth and links of abacus are unknown" in done.stdout


def score(rows: list[dict[str, str]], at: Path, *options: str) -> str:
    with (at / "mine.csv").open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(SCRIPT), str(at / "mine.csv"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_choice_is_of_plans_of_one_model(tmp_path):
    """A run that was slow by chance does not count against its plan, nor does another model."""
    group = ROW | {"rank_group": "G", "measured_TFLOPs_per_gpu": ""}
    good, bad = group | {"tp": "4", "dp": "64"}, group | {"pp": "1", "dp": "64"}
    rows = [
        good | {"row_id": "1", "measured_step_time_s": "15"},
        good | {"row_id": "2", "measured_step_time_s": "13"},
        bad | {"row_id": "3", "measured_step_time_s": "16"},
        group | {"row_id": "4", "heads": "32", "kv_heads": "32", "measured_step_time_s": "9"},
    ]
    out = score(rows, tmp_path)
    line = next(line for line in out.splitlines() if line.startswith("| mine G |"))
    runs, loss, _, plans, plan_loss, _ = [cell.strip() for cell in line.split("|")[2:8]]
    assert (runs, plans, plan_loss) == ("4", "2", "0.0%")
    assert float(loss.rstrip("%")) > 40  # the other model took 9 s


def test_kernels_that_the_host_waits_for_take_longer(tmp_path):
    """Small micro-batches suffer most. On few devices, that system did not wait."""
    base = ROW | {"dataset": "bigscience", "hidden": "14336", "heads": "64", "global_batch": "2048"}
    big = base | {"layers": "72", "n_gpus": "384", "tp": "8", "pp": "6", "dp": "8", "recompute": "full"}
    rows = [
        big | {"row_id": "blocked 1", "micro_batch": "1"},
        big | {"row_id": "blocked 4", "micro_batch": "4"},
        big | {"row_id": "free 1", "micro_batch": "1", "n_gpus": "144", "dp": "3", "global_batch": "768"},
        big | {"row_id": "free 4", "micro_batch": "4", "n_gpus": "144", "dp": "3", "global_batch": "768"},
    ]
    score(rows, tmp_path, "--json", str(tmp_path / "out.json"))
    out = {row["row_id"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    seconds = {name: row["predicted_step_time_s"] for name, row in out.items()}
    # each micro-batch runs 12 layers of 24 kernels forward, computed again and backward, at 50 µs
    waited = 256 * 12 * 3 * 24 * 50e-6
    assert seconds["blocked 1"] - seconds["free 1"] > 0.9 * waited
    assert seconds["blocked 1"] / seconds["blocked 4"] > 1.05 * seconds["free 1"] / seconds["free 4"]
