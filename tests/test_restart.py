"""Ranks that are started again: which processes are ended for a failure, and which ranks have failed."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.doctor import ask, beat
from paceline.doctor.pulse import Pulse
from paceline.run import RunFolder

# A launcher whose ranks are sleeping processes. Another process than this one: it ends all of its children.
LAUNCHER = """
import subprocess, sys, time
from pathlib import Path
import psutil
from paceline import events
from paceline.doctor import lookout
from paceline.events import Failed
from paceline.launch.attend import attend
from paceline.run import RunFolder

true = psutil.Process.create_time
true_time = time.time
lookout.EVERY_S, lookout.GRACE_S = 0.05, 0.2
for offset_s in (-0.99, 0.0, 0.99):
    psutil.Process.create_time = lambda process: true(process) + offset_s
    for late_s in (-0.99, 0.0, 0.99):
        run = RunFolder(Path(f"run{offset_s}{late_s}"))
        run.path.mkdir()

        def launch(again, begin):
            begin()
            old = subprocess.Popen(["sleep", "600"])
            events.append(run.events, Failed(time=true_time() + late_s, what="run", step=1, rank=1, message="a fault"))
            assert old.wait(60) == -9  # it would not have ended
            begin()
            new = subprocess.Popen(["sleep", "600"])
            time.sleep(0.6)
            assert new.poll() is None, f"the new rank was killed, with {offset_s} and {late_s}"
            events.append(run.events, Failed(what="run", step=1, rank=0, message="another fault"))
            assert new.wait(60) == -9

        assert attend(run, launch) == 0
print("all right")
"""


def test_a_failure_ends_the_ranks_of_its_start_and_no_later_ones(tmp_path: Path) -> None:
    """Whatever the clocks say of when processes began, and of when it happened."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "all right\n", done.stderr


@pytest.mark.parametrize("offset_s", [-0.99, 0.0, 0.99])
def test_a_process_is_known_by_its_id_and_birth(offset_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: true(process) + offset_s)
    run = RunFolder(tmp_path)
    with Pulse(run, 0, 1, 60.0, 60.0):
        while not (found := ask.beats(run)):
            time.sleep(0.01)
        [its] = found
        assert its is not None
        assert ask.state(its) == "runs"
        with subprocess.Popen(["sleep", "600"]) as another:  # which has its id by now
            assert ask.state(replace(its, pid=another.pid)) == "gone"
            assert ask.state(replace(its, pid=another.pid, birth=beat.birth(another.pid))) == "runs"
            another.kill()
            another.wait()
            assert ask.state(replace(its, pid=another.pid)) == "gone"
