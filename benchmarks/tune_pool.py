"""How busy `paceline tune` keeps its ranks, and its overhead compared with a shell loop over paceline train.

busy: rank-seconds in which a trial was assigned to a rank, from its launch to its end, divided by the number
of ranks and the seconds of the study from its first launch. overhead: seconds of a study with one trial at a
time, compared with those of `paceline train` once for each of the same trials.

python benchmarks/tune_pool.py [--trials 40] [--ranks 4] [--loop 6] [--epochs 2]
"""

import argparse
import heapq
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

from paceline.tuning.journal import Launched, Reached, read_state

STUDY = ("digits", "--space", "lr=log:1e-3:1e-1", "--space", "width=int:4:16:4", "--metric", "max accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--loop", type=int, default=6)
    parser.add_argument("--epochs", type=float, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        length = ("--epochs", str(options.epochs))
        tune(
            folder,
            *length,
            "--trials",
            str(options.trials),
            "--ranks",
            str(options.ranks),
            "--run-dir",
            "pool",
        )
        report_busy(folder / "pool", options.ranks)
        tuned_s = tune(folder, *length, "--trials", str(options.loop), "--run-dir", "one")
        loop_s = train_in_a_loop(folder, options.loop, options.epochs)
        print(
            f"{options.loop} trials, one at a time: tune {tuned_s:.1f} s, shell loop {loop_s:.1f} s, "
            f"overhead {tuned_s / loop_s - 1:+.1%}"
        )


def tune(folder: Path, *words: str) -> float:
    """Run a study in a folder and return its seconds."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "paceline", "tune", *STUDY, *words],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - began


def report_busy(study: Path, ranks: int) -> None:
    """Print the share of time in which the ranks of a study had a trial, and where the idle time is."""
    events = read_state(study / "events.jsonl").events
    launched = [event.time for event in events if isinstance(event, Launched)]
    reached = [event for event in events if isinstance(event, Reached)]
    busy_s = sum(event.seconds for event in reached)
    whole_s = max(event.time for event in reached) - min(launched)
    print(
        f"{len(reached)} trials on {ranks} ranks: {whole_s:.1f} s, "
        f"{busy_s / len(reached):.2f} s a trial, ranks busy {busy_s / (ranks * whole_s):.1%}"
    )
    seconds = {event.trial: event.seconds for event in reached}
    begins = {event.trial: event.time for event in events if isinstance(event, Launched)}
    ends = sorted(begins[trial] + seconds[trial] for trial in seconds)
    tail_s = sum(ends[-1] - end for end in ends[-ranks:])
    lengths = [seconds[trial] for trial in sorted(seconds, key=lambda trial: begins[trial])]
    gaps = (ranks * whole_s - busy_s - tail_s) / len(reached)
    print(
        f"idle: {1000 * gaps:.0f} ms between two trials of a rank, {tail_s:.2f} rank-seconds at the end; "
        f"the same trials without gaps would keep the ranks busy {pack(lengths, ranks):.1%}, and "
        f"{pack(sorted(lengths, reverse=True), ranks):.1%} if the longest started first"
    )


def pack(lengths: list[float], ranks: int) -> float:
    """Return how busy ranks are if each takes the next of these trials as soon as it is free."""
    free = [0.0] * ranks
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return sum(lengths) / (ranks * max(free))


def train_in_a_loop(folder: Path, trials: int, epochs: float) -> float:
    """Train the trials of the study `one` by the command line, and return the seconds."""
    values = [trial.values for trial in read_state(folder / "one" / "events.jsonl").trials.values()]
    began = time.monotonic()
    for number, chosen in enumerate(values[:trials]):
        request = folder / f"{number}.toml"
        request.write_text(
            tomli_w.dumps(
                {
                    "task": "digits",
                    "epochs": epochs,
                    "monitor": "off",
                    "report": False,
                    "set": {"width": chosen["width"]},
                    "optimizer": {"lr": chosen["lr"]},
                }
            )
        )
        subprocess.run(
            [sys.executable, "-m", "paceline", "train", request.name, "--run-dir", f"run{number}"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return time.monotonic() - began


if __name__ == "__main__":
    main()
