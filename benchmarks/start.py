"""Wall time from the command to the end of the first step: `paceline train` beside torchrun with a loop written by hand.

Both train the digits CNN on two ranks of this machine; they take turns, and a start that other programs disturbed is done again.
Started by torchrun, this file is that loop. With `--cpu RANKS` it is the CPU time of a whole training of one step instead: with ranks that
are forked, and with ranks that are spawned, as on a machine with a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

RANKS = 2
DIGITS = Path(__file__).parent.parent / "src/paceline/tasks/digits.npz"


def by_hand() -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    digits = np.load(DIGITS)
    images, labels = torch.from_numpy(digits["images"]), torch.from_numpy(digits["labels"])
    dataset = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels.long())
    loader = DataLoader(dataset, batch_size=64 // RANKS, sampler=DistributedSampler(dataset))
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()
        break
    if dist.get_rank() == 0:
        print(json.dumps({"time": time.time()}), flush=True)
    os._exit(0)  # how it ends does not count


def seconds_by_hand(folder: Path) -> float:
    began = time.time()
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        __file__,
    ]
    return json.loads(_run(words).splitlines()[-1])["time"] - began


def seconds_of_paceline(folder: Path) -> float:
    began = time.time()
    _run(
        [
            sys.executable,
            "-m",
            "paceline",
            "train",
            "digits",
            "--ranks",
            str(RANKS),
            "--steps",
            "1",
            "--run-dir",
            str(folder / "run"),
        ]
    )
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return next(event["time"] for event in events if event["event"] == "step") - began


def _run(words: list[str]) -> str:
    # Without compiled files beside the sources each start would compile Paceline, and not torch, anew.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["OMP_NUM_THREADS"] = "1"  # as torchrun does, with a warning
    return subprocess.run(words, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


SPAWNING = "from paceline.launch import fork_server; fork_server.ACCELERATORS = ('/dev/null',); from paceline.cli import main; main()"


def cpu_of(ranks: int) -> None:
    """Print the CPU seconds of all processes, which no other programs on the machine lengthen much."""
    import machine

    print(f"{machine.description()}, torch {version('torch')}; digits CNN on {ranks} ranks, one step")
    words = [
        "train",
        "digits",
        "--ranks",
        str(ranks),
        "--steps",
        "1",
        "--batch",
        str(4 * ranks),
        "--device",
        "cpu",
    ]
    for name, program in (("forked", ["-m", "paceline"]), ("spawned", ["-c", SPAWNING])):
        before, began = _children_s(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            _run(
                [
                    sys.executable,
                    *program,
                    *words,
                    "--set",
                    "spec.threads=1",
                    "--run-dir",
                    str(Path(folder) / "run"),
                ]
            )
        print(
            f"{name:20}{_children_s() - before:6.1f} s of CPU, {time.monotonic() - began:.1f} s of time",
            flush=True,
        )


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    import machine
    from machine import OTHERS, TRIES, Gauge

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="at least 2")
    parser.add_argument(
        "--tries",
        type=int,
        default=TRIES,
        help="at most so many times for a start that other programs disturb",
    )
    parser.add_argument(
        "--cpu", type=int, metavar="RANKS", help="print the CPU time of one start of so many ranks"
    )
    options = parser.parse_args()
    if options.cpu is not None:
        cpu_of(options.cpu)
        return
    contenders = {"torchrun, by hand": seconds_by_hand, "paceline train": seconds_of_paceline}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, options.rounds):  # the first round warms up
        for name, seconds in list(contenders.items())[:: 1 if turn % 2 else -1]:
            for _ in range(options.tries if turn >= 0 else 1):
                gauge, before = Gauge(), _children_s()
                with tempfile.TemporaryDirectory() as folder:
                    took = seconds(Path(folder))
                if gauge.others(_children_s() - before) < OTHERS:
                    break
            if turn >= 0:
                found[name].append(took)
    print(
        f"{machine.description()}, torch {version('torch')}; digits CNN on {RANKS} ranks; {options.rounds} rounds"
    )
    for name, all_s in found.items():
        print(
            f"{name:20}{statistics.median(all_s):6.2f} s from command to first step (fastest {min(all_s):.2f} s)"
        )
    low, middle, high = statistics.quantiles((p / h for h, p in zip(*found.values(), strict=True)), n=4)
    print(f"ratio of the rounds: median {middle:.2f} (quartiles {low:.2f}–{high:.2f})")


if __name__ == "__main__":
    by_hand() if "RANK" in os.environ else main()
