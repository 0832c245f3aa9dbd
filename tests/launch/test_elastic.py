"""An agent on each node restarts the ranks after a killed rank, a lost node, a cut link or a lost store."""

import contextlib
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import network
import slurm
from agents import (
    TORCHRUN_ENVIRONMENT,
    TRAIN_OPTIONS,
    check_losses,
    create_run,
    elastic_torchrun,
    is_open,
    start_agents,
)
from command import (
    PACELINE,
    clean_environment,
    events_of_kind,
    find_marked_processes,
    last_step,
    paceline,
    set_sample_delay,
    start,
    succeed,
    write_task,
)
from paceline.events import Ended, Failed, Started
from paceline.monitor.samples import read_samples
from paceline.monitor.table import SampleTable
from paceline.run import RunFolder
from pages import read_blocks
from slurm import Slurm, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of the same training on one process."""
    at = tmp_path_factory.mktemp("single")
    write_task(at)
    succeed("train", "my.py:Regression", *TRAIN_OPTIONS, "--run-dir", "r", at=at)
    return at / "r"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm.start_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def find_process(run: Path, kind: str, rank: int | None = None) -> psutil.Process:
    """Return the process of a rank or of an agent of a run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:5] == ["-m", "paceline", kind, str(run)]:
                environ = process.environ()
                if rank is None or int(environ["RANK" if kind == "rank" else "SLURM_PROCID"]) == rank:
                    return process
    raise AssertionError(f"there is no {kind} {rank} of {run}")


@pytest.mark.slow
def test_killed_rank_restarts_all_ranks(reference: Path, tmp_path: Path) -> None:
    """The second failure has no restart left and is reported once. Weights equal an undisturbed run."""
    with start_agents(tmp_path) as group:
        group.wait_until(lambda: RunFolder(group.run).checkpoints() != [], "saved")
        find_process(group.run, "rank", 1).kill()
        group.wait_until(lambda: len(events_of_kind(group.run, Started)) == 2, "restarted")
        second_start = events_of_kind(group.run, Started)[-1]
        group.wait_until(lambda: last_step(group.run) > second_start.step + 5, "further")
        find_process(group.run, "rank", 1).kill()
        (first, _, message), (second, _, other_message) = group.wait()
    assert (first, second, other_message) == (2, 2, "")
    assert message.startswith("paceline: rank 1 "), message
    assert "killed by SIGKILL, after step " in message
    assert message.count("paceline: ") == 1
    [restarted] = [event for event in events_of_kind(group.run, Failed) if event.what == "node"]
    assert restarted.message.startswith(f"rank 1 on {platform.node()} was killed by SIGKILL, after step ")
    assert "; all ranks are restarted on 2 nodes: " in restarted.message
    assert (second_start.plan, second_start.ranks) == ("zero1", 2)
    (tmp_path / "slow").unlink()
    succeed("resume", "r", "--nodes", "1", "--restarts", "0", at=tmp_path)
    check_losses(group.run, reference)


@pytest.mark.slow
def test_lost_store_of_the_agents_is_reported(tmp_path: Path) -> None:
    """The store ends with the first agent. Its ranks ask the others to save. The samples are complete."""
    with start_agents(tmp_path, monitor=0.1) as group:
        group.wait_until(lambda: last_step(group.run) >= 6 and len(read_monitor(group.run)) == 2, "at step 6")
        group.processes[0].kill()
        (_, _, _), (status, _, message) = group.wait(40)
        group.wait_until(
            lambda: not any(process.is_running() for process in find_marked_processes(group.mark)),
            "all ended",
        )
    assert status == 2, message
    assert message.startswith("paceline: node "), message
    assert " lost the connection to node localhost, where the agents meet; continue from step " in message
    assert message.count("\n") == 1
    for name, (text, samples) in read_monitor(group.run).items():
        assert text.endswith("\n"), name
        assert samples.damaged == 0, name


def read_monitor(run: Path) -> dict[str, tuple[str, SampleTable]]:
    """Return the text and the samples of each node's file that has samples."""
    tables = {path.name: (path.read_text(), read_samples(path)) for path in (run / "monitor").glob("*.csv")}
    return {name: both for name, both in tables.items() if len(both[1])}


@pytest.mark.slow
def test_torchrun_continues_on_fewer_nodes(reference: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    create_run(tmp_path)
    slow, run = set_sample_delay(tmp_path / "slow", 0.01), tmp_path / "r"
    program, port = elastic_torchrun()
    env = {"SLOW": str(slow), **TORCHRUN_ENVIRONMENT}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start("resume", "r", at=tmp_path, program=program, **env))
        first.wait_until(lambda: is_open(port), "open")  # this agent hosts the store
        other = stack.enter_context(start("resume", "r", at=tmp_path, program=program, **env))
        first.wait_until(lambda: last_step(run) >= 6, "at step 6")
        for process in other.remaining_processes():
            process.kill()
        first.wait_until(lambda: len(events_of_kind(run, Started)) == 2, "restarted")
        slow.unlink()
        result = first.wait()
    assert result.status == 0, result.all
    assert all(text.endswith("\n") and not samples.damaged for text, samples in read_monitor(run).values())
    assert [(event.ranks, event.plan) for event in events_of_kind(run, Started)] == [
        (2, "zero1"),
        (1, "single"),
    ]
    check_losses(run, reference)


@pytest.mark.slow
@pytest.mark.network
class TestNetwork:
    def test_training_continues_without_the_node_of_a_cut_link(self, reference: Path, tmp_path: Path) -> None:
        """No process gets a signal: the ranks time out and continue on the node that hosts the store."""
        with network.nodes(2) as nodes, start_agents(tmp_path, nodes, least_nodes=1, timeout_s=6.0) as group:
            group.wait_until(lambda: last_step(group.run) >= 6, "at step 6")
            network._run(f"ip -n {nodes[1].name} link set {network.DEVICE} down")
            group.wait_until(lambda: len(events_of_kind(group.run, Started)) == 2, "restarted", 60)
            (tmp_path / "slow").unlink()
            (first, out, err), (second, _, lost) = group.wait()
        assert (first, err) == (0, "")
        assert second == 2
        assert (
            lost == f"paceline: node {nodes[1].name} ends: it could not reach node {nodes[0].address}, "
            "where the agents meet, for 20 s\n"
        )
        [failure] = [event for event in events_of_kind(group.run, Failed) if event.what == "node"]
        assert failure.message.startswith(f"node {nodes[1].name} with rank 1 was lost, after step "), failure
        assert out.count(failure.message) >= 1
        assert [(event.ranks, event.plan) for event in events_of_kind(group.run, Started)] == [
            (2, "zero1"),
            (1, "single"),
        ]
        check_losses(group.run, reference)


@pytest.mark.slow
@pytest.mark.slurm
class TestSlurm:
    def submit(self, cluster: Slurm, folder: Path, *words: str) -> str:
        write_task(folder)
        env = clean_environment(
            OMP_NUM_THREADS="1", SLOW=str(set_sample_delay(folder / "slow", 0.02)), **cluster.env
        )
        command = [
            *PACELINE,
            "submit",
            "my.py:Regression",
            *TRAIN_OPTIONS,
            "--plan",
            "zero1",
            "--run-dir",
            "r",
            "--ranks-per-node",
            "1",
            *words,
        ]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.split()[-1]

    def test_job_continues_without_a_lost_node(self, cluster: Slurm, reference: Path, tmp_path: Path) -> None:
        """The job continues on the other node with the losses of an undisturbed training."""
        run = tmp_path / "r"
        job = self.submit(cluster, tmp_path, "--nodes", "1:2", "--restarts", "2")
        wait_until(lambda: last_step(run) >= 6, "at step 6", run)
        cluster.power_off("n2")
        try:
            wait_until(lambda: len(events_of_kind(run, Started)) == 2, "restarted", run)
            (tmp_path / "slow").unlink()
            cluster.wait_for_state(job, "COMPLETED")
        finally:
            cluster.restore("n2")
        [failure] = [event for event in events_of_kind(run, Failed) if event.what == "node"]
        assert failure.message.startswith("node n2 with rank ")
        assert failure.message.endswith("all ranks are restarted on 1 node: n1")
        log = (run / f"slurm-{job}.out").read_text()
        assert failure.message in log
        assert "Traceback" not in log
        assert [(event.ranks, event.plan) for event in events_of_kind(run, Started)] == [
            (2, "zero1"),
            (1, "single"),
        ]
        check_losses(run, reference)

    def test_job_fails_with_fewer_nodes_than_its_minimum(self, cluster: Slurm, tmp_path: Path) -> None:
        run = tmp_path / "r"
        job = self.submit(cluster, tmp_path, "--nodes", "2", "--restarts", "2", "--timeout", "6")
        wait_until(lambda: last_step(run) >= 6, "at step 6", run)
        cluster.power_off("n2")
        try:
            cluster.wait_for_state(job, "FAILED")
        finally:
            cluster.restore("n2")
        log = (run / f"slurm-{job}.out").read_text()
        assert log.count("paceline: ") == 1, log
        assert "n2" in log.partition("paceline: ")[2]
        assert "a restart requires at least 2 nodes; continue from step " in log
        assert "Traceback" not in log

    def test_job_is_requeued_after_the_loss_of_its_first_node(
        self, cluster: Slurm, reference: Path, tmp_path: Path
    ) -> None:
        """The job script and the store are lost with it, so the whole job is requeued."""
        run = tmp_path / "r"
        job = self.submit(cluster, tmp_path, "--nodes", "1:2", "--restarts", "2")
        wait_until(lambda: last_step(run) >= 6, "at step 6", run)
        cluster.power_off("n1")
        (tmp_path / "slow").unlink()
        wait_until(lambda: cluster.state(job) != "RUNNING", "queued again", run)
        cluster.restore("n1")
        wait_until(lambda: cluster.state(job) == "COMPLETED", "completed", run)
        assert events_of_kind(run, Ended)[-1].reason == "done"
        check_losses(run, reference)

    def test_job_saves_at_its_time_limit_and_continues(
        self, cluster: Slurm, reference: Path, tmp_path: Path
    ) -> None:
        run = tmp_path / "r"
        job = self.submit(cluster, tmp_path, "--nodes", "2", "--restarts", "2")
        wait_until(lambda: last_step(run) >= 6, "at step 6", run)
        cluster.run("scancel", "--signal=USR1", "--batch", job)
        cluster.wait_for_state(job, "PENDING")
        assert events_of_kind(run, Ended)[-1].reason == "stopped"
        (tmp_path / "slow").unlink()
        cluster.wait_for_state(job, "COMPLETED", timeout_s=120)
        assert not events_of_kind(run, Failed)
        check_losses(run, reference)

    def test_train_with_minimum_nodes_in_an_allocation(self, cluster: Slurm, tmp_path: Path) -> None:
        write_task(tmp_path)
        inside = ("salloc", "--quiet", "--nodes=2", "--no-kill", *PACELINE)
        words = (
            "train",
            "my.py:Regression",
            *TRAIN_OPTIONS,
            "--plan",
            "zero1",
            "--nodes",
            "1:2",
            "--ranks-per-node",
            "1",
            "--restarts",
            "1",
        )
        result = paceline(
            *words, "--run-dir", "r", at=tmp_path, program=inside, OMP_NUM_THREADS="1", **cluster.env
        )
        assert result.status == 0, result.all
        assert [event.ranks for event in events_of_kind(tmp_path / "r", Started)] == [2]

    def test_commands_of_the_slurm_page(self, cluster: Slurm, tmp_path: Path) -> None:
        env = clean_environment(
            OMP_NUM_THREADS="1", **cluster.env | {"PATH": f"{Path(sys.executable).parent}:{slurm.PATH}"}
        )
        for line in read_blocks("docs/slurm.md")["lost"].splitlines():
            subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, check=True, timeout=60)
        run = tmp_path / "runs/a"
        wait_until(lambda: events_of_kind(run, Started) != [], "started", run)
        cluster.run("scancel", "--user=root")
        wait_until(lambda: cluster.run("squeue", "-h") == "", "out of the queue", run)
        assert "#SBATCH --nodes=1-2\n" in (run / "job.sh").read_text()
