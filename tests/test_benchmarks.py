"""Every script in benchmarks/ runs from start to end with its smallest setting."""

import csv
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from published_row import ROW

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALLEST = {
    "profiling": "--rounds 4",
    "collectives": "--rounds 2 --bytes 1024",
    "compute": "--rounds 2 --seconds 0.02 --size 128",
    "crowd": "--steps 3 --times 1",
    "heartbeat": "--steps 24 --times 1",
    "comms": "--ranks 4 --batch 4 --plan zero1",
    "pipeline": "--rounds 2",
    "predicted": "digits --ranks 1 --rounds 1 --seconds 0.01 --json kept.json",
    "published": "mine.csv",
    "roll_call": "--ranks 2 --times 2",
    "same_training": "--steps 2",
    "save": "--ranks 1 --threads 1 --rounds 2 --steps 1",
    "search": "",
    "start": "--rounds 2 --tries 1",
    "steps": "--rounds 2 --tries 1",
    "storage": "--rounds 2",
    "tensor": "--rounds 2",
    "works": "--ranks 2 --steps 2 --models uneven",
}
NEEDS = {"storage": "fio"}


def test_every_script_is_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()} == SMALLEST.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", SMALLEST)
def test_script_runs(script: str, tmp_path: Path) -> None:
    if script in NEEDS and shutil.which(NEEDS[script]) is None:
        pytest.skip(f"{NEEDS[script]} is not installed")
    with open(tmp_path / "mine.csv", "w", newline="") as lines:
        writer = csv.DictWriter(lines, ROW)
        writer.writeheader()
        writer.writerow(ROW)
    command = [sys.executable, str(FOLDER / f"{script}.py"), *SMALLEST[script].split()]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert any(character.isdigit() for character in done.stdout)
    if script == "steps":
        for name, modules in {
            "Lightning Fabric": ["lightning_fabric"],
            "HF Trainer": ["transformers", "accelerate"],
        }.items():
            absent = [module for module in modules if importlib.util.find_spec(module) is None]
            rows = [line for line in done.stdout.splitlines() if line.startswith(name + " ")]
            assert len(rows) == 3
            assert all(
                (f"left out: {' and '.join(absent)} not installed" in row) == bool(absent) for row in rows
            )
