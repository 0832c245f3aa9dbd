"""ASHA compared with training every trial to its end, on digits or on generated images.

Both studies have the same random trials. Reported are the best accuracy of each and the samples that were
trained, for several seeds: one of the 360 images of the validation of digits is 0.28 points, and the best of
many trials is partly luck. The generated images are those of large_batch.py, 12,000 of them.

python benchmarks/tune_asha.py [--task digits] [--trials 27] [--epochs 9] [--ranks 2] [--seeds 0 1 2]
    [--json seeds.json]

With --json, the result of each seed is appended to a file, and all seeds of the file are summarised.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.tuning.journal import read_state

IMAGES = f"{Path(__file__).with_name('large_batch.py').resolve()}:Teacher"
LR = ("--space", "lr=log:1e-4:1e-1", "--space", "optimizer=adamw,sgd")
TASKS = {
    "digits": ("digits", *LR, "--space", "width=int:4:24:4"),
    "images": (IMAGES, *LR, "--space", "width=int:16:128:16", "--set", "samples=12000"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--trials", type=int, default=27)
    parser.add_argument("--epochs", type=float, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="file with the seeds so far")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())
    for seed in options.seeds:
        rows.append(compare(options, seed))
        print(describe(rows[-1], options), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    rows = [row for row in rows if row["task"] == options.task]
    differences = [100 * (row["asha"] - row["whole"]) for row in rows]
    shares = [row["share"] for row in rows]
    print(
        f"{options.task}, {len(rows)} seeds: median {statistics.median(differences):+.2f} points "
        f"({min(differences):+.2f} to {max(differences):+.2f}), {statistics.mean(shares):.2f} of the samples"
    )


def compare(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run both studies with a seed."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for scheduler in ("none", "asha"):
            words = (*TASKS[options.task], "--scheduler", scheduler, "--trials", str(options.trials))
            words += ("--ranks", str(options.ranks), "--search-seed", str(seed))
            words += ("--epochs", str(options.epochs), "--set", "spec.threads=1")
            found[scheduler] = run_study(Path(name), scheduler, words)
    (whole, all_samples), (best, samples) = found["none"], found["asha"]
    return {
        "task": options.task,
        "seed": seed,
        "whole": whole,
        "asha": best,
        "share": samples / all_samples,
    }


def describe(row: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the result of a seed as a sentence."""
    return (
        f"seed {row['seed']}: best accuracy of {options.trials} trials of {options.epochs:g} epochs "
        f"{row['whole']:.4f}; asha {row['asha']:.4f} ({100 * (row['asha'] - row['whole']):+.2f} points) with "
        f"{row['share']:.2f} of the samples"
    )


def run_study(folder: Path, name: str, words: tuple[str, ...]) -> tuple[float, int]:
    """Return the best accuracy of a study and the samples that it trained."""
    command = [sys.executable, "-m", "paceline", "tune", *words, "--metric", "max accuracy"]
    subprocess.run([*command, "--run-dir", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    trials = read_state(folder / name / "events.jsonl").trials.values()
    accuracies = [trial.metrics.get("accuracy") or 0.0 for trial in trials if trial.state == "complete"]
    return max(accuracies), sum(trial.stages[-1].samples for trial in trials if trial.stages)


if __name__ == "__main__":
    main()
