"""`submit --jupyter`: JupyterLab in a job of a real Slurm, which only its user can open."""

import contextlib
import http.client
import importlib.util
import json
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from command import PACELINE, clean_environment, paceline, succeed
from paceline.errors import LaunchError
from paceline.launch.slurm.job_script import Job
from paceline.launch.slurm.jupyter import render_jupyter
from paceline.launch.slurm.site import Site
from pages import read_blocks
from slurm import Slurm, start_cluster, wait_until

JOB = Job(Path("/runs/a b"), Path("/home/me"), 1, 1, "01:00:00", "/opt/python")


class SocketConnection(http.client.HTTPConnection):
    """A connection to a Unix socket, as ssh makes it at the other end of a tunnel."""

    def __init__(self, path: str):
        super().__init__("localhost:8888", timeout=20)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(self.path)


def get(path: str, address: str, token: str | None = None) -> tuple[int, str]:
    with contextlib.closing(SocketConnection(path)) as connection:
        connection.request("GET", address, headers={"Authorization": f"token {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def submit(slurm: Slurm, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command without the mark of commands of tests: the job would inherit it, and end with it."""
    env = clean_environment(**slurm.env)
    command = [*PACELINE, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.processes
def test_jupyter_answers_its_user_only(tmp_path):
    if importlib.util.find_spec("jupyterlab") is None:
        pytest.skip("jupyterlab is not installed")
    (tmp_path / "slurm").mkdir()
    with start_cluster(tmp_path / "slurm") as slurm:
        command = read_blocks("docs/slurm.md")["jupyter"].removeprefix("paceline ")
        submitted = submit(slurm, tmp_path, *command.split())
        assert submitted.returncode == 0, submitted.stderr
        folder = tmp_path / "lab"
        [job] = re.findall(r": job (\d+); to end it: scancel \1\n", submitted.stdout)
        tunnel = re.search(r"ssh -N -J \S+@\S+ -L 8888:(\S+/jupyter\.sock) \S+@n1\n", submitted.stdout)
        assert tunnel, submitted.stdout
        assert "http://localhost:8888/lab" in submitted.stdout
        path, token = tunnel[1], (folder / "token").read_text()
        assert get(path, "/api/sessions", token) == (200, "[]")
        assert "JupyterLab" in get(path, f"/lab?token={token}")[1]
        assert get(path, "/api/sessions")[0] == 403
        assert get(path, "/api/sessions", "0" * 48)[0] == 403
        assert json.loads(get(path, "/api/status", token)[1])["kernels"] == 0

        assert (mode_of(folder), mode_of(folder / "token")) == (0o700, 0o600)
        assert mode_of(Path(path).parent) == 0o700
        for file in folder.iterdir():
            assert file.name == "token" or token not in file.read_text(), f"{file.name} has the token"
        assert token not in submitted.stdout + submitted.stderr
        for process in psutil.process_iter(["cmdline"]):
            assert not any(token in word for word in process.info["cmdline"] or ())
        assert not [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == 8888]

        slurm.run("scancel", job)
        wait_until(lambda: slurm.state(job) == "CANCELLED", "cancelled", folder)
        wait_until(lambda: not Path(path).parent.exists(), "removed", folder)
        assert not (folder / "tunnel").exists()

        # A job whose Python has no JupyterLab ends, and says why.
        bare = tmp_path / "bare"
        (bare / "bin").mkdir(parents=True)
        (bare / "bin/activate").write_text(f'PATH="{bare}/bin:$PATH"\n')
        (bare / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        (bare / "bin/python").chmod(0o755)
        (tmp_path / "site.toml").write_text(f'venv = "{bare}"\n')
        failed = submit(slurm, tmp_path, "submit", "--jupyter", "--run-dir", "none")
        assert failed.returncode == 2
        assert "pip install 'paceline[jupyter]'" in failed.stderr


def test_the_script_is_bash_without_the_token_and_without_requeueing():
    script = render_jupyter(JOB, Site(modules=("python/3.11",), partition="debug"))
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --requeue" not in lines
    assert "#SBATCH --time=01:00:00" in lines
    assert "module load python/3.11" in lines
    assert 'export JUPYTER_TOKEN_FILE="$run/token" JUPYTER_RUNTIME_DIR="${socket%/*}"' in lines
    assert "run='/runs/a b'" in lines
    assert "/opt/python -m jupyterlab" in script
    activated = render_jupyter(JOB, Site(venv="/env"))
    assert "source /env/bin/activate" in activated
    assert "\npython -m jupyterlab" in activated


def test_containers_are_refused():
    with pytest.raises(LaunchError, match=r"outside of containers, and the site has container='a\.sif'"):
        render_jupyter(JOB, Site(container="a.sif"))


@pytest.mark.parametrize(
    "words",
    [("--steps", "5"), ("--array", "seed=1..2"), ("mnist",), ("--nodes", "2")],
    ids=["steps", "array", "task", "nodes"],
)
def test_options_of_trainings_are_refused(words, tmp_path):
    result = paceline("submit", "--jupyter", "--dry-run", *words, at=tmp_path)
    assert result.status == 2
    assert "only --time, --site, --run-dir and --dry-run are possible" in result.err
    assert "Traceback" not in result.all


def test_dry_run_prints_the_script(tmp_path):
    result = succeed("submit", "--jupyter", "--dry-run", "--run-dir", "lab", at=tmp_path)
    assert "-m jupyterlab --no-browser" in result.out
    assert not (tmp_path / "lab").exists()
