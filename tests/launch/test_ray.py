"""Ranks on a local Ray or a Ray cluster train the same. Failures are reported once; no process remains."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from command import (
    MARK,
    Running,
    checkpoint_weights,
    clean_environment,
    events_of_kind,
    last_step,
    paceline,
    set_sample_delay,
    start,
    succeed,
    unequal_tensors,
    write_task,
)
from paceline.distributed.world import read_world
from paceline.errors import LaunchError
from paceline.events import Ended, Failed, Started
from paceline.launch import launchers
from paceline.launch.ray.actor import ActorPlacement, order_by_node
from paceline.launch.spawn import build_rank_environments
from paceline.run import RunFolder
from paceline.spec import Launch

pytestmark = pytest.mark.processes

TRAIN_OPTIONS = (
    "my.py:Regression",
    "--steps",
    "40",
    "--batch",
    "24",
    "--save-every",
    "4",
    "--device",
    "cpu",
    "--seed",
    "5",
)
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Return the final weights of a training without Ray."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_task(folder)
    succeed("train", *TRAIN_OPTIONS, "--ranks", "2", "--run-dir", "r", at=folder)
    return checkpoint_weights(folder / "r")


def start_training(folder: Path, *words: str, **env: str) -> Running:
    """Start a training on Ray with slow samples, so that a test can disturb it."""
    write_task(folder)
    slow = set_sample_delay(folder / "slow", 0.01)
    return start(
        "train",
        *TRAIN_OPTIONS,
        "--ranks",
        "2",
        "--run-dir",
        "r",
        "--launcher",
        "ray",
        *words,
        at=folder,
        **{"SLOW": str(slow)} | RAY | env,
    )


def wait_for_checkpoint(running: Running, run: Path) -> None:
    running.wait_until(
        lambda: last_step(run) >= 6 and bool(RunFolder(run).checkpoints()), "at step 6, with a checkpoint"
    )


def find_ranks(running: Running) -> dict[int, psutil.Process]:
    return {
        int(process.environ()["RANK"]): process
        for process in running.remaining_processes()
        if process.cmdline()[1:4] == ["-m", "paceline", "rank"]
    }


@pytest.mark.ray
@pytest.mark.slow
def test_killed_rank_is_restarted(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    run = tmp_path / "r"
    with start_training(tmp_path, "--restarts", "1") as running:
        wait_for_checkpoint(running, run)
        find_ranks(running)[1].kill()
        (tmp_path / "slow").unlink()
        result = running.wait()
        assert result.status == 0, result.all
        running.wait_until_all_ended()
    assert (result.err, "ray" in result.out.lower(), result.out.count("463 parameters")) == ("", False, 2), (
        result.all
    )
    assert [started.step > 0 for started in events_of_kind(run, Started)] == [False, True]
    assert not unequal_tensors(checkpoint_weights(run), undisturbed)
    assert {path.name for path in (run / "ranks").glob("*.log")} == {
        "0.log",
        "1.log",
        "0.restart-1.log",
        "1.restart-1.log",
    }


@pytest.mark.slow
@pytest.mark.ray
def test_more_ranks_than_cpus_are_refused(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    request = ("--ranks", str(cores + 1), "--batch", str(cores + 1), "--device", "cpu")
    result = paceline("train", *request, "--launcher", "ray", at=tmp_path, **RAY)
    message = (
        f"paceline: --ranks must be at most {cores}, the CPUs of the Ray cluster, got {cores + 1}; "
        f"use --ranks {cores}\n"
    )
    assert (result.status, result.out, result.err) == (2, "", message)
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name
)
def test_stop_signal_saves_a_checkpoint(
    number: signal.Signals, tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    run = tmp_path / "r"
    with start_training(tmp_path) as running:
        wait_for_checkpoint(running, run)
        running.process.send_signal(number)
        result = running.wait()
        assert result.status == 75, result.all
        running.wait_until_all_ended()
    assert (result.err, events_of_kind(run, Ended)[-1].reason) == ("", "stopped")
    assert (run / "report.html").exists()
    succeed("resume", "r", "--launcher", "local", at=tmp_path)
    assert not unequal_tensors(checkpoint_weights(run), undisturbed)


@pytest.mark.ray
@pytest.mark.slow
def test_killed_rank_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "r"
    with start_training(tmp_path) as running:
        wait_for_checkpoint(running, run)
        find_ranks(running)[0].kill()
        result = running.wait()
        assert result.status == 2, result.all
        running.wait_until_all_ended()
    assert result.err.startswith(
        f"paceline: rank 0 was killed by SIGKILL, after step {last_step(run)}; continue from step"
    ), result.all
    assert [event.rank for event in events_of_kind(run, Failed) if not event.lost_peer] == [0]
    assert (run / "report.html").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_killed_actor_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "r"
    with start_training(tmp_path) as running:
        wait_for_checkpoint(running, run)
        find_ranks(running)[1].parent().kill()
        result = running.wait()
        assert result.status == 2, result.all
        running.wait_until_all_ended()
    kept = RunFolder(run).checkpoints()[-1]  # the rank notices, and all ranks save
    message = (
        f"paceline: rank 1 was lost with its node, after step {kept}; "
        f"continue from step {kept} with: paceline resume r\n"
    )
    assert result.err.startswith(message), result.all
    assert "raylet" not in result.out


@pytest.mark.ray
@pytest.mark.slow
def test_no_process_outlives_a_killed_launcher(tmp_path: Path, undisturbed: dict[str, np.ndarray]) -> None:
    run = tmp_path / "r"
    with start_training(tmp_path) as running:
        wait_for_checkpoint(running, run)
        running.process.kill()
        running.wait_until_all_ended()
    succeed("resume", "r", "--launcher", "local", at=tmp_path)
    assert not unequal_tensors(checkpoint_weights(run), undisturbed)


@pytest.mark.ray
@pytest.mark.slow
def test_parameter_server_trains(tmp_path: Path) -> None:
    with start_training(tmp_path, "--plan", "parameter-server,servers=1", "--ranks", "2") as running:
        wait_for_checkpoint(running, tmp_path / "r")
        (tmp_path / "slow").unlink()
        result = running.wait()
    assert result.status == 0, result.all


@pytest.fixture
def cluster() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a cluster of two nodes with one CPU each, and the process marks of each node."""
    folder = tempfile.mkdtemp(prefix="ray-test-", dir="/tmp")  # paths of sockets must be short
    marks = [f"{folder}-{node}" for node in range(2)]

    def ray(mark: str, *words: str) -> str:
        env = clean_environment(RAY_AUTH_MODE="disabled", RAY_TMPDIR=folder, **{MARK: mark})
        program = [sys.executable, "-m", "ray.scripts.scripts", *words]
        return subprocess.run(
            program, env=env, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    try:
        ray(
            marks[0],
            "start",
            "--head",
            "--port=0",
            "--num-cpus=1",
            "--include-dashboard=false",
            f"--temp-dir={folder}/ray",
        )
        address = (Path(folder) / "ray/ray_current_cluster").read_text().strip()
        ray(marks[1], "start", f"--address={address}", "--num-cpus=1")
        yield folder, marks
    finally:
        for mark in marks:
            kill_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)


def kill_marked(mark: str) -> None:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except psutil.Error:
            continue


@pytest.mark.ray
@pytest.mark.slow
def test_train_on_a_cluster_of_two_nodes(
    cluster: tuple[str, list[str]], tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    folder, _ = cluster
    run = tmp_path / "r"
    env = {"RAY_TMPDIR": folder, "RAY_ADDRESS": "auto"}
    with start_training(tmp_path, "--nodes", "2", "--restarts", "1", **env) as running:
        (tmp_path / "slow").unlink()
        result = running.wait()
        assert result.status == 0, result.all
    assert not unequal_tensors(checkpoint_weights(run), undisturbed)
    result = paceline("train", *TRAIN_OPTIONS, "--ranks", "3", "--launcher", "ray", at=tmp_path, **RAY | env)
    assert "--ranks must be at most 2, the CPUs of the Ray cluster, got 3; use --ranks 2" in result.err, (
        result.all
    )


@pytest.mark.ray
@pytest.mark.slow
def test_lost_node_is_reported(
    cluster: tuple[str, list[str]], tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    folder, marks = cluster
    run = tmp_path / "r"
    with start_training(tmp_path, "--restarts", "1", RAY_TMPDIR=folder, RAY_ADDRESS="auto") as running:
        wait_for_checkpoint(running, run)
        kill_marked(marks[1])
        result = running.wait()
        assert result.status == 2, result.all
        running.wait_until_all_ended()
    refusal, cause, *_ = result.err.splitlines()
    assert (
        refusal == "paceline: not restarted: --ranks must be at most 1, the CPUs of the Ray cluster, got 2; "
        "use --ranks 1"
    ), result.all
    assert cause.startswith("paceline: rank 1 was lost with its node, after step"), result.all
    resumed = succeed(
        "resume", "r", "--ranks", "1", at=tmp_path, **RAY | {"RAY_TMPDIR": folder, "RAY_ADDRESS": "auto"}
    )
    assert resumed.err == ""
    assert events_of_kind(run, Ended)[-1].reason == "done"


# Tests without Ray


def test_ranks_of_a_node_are_consecutive_and_see_its_gpus() -> None:
    placements = [
        ActorPlacement("a", ("2",)),
        ActorPlacement("b", ("0",)),
        ActorPlacement("a", ("0",)),
        ActorPlacement("b", ("1",)),
    ]
    order = order_by_node(placements, first_node="b")
    assert order == [(1, ["0", "1"]), (3, ["0", "1"]), (0, ["2", "0"]), (2, ["2", "0"])]
    environments = build_rank_environments(
        [placements[index].node for index, _ in order], "10.0.0.1", 1234, "digits", 2
    )
    worlds = [read_world(environ) for environ in environments]
    assert [(world.rank, world.local_rank, world.local_size) for world in worlds] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 2),
        (3, 1, 2),
    ]
    assert {(world.size, world.address, world.restart) for world in worlds} == {(4, "10.0.0.1:1234", 2)}


def test_error_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        LaunchError,
        match=r'--launcher ray requires Ray, which is not installed; pip install "paceline\[ray\]"',
    ):
        launchers.find_launcher(Launch(launcher="ray")).check(Launch(launcher="ray"))
