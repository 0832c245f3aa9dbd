"""Reports of the start of a training, and of its total time."""

import re
from pathlib import Path

import pytest

from command import PACELINE, events_of_kind, succeed, write_task
from paceline.events import Started

pytestmark = pytest.mark.processes

WORDS = (
    "train",
    "my.py:Regression",
    "--batch",
    "24",
    "--steps",
    "8",
    "--device",
    "cpu",
    "--run-dir",
    "r",
    "--set",
    "spec.threads=1",
)
PHASES = ["imports", "ranks meet", "data", "model", "state"]


def row(name: str, text: str) -> str:
    [found] = re.findall(rf"^{name}  +(.*?) *$", text, re.M)
    return found


def test_start_is_shown_during_and_after_it(tmp_path: Path) -> None:
    """A cold start, as a user sees it."""
    write_task(tmp_path)
    output = succeed(*WORDS, at=tmp_path, program=PACELINE).out
    assert output.startswith("starting: importing PyTorch and the task\n")
    [started] = events_of_kind(tmp_path / "r", Started)
    assert list(started.start_s) == PHASES
    assert min(started.start_s.values()) >= 0
    log = (tmp_path / "r/log.txt").read_text()
    assert re.search(r"start [\d.]+ m?s: imports [\d.]+ m?s, ranks meet .*, data .*, model .*, state ", log)
    assert re.fullmatch(
        r"[\d.]+ m?s: start [\d.]+ m?s, training [\d.]+ m?s, end [\d.]+ m?s", row("wall", output)
    )


@pytest.mark.slow
def test_table_covers_the_whole_training_after_a_resume(tmp_path: Path) -> None:
    write_task(tmp_path)
    first = succeed(*WORDS, "--ranks", "2", at=tmp_path).out
    again = succeed("resume", "r", "--steps", "12", at=tmp_path).out
    assert [list(started.start_s) for started in events_of_kind(tmp_path / "r", Started)] == [
        ["launcher", *PHASES]
    ] * 2
    assert row("loss", again).split(" → ")[0] == row("loss", first).split(" → ")[0]
    assert row("loss", again).split(" → ")[1] != row("loss", first).split(" → ")[1]
    shown = succeed("show", "r", at=tmp_path).out
    for name in ("loss", "time", "wall", "speed"):
        assert row(name, shown) == row(name, again)


@pytest.mark.slow
def test_bench_reports_progress_without_a_terminal(tmp_path: Path) -> None:
    assert "measuring: " in succeed("bench", "compute", "--seconds", "0.5", at=tmp_path).err
    words = ("collectives", "--ranks", "2", "--sizes", "1KB", "--operations", "broadcast", "--seconds", "0.5")
    assert "measuring: broadcast gloo" in succeed("bench", *words, at=tmp_path).err
