"""Rows that nobody prepared: other names of models, devices and precisions, and cells that are missing."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from published_row import ROW

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published.py"
BASE = {"seq_len": "4096", "gpu_type": "H100-80GB-SXM", "n_gpus": "64", "global_batch": "256"}
LLAMA = {"model": "Llama 3 8B"}
# name: (cells, parameters × 10⁹ that a token uses, 10¹² FLOP/s of the devices together)
CASES: dict[str, tuple[dict[str, str], float, float]] = {
    "hf id": ({"model": "meta-llama/Llama-3.1-70B-Instruct"}, 70.6, 64 * 989),
    "hf id with base": ({"model": "meta-llama/Meta-Llama-3-8B"}, 8.0, 64 * 989),
    "experts, quantized": ({"model": "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"}, 3.3, 64 * 989),
    "experts with ep": ({"model": "mistralai/Mixtral-8x7B-Instruct-v0.1", "ep": "8"}, 12.9, 64 * 989),
    "unknown model": ({"model": "Phantom-13B", "n_params": "1.3e10"}, 13, 64 * 989),
    "unknown model, name only": ({"model": "Phantom 7B chat"}, 7, 64 * 989),
    "H100": (LLAMA, 8.0, 64 * 989),
    "H200": (LLAMA | {"gpu_type": "NVIDIA H200"}, 8.0, 64 * 989),
    "GB300": (LLAMA | {"gpu_type": "GB300"}, 8.0, 64 * 2500),
    "B300": (LLAMA | {"gpu_type": "HGX B300"}, 8.0, 64 * 2250),
    "MI300X": (LLAMA | {"gpu_type": "AMD Instinct MI300X"}, 8.0, 64 * 1307),
    "MI355X": (LLAMA | {"gpu_type": "MI355X"}, 8.0, 64 * 2516),
    "L40S": (LLAMA | {"gpu_type": "L40S"}, 8.0, 64 * 366),
    "A10G": (LLAMA | {"gpu_type": "A10G", "gpu_mem_GB": "24"}, 8.0, 64 * 125),
    "TPU": (LLAMA | {"gpu_type": "TPU v5p"}, 8.0, 64 * 459),
    "fp8 current scaling": (LLAMA | {"precision": "FP8-CS"}, 8.0, 64 * 2 * 989),
    "fp8 blockwise": (LLAMA | {"precision": "fp8_blockwise"}, 8.0, 64 * 2 * 989),
    "mx": (LLAMA | {"precision": "FP8_MX", "gpu_type": "B200"}, 8.0, 64 * 4500),
    "fp4": (LLAMA | {"precision": "NVFP4", "gpu_type": "GB200"}, 8.0, 64 * 10000),
    "mixed": (LLAMA | {"precision": "bfloat16-mixed"}, 8.0, 64 * 989),
    "axes": (LLAMA | {"tp": "2", "pp": "2", "cp": "2", "vp": "4", "micro_batch": "1"}, 8.0, 64 * 989),
    "uneven micro-batch": (LLAMA | {"micro_batch": "3"}, 8.0, 64 * 989),
    "words": (
        LLAMA | {"MFU": "45 %", "peak_memory_GB": "n/a", "measured_step_time_s": "-", "vp": "None"},
        8.0,
        64 * 989,
    ),
    "numbers with separators": (LLAMA | {"global_batch": "1,024"}, 8.0, 64 * 989),
    "units": (
        LLAMA | {"n_gpus": "64 GPUs", "seq_len": "4k", "internode_GBps": "400 Gb/s", "gpu_mem_GB": "80 GiB"},
        8.0,
        64 * 989,
    ),
    "no sequence length": ({"model": "Phantom 7B", "seq_len": ""}, 7, 64 * 989),
    "release": ({"model": "Llama-3.3-70B-Instruct"}, 70.6, 64 * 989),
    "experts by name only": ({"model": "Phantom-MoE-100B-A10B"}, 10, 64 * 989),
    "latent experts": ({"model": "Nemotron 3 Super", "ep": "8"}, 12.7, 64 * 989),
    "windows": ({"model": "google/gemma-3-27b-it"}, 27, 64 * 989),
    "only heads": ({"model": "Phantom 13B", "heads": "40", "tp": "4"}, 13, 64 * 989),
    "unknown device": (
        LLAMA | {"gpu_type": "X900", "gpu_mem_GB": "80", "peak_TFLOPs_bf16": "989"},
        8.0,
        64 * 989,
    ),
    "pp from the others": (LLAMA | {"tp": "2", "dp": "16", "cp": "1"}, 8.0, 64 * 989),
    "steps of another stage": (LLAMA | {"zero_stage": "ZeRO-2", "recompute": "Full"}, 8.0, 64 * 989),
}


def predict(rows: list[dict[str, str]], columns: list[str], at: Path) -> dict[str, dict[str, float]]:
    with (at / "mine.csv").open("w", newline="") as lines:
        writer = csv.DictWriter(lines, columns)
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(SCRIPT), str(at / "mine.csv"), "--json", str(at / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {row["row_id"]: row for row in json.loads((at / "out.json").read_text())}


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        ("all", [*CASES]),
        ("few", [*CASES][::6]),
        pytest.param("few", [*CASES], marks=pytest.mark.slow),
    ],
    ids=["all", "few", "few-all rows"],
)
def test_invented_rows_are_priced(columns: str, chosen: list[str], tmp_path: Path) -> None:
    """Every row is priced, at a plausible share of the peak. few: the file has no other columns."""
    rows = [BASE | cells | {"row_id": name} for name, (cells, _, _) in CASES.items()]
    names = list(ROW) if columns == "all" else sorted({key for row in rows for key in row})
    found = predict([row for row in rows if row["row_id"] in chosen], names, tmp_path)
    assert set(found) == set(chosen)
    if "units" in chosen:
        assert found["units"]["predicted_step_time_s"] == found["H100"]["predicted_step_time_s"]
    for name in chosen:
        cells, params, peak = CASES[name]
        batch = int(cells.get("global_batch", "256").replace(",", ""))
        ideal_s = 6 * params * 1e9 * 4096 * batch / (peak * 1e12)
        share = ideal_s / found[name]["predicted_step_time_s"]
        assert 0.03 < share < 0.75, (name, share)


def test_contradicting_rows_are_left_out_with_a_reason(tmp_path: Path) -> None:
    rows = [
        BASE | LLAMA | cells | {"row_id": name}
        for name, cells in {
            "heads": {"heads": "7"},
            "axes": {"tp": "7"},
            "slice": {"model": "Grok-1 (reduced layers)"},
            "whole numbers": {"precision": "int8"},
            "32 bits": {"precision": "FP32"},
            "right": {"oom": "yes"},
        }.items()
    ]
    assert list(predict(rows, list(ROW), tmp_path)) == ["right"]


def test_low_precision_and_device_change_the_time(tmp_path: Path) -> None:
    """Negative control: names that are only spelled differently must have the same time, others not."""
    kinds = {
        "a": {"precision": "bf16"},
        "b": {"precision": "BF16-mixed"},
        "c": {"precision": "fp8"},
        "d": {"precision": "FP8-CS"},
        "e": {"gpu_type": "NVIDIA H100 80GB HBM3"},
    }
    rows = [BASE | LLAMA | cells | {"row_id": name} for name, cells in (kinds | RELEASES | SCHEDULES).items()]
    found = predict(rows, list(ROW), tmp_path)
    time = {name: row["predicted_step_time_s"] for name, row in found.items()}
    assert time["a"] == time["b"] == time["e"]
    assert time["c"] == time["d"] < 0.9 * time["a"]
    check_releases(time)
    assert time["2 micro-batches"] == time["2 micro-batches, vp 1"], "fewer than pp are not interleaved"
    assert time["8 micro-batches"] < time["8 micro-batches, vp 1"]


def release(version: str, **cells: str) -> dict[str, str]:
    """Return cells of 8 GB200 that train a model with experts under this release of Megatron-Bridge."""
    experts = {"model": "Qwen3_30B_a3B", "gpu_type": "GB200", "n_gpus": "8", "ep": "8", "micro_batch": "4"}
    return (
        experts
        | {"precision": "MXFP8", "source": f"Megatron-Bridge performance summary {version} NeMo Container"}
        | cells
    )


def check_releases(time: dict[str, float]) -> None:
    """Only the releases, models, precisions and devices for which experts were fused are faster."""
    assert time["26.06"] < 0.7 * time["26.04"]
    assert time["26.06, bf16"] == time["26.04, bf16"]
    assert time["26.06, H100"] == time["26.04, H100"]
    assert time["26.06, B200"] == time["26.04, B200"] > time["26.06.01, B200"]
    assert time["26.06.01, GPT-OSS"] > time["26.06, GPT-OSS"], "a regression that its notes report"
    assert time["offloaded"] < 0.9 * time["recomputed"], "a Grace processor keeps activations"


def fsdp(**cells: str) -> dict[str, str]:
    return release(
        "26.04", model="Llama3-70B", n_gpus="64", ep="1", zero_stage="3 (FSDP)", micro_batch="2", **cells
    )


RELEASES = {
    "26.04": release("26.04"),
    "26.06": release("26.06"),
    **{f"{version}, bf16": release(version, precision="BF16") for version in ("26.04", "26.06")},
    **{f"{version}, H100": release(version, gpu_type="H100-80GB-SXM") for version in ("26.04", "26.06")},
    **{
        f"{version}, B200": release(version, gpu_type="B200-SXM")
        for version in ("26.04", "26.06", "26.06.01")
    },
    **{f"{version}, GPT-OSS": release(version, model="GPT OSS 120B") for version in ("26.06", "26.06.01")},
    "offloaded": fsdp(tp="1", pp="1", seq_len="8192"),
    "recomputed": fsdp(tp="1", pp="1", seq_len="8192", recompute="full"),
}
PIPELINE = {"n_gpus": "32", "tp": "8", "pp": "4", "recompute": "full"}
SCHEDULES = {
    f"{count} micro-batches{text}": PIPELINE | {"global_batch": f"{count}", "vp": vp}
    for count in (2, 8)
    for text, vp in (("", ""), (", vp 1", "1"))
}
