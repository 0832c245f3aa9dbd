"""Time, memory and traffic of `paceline watch`: a run of a million steps, and a folder of 500 runs.

python benchmarks/page.py [--steps 1000000] [--runs 500] [--events 20]

Times end when a headless Chromium has drawn the data: for a run, the curve of the loss; for an event, the
number in the heading of that curve.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from browser import Browser, start_browser

# The time, on the clock of the system, at which the page has drawn a frame after a condition holds.
DRAWN = """new Promise(done => {
    const look = () => (CONDITION)
        ? requestAnimationFrame(() => requestAnimationFrame(() => done(Date.now() / 1000)))
        : setTimeout(look, 5);
    look();
})"""
LOSS = "document.querySelector('section[aria-label=\"Loss\"]')"
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
        start_new_session=True,  # so that this process is the server, not one that waits for it
    )
    try:
        yield Client(process)
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def open_page(browser: Browser, client: Client, condition: str, fragment: str = "") -> float:
    """Return the seconds from opening the page until it has drawn a frame after a condition holds."""
    address = f"http://{client.host}{client.path}"
    browser.log_in(address, client.cookie, client.path)
    start = time.time()
    browser.open(address + fragment)
    return wait_until_drawn(browser, condition) - start


def wait_until_drawn(browser: Browser, condition: str) -> float:
    drawn: float = browser.run(DRAWN.replace("CONDITION", condition))
    return drawn


def append_steps(browser: Browser, run: Path, first: int, count: int) -> None:
    """Append single steps, and print how long each takes from the write to the pixel."""
    delays = []
    for number in range(first, first + count):
        event: dict[str, Any] = {"time": BEGIN + STEP_S * number, "event": "step", "step": number}
        event |= {"samples": 64 * number, "loss": 1000.0 + number - first, "grad_norm": 1.0, "lr": 0.1}
        event |= {"step_s": STEP_S, "data_s": 0.0, "samples_per_s": 64 / STEP_S}
        written = time.time()
        with open(run / "events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")
        shown = f"now {1000 + number - first:,}"
        delays.append(wait_until_drawn(browser, f"{LOSS}.innerText.includes('{shown}')") - written)
        time.sleep(random.random())
    median, most = statistics.median(delays), max(delays)
    print(f"{'step written to pixel':46} {median:8.2f} s (most: {most:.2f} s)")


def measure_run(folder: Path, run: Path, steps: int, events: int) -> None:
    """Print how long the first paint of the run takes, and then a new event; and the memory of the server."""
    has_curve = f"{LOSS}?.innerText.includes('now')"
    has_all = f"{has_curve} && !document.querySelector('[role=status]').innerText.includes('being read')"
    with start_browser() as browser:
        for what in ("first paint, read for the first time", "first paint, the server was started again"):
            with serve(run, folder / "cache") as client:
                began = time.time()
                print(f"{what:46} {open_page(browser, client, has_curve):8.2f} s")
                print(f"{'  all steps are drawn':46} {wait_until_drawn(browser, has_all) - began:8.2f} s")
                if "again" not in what:
                    continue
                again = statistics.median(open_page(browser, client, has_curve) for _ in range(5))
                print(f"{'first paint, the page was opened again':46} {again:8.2f} s")
                append_steps(browser, run, steps + 1, events)
                print(f"{'peak memory of the server':46} {client.peak_bytes() / 1e6:8.0f} MB")
                assert browser.errors == []


def measure_list(folder: Path, run: Path, count: int) -> None:
    """Print how long the list of that many runs takes, and how many bytes a new step costs."""
    runs = folder / "many"
    runs.mkdir()
    small = (run / "events.jsonl").read_text().splitlines(keepends=True)[:1000]
    for number in range(count):
        (runs / str(number)).mkdir()
        shutil.copy(run / "spec.toml", runs / str(number))
        (runs / str(number) / "events.jsonl").write_text("".join(small))
    with serve(runs, folder / "cache-many") as client, start_browser() as browser:
        has_list = f"document.querySelectorAll('tbody tr').length == {count}"
        print(f"{f'list of {count} runs':46} {open_page(browser, client, has_list):8.2f} s")
        stream = client.messages()
        first, whole = next(stream)
        assert len(first["lists"]["runs"]["rows"]) == count
        sizes = []
        for number in range(5):
            with open(runs / str(number) / "events.jsonl", "a") as file:
                file.write(small[-1])
            sizes.append(next(stream)[1])
        print(f"{'sent for the list':46} {whole / 1e3:8.1f} kB")
        print(f"{'sent for a step of one of these runs':46} {statistics.median(sizes) / 1e3:8.1f} kB")


def measure_traffic(folder: Path, run: Path, steps: int) -> None:
    """Print how many bytes are sent for the curves of a run, and for a new step."""
    with serve(run, folder / "cache") as client:
        [row] = next(client.messages())[0]["lists"]["runs"]["rows"]
        stream = client.messages(f"run={row['id']}")
        whole = 0
        for message, size in stream:
            whole += size
            if "curve:step:grad_norm" in message.get("tables", {}):  # not in a sample of the steps
                break
        lines = (run / "events.jsonl").read_text().splitlines()[-1]
        step = json.loads(lines) | {"step": steps}
        with open(run / "events.jsonl", "a") as file:
            file.write(json.dumps(step) + "\n")
        sent = 0
        for message, size in stream:
            sent += size
            if message.get("panels", {}).get("header", {}).get("step") == steps:
                break
        print(f"{'sent for the run':46} {whole / 1e3:8.1f} kB")
        print(f"{'sent for a step of the run':46} {sent / 1e3:8.1f} kB")


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
        measure_run(folder, run, options.steps, options.events)
        measure_traffic(folder, run, options.steps + options.events + 1)
        measure_list(folder, run, options.runs)
    packed = sum(
        len(gzip.compress(path.read_bytes())) for path in STATIC.glob("*.*") if path.suffix != ".sha256"
    )
    print(f"{'page, compressed':46} {packed / 1e3:8.1f} kB")


if __name__ == "__main__":
    main()
