"""The commands and programs in the README and the docs run as written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command import succeed
from pages import ROOT, read_blocks

pytestmark = pytest.mark.processes


def run(command: str, folder: Path) -> str:
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "COLUMNS": "160"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my.py").write_text(read_blocks("README.md")["my.py"])
    return folder


README, TOUR = read_blocks("README.md"), read_blocks("docs/tour.md")
COMMANDS = [
    *README["commands"].splitlines(),
    *(
        pytest.param(line, marks=pytest.mark.slow)
        for block in ("planning", "training")
        for line in TOUR[block].splitlines()
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_tour(command, folder):
    """In order: some commands use files of earlier ones. `train` and other launchers start a new process."""
    command = command.partition("#")[0].strip()
    program, *words = shlex.split(command)
    if program == "paceline" and words != ["train"]:
        succeed(*words, at=folder)
    else:
        run(command, folder)


def test_files_that_the_tour_writes(folder):
    assert (folder / "weights.safetensors").exists()
    names = {path.relative_to(folder / "runs/a").parts[0] for path in (folder / "runs/a").rglob("*")}
    assert {
        "spec.toml",
        "provenance.json",
        "events.jsonl",
        "log.txt",
        "ckpt",
        "ranks",
        "tensorboard",
    } <= names


def test_training_loop_of_the_readme(folder):
    (folder / "own.py").write_text(README["own.py"])
    assert "Ended(" in succeed("python", "own.py", at=folder).out


def test_request_file_of_the_runs_page(folder):
    (folder / "run.toml").write_text(read_blocks("docs/runs.md")["run.toml"])
    assert "done" in succeed("train", "run.toml", "--run-dir", "runs/from-file", at=folder).out


def rows(text: str) -> list[str]:
    """Return the names in the closing table of a training."""
    return [name for name in re.findall(r"^(\w[\w ]*?) {2,}\S", text, re.M) if not name.startswith("step ")]


def test_output_in_the_readme_has_the_rows_of_a_training(tmp_path):
    [sample] = re.findall(r"```\n(digits with .*?)```", (ROOT / "README.md").read_text(), re.S)
    output = succeed("train", "digits", "--ranks", "2", "--steps", "4", at=tmp_path).out
    assert "wall" in rows(output)
    assert rows(sample) == rows(output)


def test_links_exist():
    for page in [
        ROOT / "README.md",
        ROOT / "benchmarks/README.md",
        ROOT / "examples/README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tree_lists_every_file():
    listed = set(re.findall(r"^  (\S+\.py)", (ROOT / "docs/tree.md").read_text(), re.M))
    assert listed == {
        str(path.relative_to(ROOT / "src/paceline")) for path in (ROOT / "src/paceline").rglob("*.py")
    }
