"""Makespan of 40 fixed trials on 4 ranks: `paceline tune`, Optuna with torchrun, and Ray Tune.

Each contender trains the digits CNN with the same 40 pairs of learning rate and width, 4 trials at a time,
one rank and one thread each, and evaluates after each epoch. Paceline also writes checkpoints, events and
logs. The loop of the others reads whole batches from memory and has no other duty. The seconds are those of
the whole command. The mean of the accuracies shows that all train equally well: other initial weights and
orders of the samples give the plain loop 0.76 to 0.80. Runs are paired: the contenders take turns.
Requires Optuna, and Ray Tune with pandas: pip install "paceline[tune,ray]" pandas

python benchmarks/tune_makespan.py [--runs 5] [--contenders paceline optuna ray] [--epochs 3]
    [--json turns.json --turns 1]

With --json, each turn is appended to a file, and a later call continues with the next.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
WIDTHS = (4, 6, 8, 10, 12, 14, 16, 18)
BATCH, AT_ONCE = 64, 4
MODULES = {"optuna": ("optuna",), "ray": ("ray", "pandas")}  # that a contender needs
Widths = tuple[int, ...]
ENVIRON = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@dataclass(frozen=True)
class Turn:
    """A run of a contender: its wall time, and the mean accuracy of its trials."""

    run: int
    contender: str
    seconds: float
    trials: int
    accuracy: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--widths", type=int, default=8, help="number of widths, with 5 trials each")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="file with the turns so far, which are not repeated")
    parser.add_argument("--turns", type=int, help="turns of this call [default: all that are left]")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)  # this process is a part of a contender
    options = parser.parse_args()
    if options.part:
        PARTS[options.part[0]](*options.part[1:])
        return
    for name in options.contenders:
        for module in MODULES.get(name, ()):
            if importlib.util.find_spec(module) is None:
                parser.error(f"{name} requires {module}, which is not installed")
    turns: list[Turn] = []
    if options.json is not None and options.json.exists():
        turns = [Turn(**row) for row in json.loads(options.json.read_text())]
    done = {(turn.run, turn.contender) for turn in turns}
    order = [(run, name) for run in range(options.runs) for name in options.contenders]
    for run, name in [key for key in order if key not in done][: options.turns]:
        turns.append(take_turn(run, name, options.epochs, WIDTHS[: options.widths]))
        print(turns[-1], flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(turn) for turn in turns], indent=1) + "\n")
    report([turn for turn in turns if (turn.run, turn.contender) in order])


def take_turn(run: int, name: str, epochs: int, widths: Widths) -> Turn:
    """Let a contender train all trials."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        accuracies = CONTENDERS[name](Path(folder), epochs, widths)
        seconds = time.monotonic() - began
    return Turn(run, name, round(seconds, 2), len(accuracies), round(statistics.mean(accuracies), 4))


def report(turns: list[Turn]) -> None:
    """Print the median of each contender, and our share of the time of the better of the others."""
    seconds: dict[str, dict[int, float]] = {}
    for turn in turns:
        seconds.setdefault(turn.contender, {})[turn.run] = turn.seconds
    medians = {name: statistics.median(runs.values()) for name, runs in seconds.items()}
    print(", ".join(f"{name} {median:.1f} s ({len(seconds[name])})" for name, median in medians.items()))
    others = [name for name in medians if name != "paceline"]
    if not others or "paceline" not in medians:
        return
    best = min(others, key=lambda name: medians[name])
    ours, theirs = seconds["paceline"], seconds[best]
    if ratios := [ours[run] / theirs[run] for run in sorted(ours.keys() & theirs.keys())]:
        print(
            f"makespan beside {best}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"in {len(ratios)} paired runs"
        )


def run_paceline(folder: Path, epochs: int, widths: Widths) -> list[float]:
    """Return the accuracies of a study of `paceline tune`."""
    from paceline.tuning.journal import read_state

    grid = (f"lr={','.join(map(str, LRS))}", f"width={','.join(map(str, widths))}")
    command = [sys.executable, "-m", "paceline", "tune", "digits", "--grid", grid[0], "--grid", grid[1]]
    command += ["--metric", "max accuracy", "--epochs", str(epochs), "--batch", str(BATCH)]
    command += ["--ranks", str(AT_ONCE), "--set", "spec.threads=1", "--device", "cpu", "--run-dir", "study"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    trials = read_state(folder / "study" / "events.jsonl").trials.values()
    return [accuracy for trial in trials if (accuracy := trial.metrics["accuracy"]) is not None]


def run_part(folder: Path, *words: object) -> list[float]:
    """Run a part of this file as a process that writes accuracies, and return them."""
    output = folder / "accuracies.json"
    command = [sys.executable, __file__, "--part", *map(str, words), str(output)]
    log = folder / "log.txt"
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | ENVIRON, stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        sys.exit(f"{words[0]}: exit status {done.returncode}\n{log.read_text(errors='replace')[-4000:]}")
    accuracies: list[float] = json.loads(output.read_text())
    return accuracies


def optimize_with_optuna(epochs: str, widths: str, output: str) -> None:
    """Run the trials with Optuna; each is started by torchrun."""
    import optuna

    def objective(trial: Any) -> float:
        lr = trial.suggest_categorical("lr", LRS)
        width = trial.suggest_categorical("width", space["width"])
        result = Path(output).with_name(f"{trial.number}.json")
        words = ["--standalone", "--nproc-per-node=1", __file__, "--part", "rank"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(lr), str(width), epochs]
        subprocess.run([*command, str(result)], check=True)
        return float(json.loads(result.read_text()))

    space: dict[str, Any] = {"lr": list(LRS), "width": json.loads(widths)}
    study = optuna.create_study(direction="maximize")
    for lr in space["lr"]:  # a grid sampler in several threads may repeat a pair
        for width in space["width"]:
            study.enqueue_trial({"lr": lr, "width": width})
    study.optimize(objective, n_trials=len(LRS) * len(space["width"]), n_jobs=AT_ONCE)
    Path(output).write_text(json.dumps([trial.value for trial in study.trials]))


def train_under_torchrun(lr: str, width: str, epochs: str, output: str) -> None:
    """Be the rank of a trial of Optuna."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    accuracy = train(float(lr), int(width), int(epochs), DistributedDataParallel)
    Path(output).write_text(json.dumps(accuracy))
    dist.destroy_process_group()


def optimize_with_ray(epochs: str, widths: str, output: str) -> None:
    """Run the trials with Ray Tune."""
    import ray
    from ray import tune

    ray.init(num_cpus=AT_ONCE, include_dashboard=False)

    def trainable(config: dict[str, Any]) -> None:
        accuracy = train(config["lr"], config["width"], int(epochs), lambda model: model)
        tune.report({"accuracy": accuracy})

    space = {"lr": tune.grid_search(list(LRS)), "width": tune.grid_search(json.loads(widths))}
    run = tune.RunConfig(storage_path=str(Path(output).parent.resolve()), verbose=0)
    # Without reuse_actors, each trial starts a process that imports torch.
    tuning = tune.TuneConfig(max_concurrent_trials=AT_ONCE, reuse_actors=True)
    trials = tune.with_resources(trainable, {"cpu": 1})
    results = tune.Tuner(trials, param_space=space, run_config=run, tune_config=tuning).fit()
    Path(output).write_text(json.dumps([result.metrics["accuracy"] for result in results]))


def train(lr: float, width: int, epochs: int, wrap: Callable[[Any], Any]) -> float:
    """Train the digits CNN by a plain loop, and return its accuracy."""
    import torch
    import torch.nn.functional as F

    from paceline.tasks.digits import Digits

    torch.manual_seed(0)
    torch.set_num_threads(1)
    task = Digits(width=width)
    model = wrap(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    data, validation = task.dataset("train"), task.dataset("validation")
    accuracy = 0.0
    for _ in range(epochs):
        model.train()
        for chosen in torch.randperm(len(data)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(data.images[chosen]), data.labels[chosen]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(validation.images).argmax(-1) == validation.labels).float().mean().item()
    return accuracy


CONTENDERS: dict[str, Callable[[Path, int, Widths], list[float]]] = {
    "paceline": run_paceline,
    "optuna": lambda folder, epochs, widths: run_part(folder, "optuna", epochs, json.dumps(widths)),
    "ray": lambda folder, epochs, widths: run_part(folder, "ray", epochs, json.dumps(widths)),
}
PARTS: dict[str, Callable[..., None]] = {
    "optuna": optimize_with_optuna,
    "ray": optimize_with_ray,
    "rank": train_under_torchrun,
}

if __name__ == "__main__":
    main()
