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
