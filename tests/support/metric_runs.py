"""A run that trains, with known values of every kind, for tests of metrics."""

import json
import time
from pathlib import Path
from typing import Any

from paceline.run import RunFolder
from run_lines import folder, started

PARTS = {"compute": 0.5, "communication": 0.25, "input": 0.125}
SAMPLES = {
    "time [s]": time.time(), "cpu [%]": 25, "cpu0 [%]": 99, "memory used [MiB]": 3, "memory total [MiB]": 4,
    "network in [MB/s]": 5, "network out [MB/s]": 6, "disk read [MB/s]": 7, "disk write [MB/s]": 8,
    "rank0 cpu [%]": 150, "rank1 cpu [%]": 50, "rank0 memory [MiB]": 1, "rank1 memory [MiB]": 2,
    "gpu0 utilization [%]": 75, "gpu1 utilization [%]": 50, "gpu0 memory used [MiB]": 10,
    "gpu0 power [W]": 300, "gpu0 energy [J]": 1234.5, "gpu0 clock sm [MHz]": 1410, "gpu0 temperature [C]": 61,
    "gpu0 throttle [bits]": 0x4 | 0x1, "gpu0 ecc corrected [errors]": 2, "gpu0 ecc uncorrected [errors]": 0,
    "gpu0 pcie in [MB/s]": 1, "gpu0 pcie out [MB/s]": 2, "gpu0 nvlink in [MB/s]": 3,
    "gpu0 nvlink out [MB/s]": 4, "gpu0 processes [processes]": 1,
}  # fmt: skip


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "time": time.time(), "event": "step", "step": number, "samples": 8 * number, "loss": 0.5,
        "grad_norm": 2.0, "lr": 0.01, "step_s": 0.125, "data_s": 0.0625, "samples_per_s": 64.0, **more,
    }  # fmt: skip


def make_lines() -> list[dict[str, Any]]:
    at = time.time()
    saved = {"time": at, "event": "saved", "path": "ckpt/step_20", "seconds": 2.0}
    metrics = {"loss": 0.25, "accuracy": 0.75}
    return [
        started(0, at) | {"steps": 100},
        *(step(number) for number in range(1, 41)),
        saved | {"step": 20, "bytes": 1000, "blocked_s": 0.5},
        {"time": at, "event": "failed", "what": "rank", "message": "lost", "step": 40, "rank": 1},
        started(20, at) | {"steps": 100},
        *(step(number) for number in range(21, 51)),
        {"time": at, "event": "evaluated", "step": 50, "metrics": metrics, "seconds": 1.5},
        saved | {"step": 50, "bytes": 500, "blocked_s": 0.25},
        {"time": at, "event": "stalled", "step": 50, "ranks": [1], "message": "rank 1 waits"},
        {
            "time": at, "event": "profiled", "step": 50, "num_steps": 1, "step_s": 0.875, "seconds": PARTS,
            "input_s": 0.1, "slowest": 1, "slowest_s": 0.5, "busy_s": 0.5, "fullest": 1,
            "memory": {"weights": 1000, "activations": 500}, "costs_s": 0.0,
        },
        step(51, loss=0.375, losses={"policy": 3.0}),
    ]  # fmt: skip


def write_run(at: Path, lines: list[dict[str, Any]] | None = None) -> RunFolder:
    """Write a run with events, the samples of a node, and a prediction. It trains while its lock is held."""
    run = folder(at, make_lines() if lines is None else lines)
    run.monitor.mkdir()
    (run.monitor / "node1.csv").write_text(
        "\n".join(
            [
                "# paceline samples 1",
                "# node: node1",
                ",".join(SAMPLES),
                ",".join(["1", *["0"] * (len(SAMPLES) - 1)]),
                ",".join(map(str, SAMPLES.values())),
                "",
            ]
        )
    )
    predicted = {name: {"predicted": seconds, "spread": 0.1} for name, seconds in PARTS.items()}
    profile = {"plan": "ddp", "ranks": 2, "batch": 8, "time_s": predicted, "flops": 1e9, "peak_flops": 1e11}
    run.profile.write_text(json.dumps(profile))
    return run
