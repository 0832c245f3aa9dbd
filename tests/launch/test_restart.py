"""Restarts of ranks: which processes are killed after a failure, and which ranks have failed."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from command import TASK, Result, events_of_kind, paceline, write_task
from paceline.doctor import heartbeat, rank_state
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.events import Failed, Started
from paceline.run import RunFolder

pytestmark = pytest.mark.processes

# A launcher whose ranks are sleeping processes. It kills all of its children, so it runs in a new process.
LAUNCHER = """
import subprocess, sys, time
from pathlib import Path
import psutil
from paceline import events
from paceline.doctor import watchdog
from paceline.events import Failed
from paceline.launch.supervise import supervise
from paceline.run import RunFolder

create_time = psutil.Process.create_time
now = time.time
watchdog.EVERY_S, watchdog.GRACE_S = 0.05, 0.2
for offset_s in (-0.99, 0.0, 0.99):
    psutil.Process.create_time = lambda process: create_time(process) + offset_s
    for late_s in (-0.99, 0.0, 0.99):
        run = RunFolder(Path(f"run{offset_s}{late_s}"))
        run.path.mkdir()

        def launch(on_restart, on_start):
            on_start()
            old = subprocess.Popen(["sleep", "600"])
            failed = Failed(time=now() + late_s, what="run", step=1, rank=1, message="a fault")
            events.append(run.events, failed)
            assert old.wait(60) == -9  # killed: it would not end by itself
            on_start()
            new = subprocess.Popen(["sleep", "600"])
            time.sleep(0.6)
            assert new.poll() is None, f"the new rank was killed, with {offset_s} and {late_s}"
            events.append(run.events, Failed(what="run", step=1, rank=0, message="another fault"))
            assert new.wait(60) == -9

        assert supervise(run, launch) == 0
print("ok")
"""


@pytest.mark.slow
def test_failure_ends_only_the_ranks_of_its_start(tmp_path: Path) -> None:
    """Errors of the clock in start times of processes and times of events do not matter."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("offset_s", [-0.99, 0.0, 0.99])
def test_process_is_identified_by_its_id_and_start_time(
    offset_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + offset_s)
    run = RunFolder(tmp_path)
    with HeartbeatWriter(run, 0, 1, 60.0, 60.0):
        while not (beats := rank_state.read_heartbeats(run)):
            time.sleep(0.01)
        [beat] = beats
        assert beat is not None
        assert rank_state.find_state(beat) == "runs"
        with subprocess.Popen(["sleep", "600"]) as other:  # as if its id were reused
            assert rank_state.find_state(replace(beat, pid=other.pid)) == "gone"
            assert (
                rank_state.find_state(replace(beat, pid=other.pid, birth=heartbeat.process_birth(other.pid)))
                == "runs"
            )
            other.kill()
            other.wait()
            assert rank_state.find_state(replace(beat, pid=other.pid)) == "gone"


# Ranks that exit with status 0 before the training is over

TASK_WITH_EXIT = TASK.replace(
    "        return (output - ",
    """        if os.environ.get("RANK") == "1" and (Path("exit")).exists():
            Path("exit").unlink()
            exec(os.environ["EXIT"])
        return (output - """,
)
TRAIN_OPTIONS = (
    "train",
    "my.py:Regression",
    "--batch",
    "24",
    "--steps",
    "30",
    "--device",
    "cpu",
    "--run-dir",
    "r",
    "--ranks",
    "2",
)


def train_with_exit(at: Path, code: str, *options: str) -> Result:
    """Train; rank 1 runs `code`, which ends it with status 0, in its first step."""
    assert TASK_WITH_EXIT != TASK
    write_task(at, TASK_WITH_EXIT)
    (at / "exit").touch()
    return paceline(*TRAIN_OPTIONS, *options, at=at, EXIT=code)


@pytest.mark.parametrize(
    ("code", "plan"),
    [
        ("os._exit(0)", "ddp"),
        ("import ctypes; ctypes.CDLL(None)._exit(0)", "local-sgd,period=2"),
        pytest.param("os.execv('/bin/true', ['true'])", "ddp", marks=pytest.mark.slow),
    ],
)
def test_rank_that_exits_with_status_0_has_failed(code: str, plan: str, tmp_path: Path) -> None:
    result = train_with_exit(tmp_path, code, "--plan", plan)
    assert result.status == 2, result.all
    assert result.err.startswith(
        "paceline: rank 1 failed: ended with exit status 0 before the training was over, "
    ), result.all
    assert [event.rank for event in events_of_kind(tmp_path / "r", Failed) if not event.lost_peer] == [1]


@pytest.mark.slow
def test_worker_that_exits_with_status_0_has_failed(tmp_path: Path) -> None:
    """The server notices that its only worker is gone."""
    result = train_with_exit(tmp_path, "os._exit(0)", "--plan", "parameter-server")
    assert result.status == 2, result.all
    assert "all 1 workers are gone" in result.err


@pytest.mark.slow
def test_rank_that_exits_with_status_0_is_restarted(tmp_path: Path) -> None:
    result = train_with_exit(tmp_path, "os._exit(0)", "--restarts", "1")
    assert result.status == 0, result.all
    assert len(events_of_kind(tmp_path / "r", Started)) == 2
    assert RunFolder(tmp_path / "r").checkpoints() == [30]
    assert not list((tmp_path / "r").glob("ranks/*.unfinished"))
