"""Agents of nodes, started as srun starts them, and a training that they share."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

import network
from command import (
    PACELINE,
    clean_environment,
    events_of_kind,
    find_marked_processes,
    set_sample_delay,
    write_task,
)
from paceline import spec as specs
from paceline.events import Step
from paceline.run import RunFolder, create

TRAIN_OPTIONS = (
    "--steps",
    "60",
    "--batch",
    "24",
    "--set",
    "dropout=0.0",
    "--precision",
    "fp64",
    "--device",
    "cpu",
    "--no-profile",
    "--save-every",
    "4",
)


TORCHRUN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def elastic_torchrun() -> tuple[list[str], int]:
    """Return a command for each of one or two nodes of torchrun, and the port at which they meet."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    words = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=7",
        "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *words, "-m", "paceline"], port


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return True
    return False


def check_losses(run: Path, reference: Path) -> None:
    """Assert that the losses equal those of one process. The last event of a repeated step counts."""
    losses = {step.step: step.loss for step in events_of_kind(run, Step)}
    assert [losses[step] for step in range(1, 61)] == pytest.approx(
        [step.loss for step in events_of_kind(reference, Step)], rel=1e-10
    )


class Agents:
    """Two agents of one run, on nodes of `network` or on this machine."""

    def __init__(self, folder: Path, nodes: list[network.Node] | None, request: Mapping[str, object]):
        set_sample_delay(folder / "slow", 0.01)
        self.run, self.folder, self.nodes = folder / "r", folder, nodes
        write_task(folder)
        self.processes: list[subprocess.Popen[str]] = []
        create_run(folder, **request)

    def start(self) -> None:
        hosts = ",".join(node.address for node in self.nodes) if self.nodes else "localhost,localhost"
        for at in range(2):
            node = self.nodes[at] if self.nodes else None
            self.processes.append(self._start_agent(node, rank=at, hosts=hosts))

    def start_joining(self, job: int) -> "subprocess.Popen[str]":
        """Start the agent of a job with one node, which joins the training of the first job."""
        agent = self._start_agent(None, job=job, words=("--join", ".meet-slurm-7-0-0"))
        self.processes.append(agent)
        return agent

    def _start_agent(
        self,
        node: network.Node | None,
        rank: int = 0,
        hosts: str = "localhost",
        job: int = 7,
        words: tuple[str, ...] = (),
    ) -> "subprocess.Popen[str]":
        size = hosts.count(",") + 1
        variables = {
            "PROCID": rank,
            "NODEID": rank,
            "LOCALID": 0,
            "NTASKS": size,
            "JOB_ID": job,
            "STEP_ID": 0,
            "STEP_TASKS_PER_NODE": f"1(x{size})",
        }
        env = clean_environment(
            **{f"SLURM_{name}": str(value) for name, value in variables.items()},
            SLURM_STEP_NODELIST=hosts,
            SLOW=str(self.folder / "slow"),
            OMP_NUM_THREADS="1",
            PACELINE_TESTS=self.mark,
        )
        options = {
            "cwd": self.folder,
            "env": env,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        command = [*PACELINE, "agent", str(self.run), *words]
        return node.start(command, **options) if node is not None else subprocess.Popen(command, **options)

    @property
    def mark(self) -> str:
        return str(self.folder)

    def wait(self, timeout_s: float = 300.0) -> list[tuple[int, str, str]]:
        """Return the exit status and the output of each agent."""
        return [(agent.wait(timeout_s), *agent.communicate()) for agent in self.processes]

    def wait_until(self, holds, what: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not {what}: {[agent.poll() for agent in self.processes]}"
            time.sleep(0.05)


def create_run(folder: Path, **more: object) -> None:
    """Create the folder of a run that has not started."""
    request = {
        "task": f"{folder}/my.py:Regression",
        "plan": "zero1",
        "ranks": 2,
        "nodes": 2,
        "restarts": 1,
        "device": "cpu",
        "steps": 60,
    }
    request |= {"batch": 24, "precision": "fp64", "profile": False, "save.every": 4, "set.dropout": 0.0}
    create(folder / "r", *specs.load(None, request | more))


@contextlib.contextmanager
def start_agents(
    folder: Path,
    nodes: list[network.Node] | None = None,
    request: Mapping[str, object] | None = None,
    **launch: object,
) -> Iterator[Agents]:
    """Start two agents, and end them with the context.

    request: more keys of the request. launch: fields of Spec or Launch.
    """
    group = Agents(folder, nodes, request or {})
    run = RunFolder(group.run)
    spec, old_launch = run.request()
    of_spec = {key: launch.pop(key) for key in list(launch) if key in type(spec).model_fields}
    run.write_request(spec.model_copy(update=of_spec), old_launch.model_copy(update=launch))
    group.start()
    try:
        yield group
    finally:
        for process in find_marked_processes(group.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in group.processes:
            agent.communicate()
