"""The ranks of a study on several nodes: agents, a lost node, and the nodes of Slurm and Ray."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from command import (
    PACELINE,
    TASK,
    clean_environment,
    events_of_kind,
    paceline,
    set_sample_delay,
    succeed,
    write_task,
)
from paceline.doctor.rank_state import read_heartbeats
from paceline.errors import LaunchError
from paceline.events import Ended, Started
from paceline.run import RunFolder, create
from paceline.spec import load
from paceline.tuning.executors import node_agent, remote_node
from paceline.tuning.executors.pool import Executor
from paceline.tuning.executors.remote_node import LOST, ProcessConnection, RemoteNode
from paceline.tuning.journal import Finished, Launched, read_state
from slurm import start_cluster, wait_until

pytestmark = pytest.mark.processes

SPACE = (
    "--space",
    "lr=log:1e-3:1e-1",
    "--set",
    "validation=20",
    "--set",
    "samples=40",
    "--set",
    "spec.threads=1",
)
LENGTH = ("--batch", "16", "--steps", "4", "--device", "cpu")
STUDY = ("my.py:Regression", *SPACE, *LENGTH)


class SimulatedNode:
    """A node whose ranks are counted, and never used."""

    def __init__(self, name: str, ranks: int):
        self.name, self.ranks, self.is_lost = name, ranks, False

    def wait_until_ready(self) -> float:
        return 3.0

    def start(self, run, log, ranks, slots, hosts=()):
        self.hosts = hosts
        return subprocess.Popen(["sleep", "1000"])

    def check(self):
        pass

    def watch(self, child):
        return os.pidfd_open(child.pid)


def test_trials_fill_the_fullest_node_that_has_room(tmp_path):
    """Two ranks on one node never count as room for a trial of two ranks if they are on different nodes."""
    small, large = SimulatedNode("small", 2), SimulatedNode("large", 3)
    executor = Executor([large, small])
    try:
        executor.start(0, tmp_path, tmp_path / "0", 1)
        assert executor.running[0].nodes == [small]
        executor.start(1, tmp_path, tmp_path / "1", 2)
        assert executor.running[1].nodes == [large]
        assert executor.has_room(1)
        assert not executor.has_room(2)
        executor.running[0].process.kill()
        executor.wait(600)  # until it has ended
        assert [(trial.number, status) for trial, status in executor.collect()] == [(0, -signal.SIGKILL)]
        assert executor.has_room(2)
        small.is_lost = True
        assert executor.has_room(1)
        assert not executor.has_room(2)
        large.is_lost = True
        with pytest.raises(LaunchError, match="all nodes of the study were lost"):
            executor.has_room(1)
    finally:
        for trial in executor.running.values():
            trial.process.kill()
            trial.process.wait()


def test_trial_of_several_nodes_waits_until_they_are_free(tmp_path):
    nodes = [SimulatedNode(name, 2) for name in ("n1", "n2", "n3")]
    executor = Executor(nodes)
    try:
        executor.start(0, tmp_path, tmp_path / "0", 1)
        executor.start(1, tmp_path, tmp_path / "1", 4)
        assert (executor.running[1].nodes, nodes[1].hosts) == (nodes[1:], ["n2", "n3"])
        assert executor.has_room(1)
        assert not executor.has_room(2)
        executor.running[0].process.kill()
        executor.wait(600)
        assert len(list(executor.collect())) == 1
        assert executor.has_room(2)
        assert not executor.has_room(4)
        nodes[2].is_lost = True
        assert executor.running[1].is_lost
        executor.running[1].process.kill()
        executor.wait(600)
        assert len(list(executor.collect())) == 1
        assert executor.has_room(4)
        nodes[1].is_lost = True
        assert not executor.has_room(4)
    finally:
        for trial in executor.running.values():
            trial.process.kill()
            trial.process.wait()


def find_hosts(runs: Sequence[Path]) -> set[str]:
    """Return the nodes of the ranks whose heartbeats can be read."""
    beats = [beat for run in runs for beat in read_heartbeats(RunFolder(run))]
    return {beat.host for beat in beats if beat is not None}


@pytest.mark.slow
def test_agent_trains_and_a_lost_node_is_noticed(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.0)
    environ = clean_environment(SLOW=str(slow), PYTHONPATH=str(tmp_path))
    overrides = {"task": f"{tmp_path}/my.py:Regression", "steps": 4, "batch": 16, "device": "cpu", "ranks": 1}
    runs = [create(tmp_path / name, *load(None, overrides)).path for name in ("first", "second")]
    command = ["env", *(f"{name}={value}" for name, value in environ.items()), sys.executable]
    connection = ProcessConnection([*command, *node_agent.WORDS, "2"])
    node = RemoteNode("n", 2, connection)
    try:
        assert 0 <= node.wait_until_ready() <= psutil.cpu_count()
        node.check()
        assert not node.is_lost
        child = node.start(runs[0], tmp_path / "first.txt", 1, [0])
        assert child.wait() == 0, (tmp_path / "first.txt").read_text()
        assert events_of_kind(runs[0], Ended)[-1].step == 4
        set_sample_delay(slow, 0.05)
        child = node.start(runs[1], tmp_path / "second.txt", 1, [1])
        wait_until(lambda: events_of_kind(runs[1], Started), "started", runs[1])
        connection._process.kill()
        assert child.wait() == LOST
        assert node.is_lost
        wait_until(lambda: RunFolder(runs[1]).checkpoints(), "saved without its agent", runs[1])
    finally:
        node.close()


def test_agent_that_does_not_start_is_described():
    node = RemoteNode("n7", 1, ProcessConnection(["sh", "-c", "echo no such user >&2; exit 3"]))
    with pytest.raises(LaunchError, match=r"^the agent on node n7 did not start: no such user$"):
        node.wait_until_ready()
    node.close()


def test_agent_that_does_not_answer_is_lost(monkeypatch):
    monkeypatch.setattr(remote_node, "ANSWER_S", 0.1)
    node = RemoteNode("n7", 1, ProcessConnection(["sleep", "1000"]))
    try:
        assert not node.is_lost
        node.check()
        assert node.is_lost
    finally:
        node._connection._process.kill()
        node.close()


def test_job_script_runs_the_controller(tmp_path):
    """The script differs from that of a training only in what it runs, and in what counts as progress."""
    write_task(tmp_path)
    place = ("--nodes", "2", "--ranks", "4", "--time", "01:00:00", "--run-dir", "s", "--dry-run")
    script = succeed("tune", *STUDY, *place, at=tmp_path).out
    assert not (tmp_path / "s").exists()
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    train = succeed("submit", "my.py:Regression", *place[:-3], "--run-dir", "s", "--dry-run", at=tmp_path).out
    added = [line for line in script.splitlines() if line not in train.splitlines()]
    assert len(added) == 6, added
    assert {"#SBATCH --no-kill", "#SBATCH --cpus-per-task=2", "export SRUN_CPUS_PER_TASK=2"} < {*added}
    [command] = [line for line in added if "-m paceline" in line]
    assert command.endswith('-m paceline tune "$run" --resume &')
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --time=01:00:00" in script


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "2"], "ranks=1 cannot be spread evenly over 2 nodes; use --ranks 2"),
        (
            ["--nodes", "2", "--ranks", "4", "--ranks-per-trial", "3"],
            "from 1 to the 2 ranks of a node or a multiple of them up to 4, got 3; use --ranks 6",
        ),
        (
            ["--nodes", "2", "--ranks", "4", "--ranks-per-trial", "4", "--launcher", "ray"],
            "from 1 to the 2 ranks of a node, got 4; use --ranks 8",
        ),
        (["--nodes", "2", "--launcher", "local"], "nodes=2 requires launcher slurm or ray"),
        (["--launcher", "pbs"], "launcher"),
        (["--time", "01:00:00"], "--time is for a Slurm job; add --launcher slurm"),
    ],
    ids=["uneven", "not whole nodes", "several nodes of Ray", "local", "unknown", "no job"],
)
def test_wrong_nodes_are_refused(words, sentence, tmp_path):
    write_task(tmp_path)
    result = paceline("tune", *STUDY, *words, "--run-dir", "s", at=tmp_path)
    assert result.status == 2, result.all
    [line] = result.err.strip().splitlines()
    assert sentence in line
    assert not (tmp_path / "s").exists()


def check_complete(study: Path, trials: int) -> None:
    """Check that each trial of a study was trained to its end, and finished once."""
    state = read_state(study / "events.jsonl")
    assert [trial.state for trial in state.trials.values()] == ["complete"] * trials
    assert sorted(event.trial for event in state.events if isinstance(event, Finished)) == list(range(trials))
    for number in range(trials):
        assert RunFolder(study / "trials" / str(number)).checkpoints()[-1] == 4


@pytest.mark.slurm
@pytest.mark.slow
def test_job_uses_both_nodes_and_continues_after_its_time_limit(tmp_path):
    write_task(tmp_path)
    (tmp_path / "slurm").mkdir()
    slow, study = set_sample_delay(tmp_path / "slow", 0.1), tmp_path / "s"
    with start_cluster(tmp_path / "slurm") as slurm:
        env = clean_environment(OMP_NUM_THREADS="1", SLOW=str(slow), **slurm.env)
        command = [
            *PACELINE,
            "tune",
            *STUDY,
            "--nodes",
            "2",
            "--ranks",
            "2",
            "--trials",
            "4",
            "--run-dir",
            "s",
        ]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        match = re.fullmatch(r"s: job (\d+)\n", done.stdout)
        assert match, done.stdout + done.stderr
        running = [study / "trials" / str(number) for number in range(2)]
        wait_until(lambda: all(events_of_kind(run, Started) for run in running), "started", study)
        wait_until(lambda: find_hosts(running) == {"n1", "n2"}, "on both nodes", study)
        slurm.run("scancel", "-s", "USR1", "--batch", match[1])
        wait_until(lambda: "queued again" in _read_log(study), "queued again", study)
        before = read_state(study / "events.jsonl")
        assert [trial.state for trial in before.trials.values()] == ["running", "running"]
        set_sample_delay(slow, 0.0)
        slurm.wait_for_state(match[1], "PENDING")
        time.sleep(2)  # Slurm refuses to start a job again in the second in which it was killed
        slurm.run("scontrol", "update", f"JobId={match[1]}", "StartTime=now")
        slurm.wait_for_state(match[1], "COMPLETED")
    check_complete(study, 4)
    launched = [
        event.trial for event in read_state(study / "events.jsonl").events if isinstance(event, Launched)
    ]
    assert sorted(launched) == [0, 0, 1, 1, 2, 3]
    assert events_of_kind(running[0], Started)[-1].step > 0


@pytest.mark.slurm
@pytest.mark.slow
def test_trial_on_both_nodes_continues_after_its_time_limit(tmp_path):
    """Its ranks are on two nodes. A failed trial frees both, and does not end the study."""
    task = TASK.replace(
        "    def model(self):", "    def model(self):\n        assert self.width != 5, 'too odd'"
    )
    write_task(tmp_path, task)
    (tmp_path / "slurm").mkdir()
    slow, study = set_sample_delay(tmp_path / "slow", 0.1), tmp_path / "s"
    with start_cluster(tmp_path / "slurm") as slurm:
        env = clean_environment(OMP_NUM_THREADS="1", SLOW=str(slow), **slurm.env)
        place = ("--nodes", "2", "--ranks", "2", "--ranks-per-trial", "2", "--run-dir", "s")
        command = [*PACELINE, "tune", STUDY[0], "--grid", "width=5,4,8", *STUDY[3:], *place]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        match = re.fullmatch(r"s: job (\d+)\n", done.stdout)
        assert match, done.stdout + done.stderr
        run = study / "trials" / "1"
        wait_until(lambda: events_of_kind(run, Started), "started", study)
        wait_until(lambda: find_hosts([run]) == {"n1", "n2"}, "on both nodes", study)
        slurm.run("scancel", "-s", "USR1", "--batch", match[1])
        wait_until(lambda: "queued again" in _read_log(study), "queued again", study)
        assert RunFolder(run).checkpoints()
        set_sample_delay(slow, 0.0)
        slurm.wait_for_state(match[1], "PENDING")
        time.sleep(2)  # Slurm refuses to start a job again in the second in which it was killed
        slurm.run("scontrol", "update", f"JobId={match[1]}", "StartTime=now")
        slurm.wait_for_state(match[1], "COMPLETED", timeout_s=240)
    failed, *trained = read_state(study / "events.jsonl").trials.values()
    assert (failed.state, "too odd" in failed.message) == ("failed", True), failed
    assert [(trial.state, trial.ranks) for trial in trained] == [("complete", 2)] * 2
    assert [event.ranks for event in events_of_kind(run, Started)] == [2, 2]
    assert events_of_kind(run, Started)[-1].step > 0


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trial_on_both_nodes_continues_after_the_loss_of_a_node(tmp_path):
    """The trial does not fail. The other node is too small for it, so it continues when both are there."""
    write_task(tmp_path)
    (tmp_path / "slurm").mkdir()
    slow, study = set_sample_delay(tmp_path / "slow", 0.1), tmp_path / "s"
    run = study / "trials" / "0"
    with start_cluster(tmp_path / "slurm") as slurm:
        env = clean_environment(OMP_NUM_THREADS="1", SLOW=str(slow), **slurm.env)
        place = ("--nodes", "2", "--ranks", "2", "--ranks-per-trial", "2", "--trials", "2")
        options = (*STUDY, "--set", "spec.save.every=1", *place, "--run-dir", "s")

        def tune(*words: str) -> str:
            command = [*PACELINE, "tune", *words]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
            match = re.fullmatch(r"s: job (\d+)\n", done.stdout)
            assert match, done.stdout + done.stderr
            return match[1]

        job = tune(*options)
        wait_until(lambda: RunFolder(run).checkpoints(), "saved", study)
        slurm.power_off("n2")
        slurm.wait_for_state(job, "FAILED", timeout_s=180)
        slurm.restore("n2")
        [trial] = read_state(study / "events.jsonl").trials.values()
        assert trial.state == "running", trial
        assert "Traceback" not in _read_log(study)
        assert re.search(
            r"paceline: n2 was lost, and the next trial needs more ranks than the 1 of n1; "
            r"continue with --resume when there are others\n",
            _read_log(study),
        ), _read_log(study)
        set_sample_delay(slow, 0.0)
        slurm.wait_for_state(tune("s", "--resume"), "COMPLETED", timeout_s=240)
    check_complete(study, 2)
    assert [event.ranks for event in events_of_kind(run, Started)] == [2, 2]
    assert events_of_kind(run, Started)[-1].step > 0


def _read_log(study: Path) -> str:
    return "".join(path.read_text() for path in study.glob("slurm-*.out"))


@pytest.mark.ray
@pytest.mark.slow
def test_ray_trains_the_trials(tmp_path):
    write_task(tmp_path)
    words = ("--launcher", "ray", "--ranks", "2", "--trials", "3", "--run-dir", "s")
    succeed("tune", *STUDY, *words, at=tmp_path, RAY_AUTH_MODE="disabled", RAY_ADDRESS="local", timeout_s=200)
    check_complete(tmp_path / "s", 3)
