"""Time, memory and size of `paceline report` for a long run, read for the first time and again.

python benchmarks/report.py [--steps 1000000] [--rounds 3]
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline import spec as specs
from paceline.cluster.cpu import read_cpu
from paceline.spec import Launch, Spec

STEP_S = 0.05
EVALUATE_EVERY = 1000
BEGIN = 1.7e9
# Runs in a process of its own, so that its peak memory is that of the report.
MEASURED = """
import re, sys, time
from pathlib import Path
start = time.perf_counter()
from paceline.cli import main
try:
    main()
finally:
    seconds = time.perf_counter() - start
    # ru_maxrss would include the process that started this one
    peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    print("measured", seconds, time.process_time(), peak, file=sys.stderr)
"""


def write_run(folder: Path, steps: int) -> Path:
    """Write a run of that many steps with evaluations and samples of a node, and return its folder."""
    run = folder / "run"
    (run / "monitor").mkdir(parents=True)
    specs.save(run / "spec.toml", Spec(task="digits"), Launch(ranks=2))
    draw = random.Random(1)
    started = {"task": "digits", "plan": "ddp", "ranks": 2, "batch": 64, "step": 0, "steps": steps}
    started |= {"samples": 60_000, "parameters": 10**6, "device": "cpu", "precision": "fp32", "threads": 1}
    with open(run / "events.jsonl", "w") as file:
        file.write(json.dumps({"time": BEGIN, "event": "started", **started}) + "\n")
        for number in range(1, steps + 1):
            at = BEGIN + STEP_S * number
            event = {"time": at, "event": "step", "step": number, "samples": 64 * number}
            event |= {"loss": draw.random() + 100 / number, "grad_norm": draw.random(), "lr": 1 / number}
            event |= {"step_s": STEP_S + draw.random() / 1000, "data_s": draw.random() / 1000}
            file.write(json.dumps(event | {"samples_per_s": 64 / event["step_s"]}) + "\n")
            if number % EVALUATE_EVERY == 0:
                metrics = {"loss": draw.random(), "accuracy": draw.random()}
                evaluated = {"step": number, "metrics": metrics, "seconds": 0.1}
                file.write(json.dumps({"time": at, "event": "evaluated", **evaluated}) + "\n")
    with open(run / "monitor/node.csv", "w") as file:
        file.write("# paceline samples 1\n# node: node\n")
        file.write("time [s],cpu [%],memory used [MiB],rank0 cpu [%],rank1 cpu [%],gpu0 power [W]\n")
        for second in range(int(STEP_S * steps)):
            values = [draw.randrange(100) for _ in range(5)]
            file.write(f"{BEGIN + second:.3f},{','.join(map(str, values))}\n")
    return run


def measure(run: Path, cache: Path) -> tuple[float, float, float, float]:
    """Return seconds, processor seconds, peak bytes and size in bytes of one report."""
    page = run.with_name("report.html")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "report", str(run), "-o", str(page)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    found = re.search(r"^measured (\S+) (\S+) (\S+)$", done.stderr, re.M)
    if done.returncode or found is None:
        sys.exit(done.stdout + done.stderr)
    return float(found[1]), float(found[2]), float(found[3]), float(page.stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = write_run(Path(folder), options.steps)
        size = (run / "events.jsonl").stat().st_size
        print(f"{read_cpu().name}, {os.cpu_count()} cores")
        seconds = time.perf_counter() - start
        print(f"{options.steps:,} steps, {size / 1e6:.0f} MB of events, written in {seconds:.1f} s")
        print(f"{'report':14} {'s':>8} {'CPU s':>8} {'peak MB':>8} {'page MB':>8}")
        rows: dict[str, list[tuple[float, float, float, float]]] = {"first": [], "again": []}
        for number in range(options.rounds):
            for name in rows:
                rows[name].append(measure(run, Path(folder) / f"cache-{number}"))
        for name, measured in rows.items():
            wall, busy, peak, page = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"{name:14} {wall:8.2f} {busy:8.2f} {peak / 1e6:8.0f} {page / 1e6:8.2f}")


if __name__ == "__main__":
    main()
