"""ASHA compared with training every trial to its end, on the digits task.

Both studies have the same random trials. Reported are the best accuracy of each and the samples that were
trained, for several seeds: one of the 360 images of the validation is 0.28 points, and the best of many
trials is partly luck.

python benchmarks/tune_asha.py [--trials 27] [--epochs 9] [--ranks 2] [--seeds 0 1 2]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.tuning.journal import read_state

SPACE = ("--space", "lr=log:1e-4:1e-1", "--space", "width=int:4:24:4", "--space", "optimizer=adamw,sgd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=27)
    parser.add_argument("--epochs", type=float, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    differences, shares = [], []
    for seed in options.seeds:
        found = {}
        with tempfile.TemporaryDirectory() as name:
            for scheduler in ("none", "asha"):
                words = ("--scheduler", scheduler, "--trials", str(options.trials))
                words += ("--ranks", str(options.ranks), "--search-seed", str(seed))
                words += ("--epochs", str(options.epochs), "--set", "spec.threads=1")
                found[scheduler] = run_study(Path(name), scheduler, words)
        (whole, all_samples), (best, samples) = found["none"], found["asha"]
        differences.append(100 * (best - whole))
        shares.append(samples / all_samples)
        print(
            f"seed {seed}: best accuracy of {options.trials} trials of {options.epochs:g} epochs "
            f"{whole:.4f}; asha {best:.4f} ({differences[-1]:+.2f} points) with {shares[-1]:.2f} of the "
            "samples",
            flush=True,
        )
    print(
        f"median {statistics.median(differences):+.2f} points, {statistics.mean(shares):.2f} of the samples"
    )


def run_study(folder: Path, name: str, words: tuple[str, ...]) -> tuple[float, int]:
    """Return the best accuracy of a study and the samples that it trained."""
    command = [sys.executable, "-m", "paceline", "tune", "digits", *SPACE, "--metric", "max accuracy", *words]
    subprocess.run([*command, "--run-dir", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    trials = read_state(folder / name / "events.jsonl").trials.values()
    accuracies = [trial.metrics.get("accuracy") or 0.0 for trial in trials if trial.state == "complete"]
    return max(accuracies), sum(trial.stages[-1].samples for trial in trials if trial.stages)


if __name__ == "__main__":
    main()
