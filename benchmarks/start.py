"""Wall time from the command to the first step: `paceline train`, and torchrun with a handwritten loop.

Both train the digits CNN on two ranks of this machine, in turns; a start that other programs disturbed is
repeated. Started by torchrun, this file is the handwritten loop. With `--cpu RANKS`, the CPU time of a
training of one step is measured instead: with forked ranks, and with spawned ranks as on a machine with a
GPU.
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


def run_handwritten_loop() -> None:
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
    os._exit(0)  # the end is not measured


def time_torchrun(folder: Path) -> float:
    start = time.time()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return json.loads(_run([sys.executable, *torchrun, __file__]).splitlines()[-1])["time"] - start


def time_paceline(folder: Path) -> float:
    start = time.time()
    options = ["--ranks", str(RANKS), "--steps", "1", "--run-dir", str(folder / "run")]
    _run([sys.executable, "-m", "paceline", "train", "digits", *options])
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return next(event["time"] for event in events if event["event"] == "step") - start


def _run(command: list[str]) -> str:
    # Without compiled files next to the sources, each start would compile Paceline again, but not torch.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["OMP_NUM_THREADS"] = "1"  # torchrun sets the same, with a warning
    return subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


SPAWN_CODE = """
from paceline.cli import main
from paceline.launch import fork_server

fork_server.ACCELERATORS = ("/dev/null",)
main()
"""


def print_cpu_time(ranks: int) -> None:
    """Print the CPU seconds of all processes, on which other programs have little influence."""
    import machine

    print(f"{machine.description()}, torch {version('torch')}; digits CNN on {ranks} ranks, one step")
    options = ["--ranks", str(ranks), "--steps", "1", "--batch", str(4 * ranks), "--device", "cpu"]
    options += ["--set", "spec.threads=1"]
    for name, program in (("forked", ["-m", "paceline"]), ("spawned", ["-c", SPAWN_CODE])):
        start_cpu_s, start = _children_cpu_s(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            run_dir = str(Path(folder) / "run")
            _run([sys.executable, *program, "train", "digits", *options, "--run-dir", run_dir])
        cpu_s, wall_s = _children_cpu_s() - start_cpu_s, time.monotonic() - start
        print(f"{name:20}{cpu_s:6.1f} s of CPU, {wall_s:.1f} s of wall time", flush=True)


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    import machine
    from machine import MAX_OTHER_SHARE, TRIES, LoadMeter

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="at least 2")
    parser.add_argument(
        "--tries",
        type=int,
        default=TRIES,
        help="maximum number of attempts for a start that other programs disturb",
    )
    parser.add_argument(
        "--cpu", type=int, metavar="RANKS", help="print the CPU time of one start with this number of ranks"
    )
    options = parser.parse_args()
    if options.cpu is not None:
        print_cpu_time(options.cpu)
        return
    contenders = {"torchrun, handwritten": time_torchrun, "paceline train": time_paceline}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(-1, options.rounds):  # the first round is the warm-up
        for name, time_start in list(contenders.items())[:: 1 if round_index % 2 else -1]:
            for _ in range(options.tries if round_index >= 0 else 1):
                load, start_cpu_s = LoadMeter(), _children_cpu_s()
                with tempfile.TemporaryDirectory() as folder:
                    seconds = time_start(Path(folder))
                if load.other_share(_children_cpu_s() - start_cpu_s) < MAX_OTHER_SHARE:
                    break
            if round_index >= 0:
                times[name].append(seconds)
    print(
        f"{machine.description()}, torch {version('torch')}; digits CNN on {RANKS} ranks; "
        f"{options.rounds} rounds"
    )
    for name, seconds_of_rounds in times.items():
        median, fastest = statistics.median(seconds_of_rounds), min(seconds_of_rounds)
        print(f"{name:22}{median:6.2f} s from command to first step (fastest {fastest:.2f} s)")
    ratios = [paceline_s / torchrun_s for torchrun_s, paceline_s in zip(*times.values(), strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"ratio of the rounds: median {median:.2f} (quartiles {low:.2f}–{high:.2f})")


if __name__ == "__main__":
    run_handwritten_loop() if "RANK" in os.environ else main()
