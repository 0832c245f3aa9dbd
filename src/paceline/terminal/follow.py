"""Runs as plain lines, for pipes and simple terminals, until they end."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline import events
from paceline.report.progress import show_lines
from paceline.report.run_view import glance
from paceline.report.text import format_headline
from paceline.run import RunFolder
from paceline.units import format_count, without_controls
from paceline.web.runs import RunList, describe_state

EVERY_S = 1.0  # between two looks at the files
ROW_S = 10.0  # between two lines of a running run of a list
GOOD = ("done", "stopped")

Write = Callable[[str], Any]


def is_screen() -> bool:
    """Return whether the terminal can show more than lines."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return is_terminal and is_unicode and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def follow(runs: RunList) -> int:
    """Print what happens in runs until none of them trains. Return 0, or 1 if a run failed.

    A single run is awaited if it has not started."""

    def write(text: str) -> None:
        print(text, flush=True)

    rows = runs.rows()
    if len(rows) == 1:
        return follow_run(runs.watch(rows[0]["id"]).folder, write)
    return follow_list(runs, write)


def follow_run(run: RunFolder, write: Write) -> int:
    """Print the events of a run from now on until it ends. Return 1 if it failed or was interrupted."""
    with events.readable(run.events):
        reader = events.EventReader(run.events, events.end(run.events))
    seen = glance(run)
    summary = seen.summary
    if seen.skipped:
        write(str(seen.skipped))
    if summary.started is not None:
        write(format_headline(summary.started))
    state, sentence = describe_state(run, summary)
    write(sentence)
    show = show_lines(lambda text: write(without_controls(text)))
    while state in ("running", "not started"):
        time.sleep(EVERY_S)
        if not run.path.is_dir():
            write(f"the folder {run.path} is gone")
            return 1
        for event in reader.new():
            show(event)
        state, now = describe_state(run, glance(run).summary)
        if state not in ("running", "not started"):
            for event in reader.new():  # those that it wrote until its end
                show(event)
            write(now)
    return 0 if state in GOOD else 1


def follow_list(runs: RunList, write: Write) -> int:
    """Print the state of each run of a folder when it changes. Return 1 if a run that trained then failed."""
    shown: dict[str, tuple[str, float]] = {}  # by run: its last line, and when it was printed
    trained: set[str] = set()
    problem = ""
    while True:
        rows, now = runs.rows(), time.monotonic()
        for row in rows:
            state, at = shown.get(row["id"], ("", -ROW_S))
            if row["state"] == "running":
                trained.add(row["id"])
            if state != row["state"] or (state == "running" and now - at >= ROW_S):
                write(_describe(row))
                shown[row["id"]] = (row["state"], now)
        if runs.problem != problem:
            problem = runs.problem
            write(problem)
        if not any(row["state"] == "running" for row in rows):
            failed = [row for row in rows if row["id"] in trained and row["state"] not in GOOD]
            return 1 if failed or not rows else 0
        time.sleep(EVERY_S)


def _describe(row: dict[str, Any]) -> str:
    """Return a line as `paceline status` prints it."""
    text = f"{row['name']}: {row['problem'] or row.get('sentence', row['state'])}"
    if row.get("loss") is not None:
        text += f", loss {row['loss']:.4f}"
    if row.get("samples_per_s") is not None:
        text += f", {format_count(row['samples_per_s'])} samples/s"
    return text
