"""Rates of a directory measured by `paceline bench storage`, `dd` and `fio` in turns (requires fio).

In each round, each tool does the same with a separate file: synchronous blocks of 32 MiB or 512 bytes, blocks
past the page cache, reads in order and at random. Ratios are computed per round.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import machine
from paceline.bench.storage import io_ops
from paceline.bench.storage.io_ops import MiB, Samples, StorageRoom
from paceline.bench.storage.suite import read_free_space

BLOCK, BLOCKS, SMALL = 32 * MiB, 8, 400
RANDOM_READS = 2000
ORDERS = list(itertools.permutations(range(3)))  # no tool always follows the same tool
Tool = Callable[[Path], float | None]


def paceline(operation: Callable[[StorageRoom], Samples], count: int) -> Tool:
    """Return a tool that measures bytes per second; of small blocks, blocks per second."""

    def run(folder: Path) -> float:
        room = StorageRoom(folder, 2 * BLOCK * BLOCKS, 0, 1, BLOCK)
        samples = list(itertools.islice(operation(room), count))
        seconds = sum(seconds for seconds, _ in samples)
        return (len(samples) if samples[0][1] <= io_ops.PAGE else sum(size for _, size in samples)) / seconds

    return run


def dd(*words: str, num_blocks: int | None = None) -> Tool:
    def run(folder: Path) -> float:
        drop_caches(folder)
        done = subprocess.run(
            ["dd", *(word.format(folder=folder, noise=NOISE) for word in words)],
            capture_output=True,
            text=True,
            check=True,
        )
        size, seconds = re.search(r"(\d+) bytes.* copied, ([\d.e-]+) s", done.stderr).groups()
        return (num_blocks or int(size)) / float(seconds)

    return run


def fio(*words: str, name: str = "of_fio", unit: str = "bw_bytes", side: str = "write") -> Tool:
    def run(folder: Path) -> float:
        command = [
            "fio",
            "--name=x",
            "--ioengine=psync",
            "--randrepeat=0",
            "--output-format=json",
            f"--filename={folder}/{name}",
            *words,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
        return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][side][unit])

    return run


def drop_caches(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            io_ops.drop_cache(file.fileno())


NOISE = Path("/dev/shm/paceline-noise")
WHOLE = BLOCK * BLOCKS
TESTS: dict[str, tuple[Tool, Tool | None, Tool]] = {
    "large write": (
        paceline(io_ops.write_dsync, BLOCKS),
        dd("if={noise}", "of={folder}/of_dd", f"bs={BLOCK}", f"count={BLOCKS}", "oflag=dsync"),
        fio("--rw=write", f"--bs={BLOCK}", f"--size={WHOLE}", "--sync=dsync"),
    ),
    "direct write": (
        paceline(io_ops.write_direct, WHOLE // io_ops.CHUNK),
        dd(
            "if={noise}",
            "of={folder}/direct_of_dd",
            f"bs={io_ops.CHUNK}",
            f"count={WHOLE // io_ops.CHUNK}",
            "oflag=direct,dsync",
        ),
        fio(
            "--rw=write",
            f"--bs={io_ops.CHUNK}",
            f"--size={WHOLE}",
            "--direct=1",
            "--sync=dsync",
            name="direct_of_fio",
        ),
    ),
    "read": (
        paceline(io_ops.read_cold, WHOLE // MiB),
        dd("if={folder}/of_dd", "of=/dev/null", f"bs={MiB}"),
        fio("--rw=read", f"--bs={MiB}", f"--size={WHOLE}", "--invalidate=1", side="read"),
    ),
    "direct read": (
        paceline(io_ops.read_direct, WHOLE // io_ops.CHUNK),
        dd("if={folder}/of_dd", "of=/dev/null", f"bs={io_ops.CHUNK}", "iflag=direct"),
        fio("--rw=read", f"--bs={io_ops.CHUNK}", f"--size={WHOLE}", "--direct=1", side="read"),
    ),
    "random read": (
        paceline(io_ops.read_random, RANDOM_READS),
        None,
        fio(
            "--rw=randread",
            "--bs=4k",
            f"--size={WHOLE}",
            "--direct=1",
            f"--number_ios={RANDOM_READS}",
            unit="iops",
            side="read",
        ),
    ),
    "small write": (
        paceline(io_ops.write_small, SMALL),
        dd(
            "if={noise}",
            "of={folder}/small_of_dd",
            "bs=512",
            f"count={SMALL}",
            "oflag=dsync",
            num_blocks=SMALL,
        ),
        fio(
            "--rw=write",
            "--bs=512",
            f"--size={512 * SMALL}",
            "--sync=dsync",
            name="small_of_fio",
            unit="iops",
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="folder to measure [default: .]")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed; run: apt-get install fio")
    folder = options.folder.resolve()
    filesystem = read_free_space(folder)["filesystem"]
    print(f"{machine.description()}, {folder}: {filesystem}, {options.rounds} rounds, medians")
    NOISE.write_bytes(os.urandom(WHOLE))
    rates_of_test: dict[str, list[tuple[float | None, ...]]] = {name: [] for name in TESTS}
    try:
        for round_index in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                for name, tools in TESTS.items():
                    rates: dict[int, float | None] = {}
                    for index in ORDERS[round_index % len(ORDERS)]:
                        os.sync()  # finish the writes of the previous tool
                        tool = tools[index]
                        rates[index] = tool(Path(scratch)) if tool is not None else None
                    rates_of_test[name].append(tuple(rates[index] for index in range(3)))
    finally:
        NOISE.unlink()
    for name, rounds in rates_of_test.items():
        print_rates(name, rounds)


def print_rates(name: str, rounds: list[tuple[float | None, ...]]) -> None:
    unit, scale = ("/s", 1.0) if name in ("random read", "small write") else (" MB/s", 1e6)
    print(f"{name:14}", end="")
    for index, tool in enumerate(("paceline", "dd", "fio")):
        rates = [rates[index] for rates in rounds if rates[index] is not None]
        text = f"{statistics.median(rates) / scale:,.0f}{unit}" if rates else "—"
        print(f"  {tool} {text:>12}", end="")
    for index, tool in ((1, "dd"), (2, "fio")):
        ratios = [rates[0] / rates[index] for rates in rounds if rates[index]]
        if ratios:
            low, median, high = statistics.quantiles(ratios, n=4)
            print(f"  vs {tool} {median:.2f} ({low:.2f}–{high:.2f})", end="")
    print()


if __name__ == "__main__":
    main()
