"""Nodes join a running training after its next checkpoint, and leave it again."""

import contextlib
import platform
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import network
import slurm
from agents import TORCHRUN_ENVIRONMENT, TRAIN_OPTIONS, create_run, elastic_torchrun, is_open, start_agents
from command import (
    PACELINE,
    TASK,
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
from paceline.errors import LaunchError
from paceline.events import Ended, Failed, Noted, Started, Step
from paceline.launch.elastic.restarts import RestartLog
from paceline.launch.slurm import client
from paceline.launch.slurm.job_script import Job, render
from paceline.launch.slurm.joining import JoiningJobs
from paceline.launch.slurm.site import Site
from paceline.run import RunFolder
from paceline.training.guard.suspects import Suspect, read_suspects, record_suspects
from slurm import Slurm, wait_until

pytestmark = pytest.mark.processes


def check_growth(run: Path, folder: Path, ranks: tuple[int, ...] = (2, 1, 2)) -> None:
    """Assert that the run equals, bit by bit, one that had two ranks from the last start on."""
    starts = events_of_kind(run, Started)
    assert tuple(event.ranks for event in starts) == ranks
    assert [event.plan for event in starts if event.ranks == 2] == ["zero1"] * ranks.count(2)
    step = starts[-1].step
    assert step > starts[-2].step
    twin = folder / "twin"
    shutil.copytree(run, twin, ignore=shutil.ignore_patterns("events.jsonl", "ranks", ".meet*", "log.txt"))
    for later in RunFolder(twin).checkpoints():
        if later > step:
            shutil.rmtree(RunFolder(twin).checkpoint(later))
    (folder / "slow").unlink(missing_ok=True)
    options = ("--ranks", "2", "--nodes", "1", "--restarts", "0", "--plan", "zero1")
    succeed("resume", "twin", *options, at=folder, OMP_NUM_THREADS="1")
    losses, expected = (
        {event.step: event.loss for event in events_of_kind(at, Step) if event.step > step}
        for at in (run, twin)
    )
    assert losses == expected
    assert len(losses) == 60 - step
    assert unequal_tensors(checkpoint_weights(run), checkpoint_weights(twin)) == []
    # control: weights at the growth differ from those at the end
    assert unequal_tensors(checkpoint_weights(run, step), checkpoint_weights(run)) != []


def kill_node(group, index: int) -> None:
    """Kill an agent and its ranks, as if its node were lost."""
    agent = psutil.Process(group.processes[index].pid)
    for process in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.slow
def test_node_joins_after_the_next_checkpoint_and_leaves_on_request(tmp_path: Path) -> None:
    """The leaving node costs no restart of those that are allowed: one, which the lost node took."""
    with start_agents(tmp_path, request={"save.keep": 40}, least_nodes=1) as group:
        run = group.run
        group.wait_until(lambda: last_step(run) >= 6, "at step 6")
        kill_node(group, 1)
        group.wait_until(lambda: len(events_of_kind(run, Started)) == 2, "restarted")
        joined = group.start_joining(job=8)
        group.wait_until(lambda: len(events_of_kind(run, Started)) == 3, "joined")
        third = events_of_kind(run, Started)[-1]
        group.wait_until(lambda: last_step(run) >= third.step + 3, "further")
        joined.send_signal(signal.SIGUSR1)
        group.wait_until(lambda: len(events_of_kind(run, Started)) == 4, "without the node that left")
        assert joined.wait(30) == 0
        group.start_joining(job=9)
        group.wait_until(lambda: len(events_of_kind(run, Started)) == 5, "joined again")
        (tmp_path / "slow").unlink(missing_ok=True)
        (first, _, err), _, (eighth, *_), (ninth, _, ninth_err) = group.wait()
    assert (first, err, eighth, ninth, ninth_err) == (0, "", 0, 0, "")
    notes = [event.message for event in events_of_kind(run, Noted) if "restarted on" in event.message]
    host = re.escape(socket.gethostname())
    expected = ("joined", "left", "joined")
    for note, what in zip(notes, expected, strict=True):
        assert re.fullmatch(rf"node {host} {what}, after step \d+; all ranks are restarted on .*", note), note
    assert [event.what for event in events_of_kind(run, Failed)] == ["run", "node"], "only the killed node"
    assert events_of_kind(run, Ended)[-1].reason == "done"
    assert not list(run.glob(".meet*"))
    check_growth(run, tmp_path, (2, 1, 2, 1, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["waiting", "training"])
def test_node_that_joins_and_dies_loses_no_step(when: str, tmp_path: Path) -> None:
    with start_agents(tmp_path, request={"restarts": 3}, least_nodes=1) as group:
        run = group.run
        set_sample_delay(tmp_path / "slow", 0.1)
        group.wait_until(lambda: last_step(run) >= 6, "at step 6")
        kill_node(group, 1)
        group.wait_until(lambda: count_starts(run) == 2, "restarted")
        joined = group.start_joining(job=8)
        if when == "waiting":
            group.wait_until(lambda: psutil.Process(joined.pid).net_connections("tcp"), "connected")
        else:
            group.wait_until(lambda: count_starts(run) == 3, "joined")
        kill_node(group, 2)
        (tmp_path / "slow").unlink(missing_ok=True)
        (first, _, err), *_ = group.wait()
    assert (first, err) == (0, "")
    assert events_of_kind(run, Ended)[-1].reason == "done"
    assert sorted({event.step for event in events_of_kind(run, Step)}) == [*range(1, 61)]


def test_node_finds_no_training(tmp_path: Path) -> None:
    """A job whose turn comes after the end of the training ends without an error, and trains nothing."""
    write_task(tmp_path)
    create_run(tmp_path)
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    result = paceline("agent", "r", "--join", ".meet-slurm-7-0-0", at=tmp_path, **variables)
    assert (result.status, result.err) == (0, ""), result.all
    assert result.out == "the training of r that this node would join has ended\n"
    result = paceline("agent", "r", "--join", "../x", at=tmp_path, **variables)
    assert result.status == 2
    assert "--join must be the name of a file such as .meet-slurm-12-0-0, got '../x'" in result.err


def test_job_script_of_a_range_of_nodes_takes_a_node_that_joins() -> None:
    """Only then: a job with all of its nodes, or an array, ignores words after the script."""
    folder = Path("/home/me")
    job = Job(folder / "runs/a", folder, 4, 2, None, "python", least_nodes=2, restarts=3)
    script = render(job, Site())
    assert '-m paceline agent "$run" $join &' in script
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    fixed = Job(folder / "runs/a", folder, 4, 2, None, "python", restarts=3)
    array = Job(folder / "runs/a", folder, 4, 2, None, "python", least_nodes=2, restarts=3, array="0-3")
    assert all("join" not in render(other, Site()) for other in (fixed, array))


def test_variables_of_a_job_do_not_reach_a_job_that_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch would pass them on, and srun in the new job would read them as options."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "$@" > "$0.words"\nenv > "$0.env"\necho "12;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in {
        "SLURM_NTASKS": "9",
        "SLURM_CONF": "/c",
        "SBATCH_NODELIST": "n9",
        "MINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert client.submit_joining(tmp_path / "job.sh", ".meet-slurm-7-0-0", ["n1", "n3"]) == "12"
    words = (tmp_path / "sbatch.words").read_text()
    assert words.split() == [
        "--parsable", "--nodes=1", "--no-kill=off", "--exclude=n1,n3",
        f"{tmp_path}/job.sh", ".meet-slurm-7-0-0",
    ]  # fmt: skip
    kept = dict(line.split("=", 1) for line in (tmp_path / "sbatch.env").read_text().splitlines())
    assert (kept["SLURM_CONF"], kept["MINE"]) == ("/c", "1")
    assert not kept.keys() & {"SLURM_NTASKS", "SBATCH_NODELIST"}
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    with pytest.raises(LaunchError, match="Invalid account"):
        client.submit_joining(tmp_path / "job.sh", ".meet-slurm-7-0-0", [])


@pytest.mark.slow
def test_torchrun_grows_again(tmp_path: Path) -> None:
    """torchrun restarts the ranks at once when a node returns. They save first, so no step is lost."""
    write_task(tmp_path)
    create_run(tmp_path, **{"save.keep": 40})
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
        second = events_of_kind(run, Started)[-1]
        first.wait_until(lambda: last_step(run) > second.step + 1, "further")
        again = stack.enter_context(start("resume", "r", at=tmp_path, program=program, **env))
        first.wait_until(lambda: len(events_of_kind(run, Started)) == 3, "grown")
        slow.unlink()
        assert first.wait().status == 0
        assert again.wait().status == 0
    check_growth(run, tmp_path)


# Regression, in which a bit of a weight flips once on rank 1, between the updates of steps 5 and 6
FLIPS = f"""{TASK}
class Flips(Regression):
    calls = 0

    def loss(self, output, batch):
        if torch.is_grad_enabled() and type(output) is torch.Tensor and output.device.type == "cpu":
            Flips.calls += 1
        return super().loss(output, batch)


def flip(module, inputs):
    marker = Path(__file__).with_name("flipped")
    if os.environ.get("RANK") == "1" and Flips.calls == 5 and module.training and not marker.exists():
        marker.touch()
        with torch.no_grad():
            module.weight.data.view(torch.int64)[0, 0] ^= 1 << 40


build = Regression.model


def model(self):
    whole = build(self)
    whole[0].register_forward_pre_hook(flip)
    return whole


Flips.model = model
"""


@pytest.mark.slow
@pytest.mark.network
def test_node_that_corrupts_weights_is_left_out(tmp_path: Path) -> None:
    """The others continue without it, from the checkpoint before the fault."""
    request = {"task": f"{tmp_path}/flips.py:Flips", "guard.every": 4, "guard.locate": True, "save.keep": 40}
    write_task(tmp_path, FLIPS, "flips.py")
    with network.nodes(2) as nodes, start_agents(tmp_path, nodes, request, least_nodes=1) as group:
        group.wait_until(lambda: len(events_of_kind(group.run, Started)) == 2, "restarted")
        (tmp_path / "slow").unlink()
        (first, _, err), (second, _, message) = group.wait()
    assert (first, err, second) == (0, "", 0)
    assert message == f"paceline: node {nodes[1].name} is left out: it corrupted data\n"
    [suspect] = read_suspects(RunFolder(group.run))
    assert (suspect.rank, suspect.host, suspect.certain) == (1, nodes[1].name, True)
    [restart] = [event.message for event in events_of_kind(group.run, Failed) if event.what == "node"]
    assert restart.startswith(
        "the weights of rank 1 changed outside of an update, before the update of step "
    )
    assert f"; node {nodes[1].name} is left out, after step " in restart
    assert [(event.ranks, event.step) for event in events_of_kind(group.run, Started)] == [(2, 0), (1, 4)]


def test_nodes_are_left_out_while_enough_others_remain(tmp_path: Path) -> None:
    """Neither a rank that only may be at fault, nor one of an earlier training, nor the last node."""
    run, here = RunFolder(tmp_path), platform.node()
    old = Suspect(rank=0, host=here, step=1, certain=True, what="old")
    record_suspects(run, [old])
    log = RestartLog(run, is_reporter=False)
    log.names = [here, "n2"]
    assert not log.is_left_out(least=1)
    record_suspects(run, [replace(old, certain=False)])
    assert not log.is_left_out(least=1)
    record_suspects(run, [old])
    assert log.is_left_out(least=1)
    assert not log.is_left_out(least=2)
    record_suspects(run, [replace(old, host="n2")])
    assert not log.is_left_out(least=1)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm.start_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_job_of_slurm_grows_each_time_a_lost_node_returns(cluster: Slurm, tmp_path: Path) -> None:
    """The job queues one for the missing node. It waits for the node, and ends with the training."""
    write_task(tmp_path)
    env = clean_environment(
        OMP_NUM_THREADS="1", SLOW=str(set_sample_delay(tmp_path / "slow", 0.1)), **cluster.env
    )
    run = tmp_path / "r"
    words = (
        "--plan",
        "zero1",
        "--run-dir",
        "r",
        "--ranks-per-node",
        "1",
        "--nodes",
        "1:2",
        "--restarts",
        "2",
    )
    command = [*PACELINE, "submit", "my.py:Regression", *TRAIN_OPTIONS, *words, "--set", "save.keep=40"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    job = done.stdout.split()[-1]
    wait_until(lambda: last_step(run) >= 6, "at step 6", run)
    for starts in (2, 4):
        cluster.power_off("n2")
        try:
            wait_until(lambda starts=starts: count_starts(run) == starts, "restarted", run)
            wait_until(lambda: find_queued(run) != [], "queued a job", run)
            [joining] = find_queued(run)  # Slurm itself queues the job again when its node is lost, too
            # Slurm may start it on the lost node at first, and queues it again once it gives the node up
            wait_until(lambda job=joining: cluster.state(job) == "PENDING", "waiting for a node", run)
        finally:
            cluster.restore("n2")
        wait_until(lambda starts=starts: count_starts(run) == starts + 1, "grown", run)
        first = events_of_kind(run, Started)[-1].step
        wait_until(lambda first=first: last_step(run) > first, "further", run)
    assert client_nodes(cluster, joining) == "n2"
    (tmp_path / "slow").unlink()
    for waited in (job, joining):
        cluster.wait_for_state(waited, "COMPLETED")
    log = (run / f"slurm-{job}.out").read_text()
    assert re.search(
        r"node n2 joined, after step \d+; all ranks are restarted on 2 nodes: n[12], n[12]", log
    ), log
    assert "Traceback" not in log + (run / f"slurm-{joining}.out").read_text()
    assert (run / "job").read_text().strip() == job
    check_growth(run, tmp_path, (2, 1, 2, 1, 2))


def count_starts(run: Path) -> int:
    return len(events_of_kind(run, Started))


def find_queued(run: Path) -> list[str]:
    """Return the jobs that were queued for missing nodes."""
    messages = [event.message for event in events_of_kind(run, Noted)]
    return [match[1] for message in messages if (match := re.search(r"queued job (\d+) for nodes", message))]


def client_nodes(cluster: Slurm, job: str) -> str:
    return re.search(r" NodeList=(\S+)", cluster.run("scontrol", "show", "job", "-o", job))[1]


@pytest.mark.slow
@pytest.mark.slurm
def test_slurm_gives_a_job_that_joins_no_node_that_corrupted_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that only may be at fault excludes no node, besides those that work."""
    (tmp_path / "slurm").mkdir()
    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    run.job_script.write_text("#!/bin/sh\n#SBATCH --hold\nsleep 60\n")
    found = Suspect(rank=1, host="n2.cluster", step=7, certain=False, what="differs")
    with slurm.start_cluster(tmp_path / "slurm") as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        job = cluster.run("sbatch", "--parsable", "-w", "n1", "--wrap", "sleep 60").strip()
        cluster.wait_for_state(job, "RUNNING")
        run.write_job(job)
        monkeypatch.setenv("SLURM_JOB_ID", job)

        def queue_jobs() -> str:
            """Return the note of the training about the nodes that it misses."""
            before = len(events_of_kind(run.path, Noted)) if run.events.exists() else 0
            jobs = JoiningJobs(run, ".meet-slurm-1-0-0", nodes=2)
            jobs.replace_missing(["n1"])
            wait_until(
                lambda: run.events.exists() and len(events_of_kind(run.path, Noted)) > before,
                "noted",
                run.path,
            )
            return events_of_kind(run.path, Noted)[-1].message

        record_suspects(run, [found])
        note = queue_jobs()
        [queued] = re.findall(r"^1 node missing: queued job (\d+) for nodes that join", note)
        assert "ExcNodeList=n1 " in cluster.run("scontrol", "show", "job", "-o", queued)
        record_suspects(run, [replace(found, certain=True)])
        [second] = re.findall(r"^1 node missing: queued job (\d+) for nodes that join", queue_jobs())
        assert "ExcNodeList=n[1-2] " in cluster.run("scontrol", "show", "job", "-o", second)
