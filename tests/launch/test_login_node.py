"""A training on a login node of Slurm is warned of; on a node, in a job and without Slurm it is not."""

import os
import platform
from pathlib import Path

import pytest

from command import paceline
from paceline.launch.slurm.login_node import find_login_node
from slurm import start_cluster

# Recorded: sinfo --noheader --Node --format=%N, on a login node; a line per node and partition.
NODES = "gpu01\ngpu01\ngpu02\nlogin-none\n"


def write_sinfo(folder: Path, output: str, status: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "sinfo"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{output}EOF\nexit {status}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("host", "output", "status", "job", "expected"),
    [
        ("login1.site.org", NODES, 0, None, "login1"),
        ("gpu02", NODES, 0, None, None),
        ("login1", NODES, 0, "77", None),
        ("login1", "", 1, None, None),
        ("login1", "", 0, None, None),
    ],
    ids=["login", "node", "job", "no answer", "no nodes"],
)
def test_login_node(
    host: str,
    output: str,
    status: int,
    job: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_sinfo(tmp_path / "bin", output, status)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(platform, "node", lambda: host)
    assert find_login_node({"SLURM_JOB_ID": job} if job else {}) == expected


def test_without_slurm_there_is_no_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_login_node({}) is None


@pytest.mark.slurm
@pytest.mark.slow
def test_train_warns_beside_a_real_slurm(tmp_path: Path) -> None:
    """This machine queues jobs, and the nodes n1 and n2 of the cluster have other names."""
    words = ("train", "digits", "--steps", "2", "--device", "cpu", "--no-report")
    (tmp_path / "slurm").mkdir()
    with start_cluster(tmp_path / "slurm") as slurm:
        done = paceline(*words, at=tmp_path, **slurm.env)
    assert done.status == 0, done.all
    assert "is not a node of Slurm, so it is probably a login node" in done.err
