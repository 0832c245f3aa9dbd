"""`paceline tune` under kill -9: controller, launchers and ranks are killed at random moments.

A study with one trial at a time must end with the same trials and the same values as an undisturbed one. With
two trials at a time, no trial may be lost, and none may be trained again after it was finished.

python benchmarks/tune_kills.py [--kills 10] [--trials 8] [--ranks 1 2]
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from paceline.tuning.journal import Finished, Launched, StudyState, read_state

STUDY = ("--space", "lr=log:1e-3:1e-1", "--space", "width=int:4:16:4", "--metric", "max accuracy")
LENGTH = ("--epochs", "2", "--set", "spec.threads=1", "--set", "save.every=5")
MARK = "PACELINE_KILLS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = False
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            failed |= not compare(Path(folder), ranks, options.trials, options.kills, options.seed)
    sys.exit(failed)


def compare(folder: Path, ranks: int, trials: int, kills: int, seed: int) -> bool:
    """Run a study undisturbed and one with kills, print the result and return whether it is right."""
    new = ("digits", *STUDY, *LENGTH, "--trials", str(trials), "--ranks", str(ranks), "--run-dir")
    began = time.time()
    start(folder, *new, "calm").wait()
    calm = read_state(folder / "calm" / "events.jsonl")
    first = next(event.time for event in calm.events if isinstance(event, Launched))
    start_s, train_s = first - began, time.time() - first
    draw = random.Random(seed)
    command, done = (*new, "killed"), 0
    while done < kills:
        process = start(folder, *command)
        try:
            process.wait(draw.uniform(0.3, 2 * start_s + 2 * train_s / kills))
        except subprocess.TimeoutExpired:
            kill_all(process)
            done += 1
        if (folder / "killed" / "study.toml").exists():
            command = ("killed", "--resume")
        if process.returncode == 0:  # all trials are over
            break
    status = start(folder, *command).wait()
    killed = read_state(folder / "killed" / "events.jsonl")
    starts = [event.trial for event in killed.events if isinstance(event, Launched)]
    ends = [event.trial for event in killed.events if isinstance(event, Finished)]
    after_end = any(
        isinstance(event, Launched) and event.trial in ends_before(killed, at)
        for at, event in enumerate(killed.events)
    )
    same = values(calm) == values(killed)
    complete = sorted(ends) == list(range(trials)) and not after_end and status == 0 and not killed.skipped
    print(
        f"{ranks} at a time: {done} kills, {len(starts)} starts of {trials} trials, "
        f"each finished once: {complete}, same trials and values: {same}"
    )
    return complete and (same or ranks > 1)


def ends_before(state: StudyState, position: int) -> set[int]:
    """Return the trials that were finished before an event."""
    return {event.trial for event in state.events[:position] if isinstance(event, Finished)}


def values(state: StudyState) -> list[object]:
    """Return values, state, accuracy and loss of each trial."""
    return [
        (trial.values, trial.state, trial.metrics.get("accuracy"), trial.metrics.get("loss"))
        for trial in state.trials.values()
    ]


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start `paceline tune` in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "tune", *words],
        cwd=folder,
        env={**os.environ, MARK: str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all its descendants at once."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()


if __name__ == "__main__":
    main()
