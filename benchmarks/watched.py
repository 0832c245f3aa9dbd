"""Cost of an open page: processor time of `paceline watch`, and what it slows the steps of two ranks by.

    python benchmarks/watched.py [--pairs 6] [--block-s 4]

Two ranks train on this machine, and a client reads the stream of the page of their run. The browser is on
another machine. The server runs in some blocks of time and is stopped (SIGSTOP) in others, in the order ABBA,
or BAAB in the next pair, as in monitor.py. A block begins when the server has sent what it missed. Findings
are computed as often as without the stops, so that their cost counts twice. The bar is 2 % of the time of
the training.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import machine
from monitor import bound_of_median
from page import Client, serve

TRAIN = (
    "train",
    "text",
    "--ranks",
    "2",
    "--batch",
    "16",
    "--steps",
    "1000000",
    "--monitor",
    "1",
    "--no-profile",
)
MODEL = ("width=64", "depth=2", "context=64", "spec.evaluate_every=1000000000")
SETTLE_S = 8.0  # until the curves have many points
MISSED_S = 5.0  # for the message with what the server missed


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Path]:
    """Yield the folder of a run that trains."""
    run = folder / "run"
    sets = [word for value in MODEL for word in ("--set", value)]
    command = [sys.executable, "-m", "paceline", *TRAIN, *sets, "--run-dir", str(run)]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not count_steps(run):
            if process.poll() is not None:
                sys.exit((folder / "log").read_text())
            time.sleep(0.2)
        yield run
    finally:
        process.terminate()
        process.wait()


def read_step_times(run: Path) -> list[float]:
    """Return when each step was reported."""
    lines = (run / "events.jsonl").read_text().splitlines() if (run / "events.jsonl").exists() else []
    return [json.loads(line)["time"] for line in lines if '"event": "step"' in line and line.endswith("}")]


def count_steps(run: Path) -> int:
    return len(read_step_times(run))


def read_stream(client: Client, sizes: list[int]) -> None:
    """Read the page of the only run until the server ends. sizes: of the messages."""
    with contextlib.suppress(Exception):  # the server ends
        [row] = next(client.messages())[0]["lists"]["runs"]["rows"]
        for _, size in client.messages(f"run={row['id']}"):
            sizes.append(size)


def wait_for_message(sizes: list[int]) -> None:
    count, until = len(sizes), time.time() + MISSED_S
    while len(sizes) == count and time.time() < until:
        time.sleep(0.01)


def time_blocks(
    server: psutil.Process, sizes: list[int], pairs: int, block_s: float
) -> tuple[list[list[tuple]], list[float]]:
    """Return the blocks of each pair (whether the server runs, begin, end), and its shares of a core.

    sizes: of the messages so far."""
    blocks, shares = [], []
    for pair in range(pairs):
        first, own = bool(pair % 2), []
        for runs in (first, not first, not first, first):
            server.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
            time.sleep(0.3)
            if runs:
                wait_for_message(sizes)
            before, begin = sum(server.cpu_times()[:2]), time.time()
            time.sleep(block_s)
            end = time.time()
            own.append((runs, begin, end))
            if runs:
                shares.append((sum(server.cpu_times()[:2]) - before) / (end - begin))
        blocks.append(own)
    server.send_signal(signal.SIGCONT)
    return blocks, shares


def find_slowdowns(blocks: list[list[tuple]], times: list[float]) -> list[float]:
    """Return by which share of the time steps were slower while the server ran, for each pair."""
    slowdowns = []
    for pair in blocks:
        rates: dict[bool, list[float]] = {True: [], False: []}
        for runs, begin, end in pair:
            inside = [at for at in times if begin <= at < end]
            rates[runs].append((len(inside) - 1) / (inside[-1] - inside[0]))
        slowdowns.append(sum(rates[False]) / sum(rates[True]) - 1)
    return slowdowns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--block-s", type=float, default=4.0)
    options = parser.parse_args()
    print(machine.description(), flush=True)
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as name, training(Path(name)) as run:
        with serve(run, Path(name) / "cache") as client:
            threading.Thread(target=read_stream, args=(client, sizes), daemon=True).start()
            time.sleep(SETTLE_S)
            blocks, shares = time_blocks(psutil.Process(client.pid), sizes, options.pairs, options.block_s)
        times = read_step_times(run)
    slowdowns = find_slowdowns(blocks, times)
    low, median, high = statistics.quantiles(slowdowns, n=4)
    step_s = statistics.median(after - before for before, after in itertools.pairwise(times))
    share = statistics.mean(shares)
    print(
        f"server: {share:.2%} of a core, {share / (os.cpu_count() or 1):.2%} of the machine; "
        f"{len(sizes)} messages of {statistics.median(sizes) / 1e3:.1f} kB\n"
        f"2 ranks, ddp, {1e3 * step_s:.1f} ms per step, {len(slowdowns)} pairs of 2 × 2 blocks of "
        f"{options.block_s:g} s: median slowdown {median:+.2%} ({low:+.2%} to {high:+.2%}), "
        f"95 % bound of the median {bound_of_median(slowdowns):+.2%}"
    )


if __name__ == "__main__":
    main()
