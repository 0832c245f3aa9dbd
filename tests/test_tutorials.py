"""The commands of the tutorials, in their order, each in the folder of its tutorial."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command import clean_environment, paceline, succeed
from pages import read_blocks
from slurm import start_cluster, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def follow(page: str, folder: Path, *only: str, **env: str) -> str:
    """Write the files of a tutorial, run the commands of all or some blocks, and return their output."""
    blocks = read_blocks(f"docs/{page}.md")
    output = []
    for name, text in blocks.items():
        if name.endswith((".py", ".toml")):
            (folder / name).write_text(text)
    for name, text in blocks.items():
        if name.endswith((".py", ".toml")) or (only and name not in only):
            continue
        for line in text.splitlines():
            program, *words = shlex.split(line, comments=True)
            if program == "paceline":
                output.append(succeed(*words, at=folder, **env).all)
            else:
                command = [sys.executable, *words]
                subprocess.run(command, cwd=folder, env=clean_environment(), check=True)
    return "".join(output)


def test_survive_the_queue(tmp_path):
    follow("tutorial-queue", tmp_path, "save", "drill", "restarts", "interval")
    [train, resume, diff] = read_blocks("docs/tutorial-queue.md")["stop"].splitlines()
    for line in (train, resume):
        succeed(*shlex.split(line)[1:], at=tmp_path)
    compared = paceline(*shlex.split(diff)[1:], at=tmp_path)
    assert "Traceback" not in compared.all
    assert compared.status in (0, 1)
    assert (tmp_path / "runs/cut/ckpt/step_30").is_dir()


def test_a_model_that_does_not_fit(tmp_path):
    [line] = read_blocks("docs/tutorial-memory.md")["single"].splitlines()
    [answer] = [row for row in succeed(*shlex.split(line)[1:], at=tmp_path).out.splitlines() if "GiB" in row]
    assert answer.split()[0] == "single"
    assert answer.split()[-1] == "no"
    follow("tutorial-memory", tmp_path, "shard", "adapters", "own", "prove")


def test_find_why_it_is_slow(tmp_path):
    output = follow("tutorial-slow", tmp_path)
    assert "input" in output
    slow, both = (tmp_path / name for name in ("slow.html", "both.html"))
    assert slow.stat().st_size > 10_000
    assert both.stat().st_size > 10_000


def test_fine_tune_a_hugging_face_model(tmp_path):
    pytest.importorskip("transformers")
    follow("tutorial-fine-tune", tmp_path)
    assert (tmp_path / "trained/model.safetensors").is_file()
    assert (tmp_path / "adapters/adapter_model.safetensors").is_file()


def test_plan_an_allocation(tmp_path):
    output = follow("tutorial-allocation", tmp_path)
    assert "recommended" in output
    assert (tmp_path / "scale.svg").read_text().startswith("<?xml")


@pytest.mark.slurm
def test_from_a_laptop_to_slurm(tmp_path):
    (tmp_path / "slurm").mkdir()
    follow("tutorial-slurm", tmp_path, "laptop")
    with start_cluster(tmp_path / "slurm") as slurm:
        env = {**slurm.env, "OMP_NUM_THREADS": "1"}
        follow("tutorial-slurm", tmp_path, "check", "submit", **env)
        run = tmp_path / "runs/there"
        wait_until(lambda: (run / "ckpt/step_40").is_dir(), "done", run)
        wait_until(lambda: not slurm.run("squeue", "-h", "-o", "%i"), "ended", run)
        output = follow("tutorial-slurm", tmp_path, "home", **env)
    assert "40" in output
    assert (tmp_path / "report.html").stat().st_size > 10_000
