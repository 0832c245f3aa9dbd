"""Printing may fail in any way: the training continues, saves and writes its log."""

import os
import threading
from pathlib import Path

import pytest

import warm
from command import PACELINE, TASK, TIMEOUT_S, clean_environment, events_of_kind, paceline, write_task
from paceline.events import Ended
from paceline.output import open_append
from paceline.run import RunFolder

pytestmark = pytest.mark.processes

# A task with much output.
PRINTS = TASK.replace("        return (output - ", "        print('loss' * 100)\n        return (output - ")
OPTIONS = ("train", "my.py:Regression", "--batch", "24", "--steps", "30", "--device", "cpu", "--run-dir", "r")


def is_complete(run: Path) -> bool:
    assert [event.reason for event in events_of_kind(run, Ended)] == ["done"]
    assert RunFolder(run).checkpoints() == [30]
    return RunFolder(run).log.read_text().rstrip().endswith("done")


def read_first_line(pipe: Path, lines: list[str]) -> None:
    with open(pipe) as file:
        lines.append(file.readline())


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        ("1", "full"),
        ("1", "gone"),
        *(pytest.param("2", what, marks=pytest.mark.slow) for what in ("full", "gone")),
    ],
)
def test_a_training_survives_failing_standard_output(ranks: str, what: str, tmp_path: Path) -> None:
    """As with `> /dev/full 2>&1` and with `2>&1 | head -1`."""
    assert PRINTS != TASK
    write_task(tmp_path, PRINTS)
    target, lines = "/dev/full", list[str]()
    reader = threading.Thread(target=read_first_line, args=(tmp_path / "pipe", lines))
    if what == "gone":
        target = str(tmp_path / "pipe")
        os.mkfifo(target)
        reader.start()
    training = warm.start([*OPTIONS, "--ranks", ranks], tmp_path, clean_environment(), target, target)
    status = training.wait(TIMEOUT_S)
    if what == "gone":
        reader.join()
        assert len(lines) == 1
    assert status == 0
    assert is_complete(tmp_path / "r")


def test_closed_standard_files(tmp_path: Path) -> None:
    """Otherwise the next opened files get these descriptors, and prints go into them."""
    write_task(tmp_path, PRINTS)
    result = paceline(*OPTIONS, at=tmp_path, program=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PACELINE))
    assert (result.status, result.out, result.err) == (0, "", "")
    assert is_complete(tmp_path / "r")
    assert not [
        path for path in (tmp_path / "r").rglob("*") if path.is_file() and b"lossloss" in path.read_bytes()
    ]


def test_an_error_without_output_keeps_its_exit_status(tmp_path: Path) -> None:
    def status(*words: str) -> int:
        return warm.start(words, tmp_path, clean_environment(), "/dev/full", "/dev/full").wait(TIMEOUT_S)

    assert status("train", "nothing.py") == 2
    assert status("--version") != 0, "its result is lost"


def test_a_full_disk_under_standard_output_is_reported_in_a_sentence(tmp_path: Path) -> None:
    err = tmp_path / "err"
    err.touch()
    status = warm.start(["--version"], tmp_path, clean_environment(), "/dev/full", str(err))
    assert status.wait(TIMEOUT_S) == 2
    assert err.read_text() == "paceline: cannot write: No space left on device\n"


def test_write_errors_of_a_text_file_are_ignored(tmp_path: Path) -> None:
    with open_append(Path("/dev/full")) as file:
        print("lost", file=file)
        print("also \udc80", file=file)
    assert file.closed
    with open_append(tmp_path / "log") as file:
        print("kept", file=file)
    assert (tmp_path / "log").read_text() == "kept\n"
