"""Time, memory and traffic of `paceline watch`: a run of a million steps, and a folder of 500 runs.

python benchmarks/page.py [--steps 1000000] [--runs 500] [--events 20]

Times end when the data has arrived at the client; drawing it comes on top.
"""

import argparse
import gzip
import http.client
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.cluster.cpu import read_cpu
from report import BEGIN, STEP_S, write_run

STATIC = Path(__file__).parents[1] / "src/paceline/web/static"


class Client:
    """A browser that logged in to a server, as far as requests go."""

    def __init__(self, process: subprocess.Popen[str]):
        assert process.stdout is not None
        match = re.match(r"http://(\S+)/\?token=(\S+)", process.stdout.readline())
        if match is None:
            sys.exit(f"paceline watch did not start: {process.stdout.read()}")
        self.pid, self.host = process.pid, match[1]
        answer = self.get(f"/?token={match[2]}")
        self.cookie = (answer.getheader("Set-Cookie") or "").partition(";")[0]
        self.path = re.findall(r"url=(\S+?)\"", answer.read().decode())[0]

    def get(self, target: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, timeout=600)
        connection.request("GET", target, headers={"Cookie": getattr(self, "cookie", "")})
        return connection.getresponse()

    def messages(self, query: str = "") -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the messages of a stream, each with its size in bytes."""
        stream = self.get(f"{self.path}stream?{query}")
        while line := stream.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:]), len(line)

    def peak_bytes(self) -> int:
        """Return the peak memory of the server."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


@contextmanager
def serve(runs: Path, cache: Path) -> Iterator[Client]:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "watch", str(runs)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Client(process)
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def open_run(client: Client) -> tuple[float, Iterator[tuple[dict[str, Any], int]]]:
    """Return the seconds until the curves of the only run have arrived, and its stream."""
    start = time.perf_counter()
    [row] = next(client.messages())[0]["lists"]["runs"]["rows"]
    stream = client.messages(f"run={row['id']}")
    for message, _ in stream:
        if "curve:step:loss" in message.get("tables", {}):
            break
    return time.perf_counter() - start, stream


def append_steps(run: Path, stream: Iterator[tuple[dict[str, Any], int]], first: int, count: int) -> None:
    """Append single steps, and print how long each takes to arrive and how many bytes are sent for it."""
    delays, sizes = [], []
    for number in range(first, first + count):
        event: dict[str, Any] = {"time": BEGIN + STEP_S * number, "event": "step", "step": number}
        event |= {"samples": 64 * number, "loss": random.random(), "grad_norm": 1.0, "lr": 0.1}
        event |= {"step_s": STEP_S, "data_s": 0.0, "samples_per_s": 64 / STEP_S}
        start = time.perf_counter()
        with open(run / "events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")
        sent = 0
        for message, size in stream:
            sent += size
            header = message.get("panels", {}).get("header", {})
            if header.get("step") == number:
                break
        delays.append(time.perf_counter() - start)
        sizes.append(sent)
    print(
        f"{'step written to step received':38} {statistics.median(delays):8.2f} s (most: {max(delays):.2f} s)"
    )
    print(f"{'sent for a step':38} {statistics.median(sizes) / 1e3:8.1f} kB")


def measure_list(folder: Path, run: Path, count: int) -> None:
    """Print how long the list of that many runs takes."""
    runs = folder / "many"
    runs.mkdir()
    small = (run / "events.jsonl").read_text().splitlines(keepends=True)[:1000]
    for number in range(count):
        (runs / str(number)).mkdir()
        shutil.copy(run / "spec.toml", runs / str(number))
        (runs / str(number) / "events.jsonl").write_text("".join(small))
    with serve(runs, folder / "cache-many") as client:
        start = time.perf_counter()
        rows = next(client.messages())[0]["lists"]["runs"]["rows"]
        seconds = time.perf_counter() - start
        assert len(rows) == count
        print(f"{f'list of {count} runs':38} {seconds:8.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--events", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = write_run(folder, options.steps)
        print(f"{read_cpu().name}, {os.cpu_count()} cores; a run of {options.steps:,} steps")
        for what in ("read for the first time", "read again"):
            with serve(run, folder / "cache") as client:
                seconds, stream = open_run(client)
                print(f"{what:38} {seconds:8.2f} s")
                if what == "read again":
                    append_steps(run, stream, options.steps + 1, options.events)
                    print(f"{'peak memory of the server':38} {client.peak_bytes() / 1e6:8.0f} MB")
        measure_list(folder, run, options.runs)
    packed = sum(
        len(gzip.compress(path.read_bytes())) for path in STATIC.glob("*.*") if path.suffix != ".sha256"
    )
    print(f"{'page, compressed':38} {packed / 1e3:8.1f} kB")


if __name__ == "__main__":
    main()
