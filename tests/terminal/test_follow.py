"""Lines instead of a screen, where the output is not a terminal."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from command import paceline, set_sample_delay, start, succeed, write_task
from pages import read_blocks
from run_lines import folder, started, step

ENDED = {"time": 1.7e9 + 9, "event": "ended", "step": 9, "reason": "done"}
FAILED = {"time": 1.7e9 + 9, "event": "failed", "what": "run", "message": "no memory", "step": 9}


@pytest.mark.parametrize(
    ("last", "status", "sentence"),
    [
        (ENDED, 0, "done at step 9"),
        (FAILED, 1, "failed after step 0 of 1000000: no memory"),
        (None, 1, "interrupted"),
    ],
    ids=["done", "failed", "interrupted"],
)
def test_run_that_has_ended(tmp_path, last, status, sentence):
    folder(tmp_path / "a", [started(0, 1.7e9), *([last] if last else [])])
    result = paceline("watch", "a", "--terminal", at=tmp_path)
    assert result.status == status, result.all
    headline, end = result.out.splitlines()
    assert headline.startswith("my.py:T with 9 parameters")
    assert sentence in end
    assert "\x1b" not in result.out


@pytest.mark.processes
def test_live_run_until_its_end(tmp_path):
    write_task(tmp_path)
    words = (
        "train",
        "my.py:Regression",
        "--ranks",
        "1",
        "--batch",
        "8",
        "--steps",
        "60",
        "--run-dir",
        "runs/a",
    )
    slow = set_sample_delay(tmp_path / "slow", 0.005)
    with start(*words, at=tmp_path, SLOW=str(slow)) as training:
        training.wait_for_step(tmp_path / "runs/a", 3)
        result = paceline("watch", "runs", "--terminal", at=tmp_path)
        assert training.wait().status == 0
    assert result.status == 0, result.all
    lines = result.out.splitlines()
    assert lines[1].startswith("running, step ")
    assert any(line.startswith("step ") and " samples/s" in line for line in lines[2:])
    assert any("saved ckpt/step_60" in line for line in lines)
    assert lines[-1] == "done at step 60"


def hold(run) -> int:
    """Lock a run as its launcher does."""
    import fcntl

    descriptor = os.open(run.path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_list_ends_when_no_run_trains(tmp_path):
    good = folder(tmp_path / "runs", []).path
    shutil.rmtree(good)
    good.mkdir()
    folder(good / "a", [started(0, 1.7e9), ENDED])
    live = folder(good / "b", [started(0, 1.7e9)])
    lock = hold(live)
    with start("watch", "runs", "--terminal", at=tmp_path) as watching:
        watching.wait_until(lambda: "b: running, step 0" in watching.output_so_far().out, "printed")
        assert "a: done at step 9" in watching.output_so_far().out
        with live.events.open("a") as file:
            file.write(json.dumps(step(1, 1.7e9 + 1, random.Random(1)) | {"loss": 0.5}) + "\n")
            file.write(json.dumps(FAILED) + "\n")
        os.close(lock)
        result = watching.wait()
    assert result.status == 1
    assert "b: failed after step 1 of 1000000: no memory" in result.out


def test_ctrl_c_and_removed_folder(tmp_path):
    run = folder(tmp_path / "a", [started(0, 1.7e9)])
    lock = hold(run)
    for is_removed in (False, True):
        with start("watch", "a", "--terminal", at=tmp_path) as watching:
            watching.wait_until(lambda w=watching: "running" in w.output_so_far().out, "printed")
            if is_removed:
                shutil.rmtree(run.path)
            else:
                time.sleep(0.1)
                os.kill(watching.process.pid, signal.SIGINT)
            result = watching.wait()
        assert "Traceback" not in result.all
        assert result.status == (1 if is_removed else 130), result.all
        assert ("is gone" in result.out) == is_removed
    os.close(lock)


def test_commands_of_the_page(tmp_path):
    (tmp_path / "runs").mkdir()
    folder(tmp_path / "runs/a", [started(0, 1.7e9), ENDED])
    lines = read_blocks("docs/watch.md")["terminal"].splitlines()
    assert len(lines) == 2
    for line in lines:
        program, *words = line.partition("#")[0].split()
        assert program == "paceline"
        result = paceline(*words, at=tmp_path)
        assert (result.status, "done at step 9" in result.out) == (0, True), result.all


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "no such folder: nowhere"),
        ((".", "--port", "1"), "--terminal starts no server; leave out --port"),
        (("login1:/scratch/runs",), "ssh -t login1 paceline watch /scratch/runs --terminal"),
    ],
    ids=["folder", "port", "host"],
)
def test_bad_input(tmp_path, words, message):
    result = paceline("watch", *words, "--terminal", at=tmp_path)
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.all


def test_empty_folder_is_reported(tmp_path):
    result = paceline("watch", ".", "--terminal", at=tmp_path)
    assert result.status == 1
    assert "no runs in ." in result.out


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_damaged_run_is_one_sentence(tmp_path, make):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/spec.toml").write_text("")
    make(tmp_path / "run/events.jsonl")
    result = paceline("watch", "run", "--terminal", at=tmp_path)
    assert result.status == 2
    assert "cannot read run/events.jsonl: it is not a regular file; move it away" in result.err


def test_damaged_lines_are_reported(tmp_path):
    run = folder(tmp_path / "run", [started(0, 1.7e9), {"time": 1.7e9, "event": "new"}, ENDED])
    run.events.write_text(run.events.read_text() + "half a li\n")
    result = succeed("watch", "run", "--terminal", at=tmp_path)
    assert "skipped 1 damaged line and 1 event of an unknown kind (new) in events.jsonl" in result.out
