"""The pages for people who come from other tools: both programs of a pair compute the same losses."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from command import clean_environment, events_of_kind, succeed
from paceline.events import Step
from pages import ROOT, read_blocks

STEPS = 20


def write_weights(folder: Path, prefix: str = "") -> None:
    """Write the weights of both programs. prefix: of the names in the model of the task."""
    torch.manual_seed(5)
    state = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).state_dict()
    torch.save(state, folder / "start.pt")
    save_file({prefix + name: value for name, value in state.items()}, folder / "start.safetensors")


def run_native(folder: Path, program: str, *command: str) -> list[float]:
    """Return the losses that a program prints on lines of their own, by default under torchrun on 2 ranks."""
    (folder / "theirs.py").write_text(program)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "theirs.py")
    result = subprocess.run(
        (sys.executable, *(command or torchrun)),
        cwd=folder,
        env=clean_environment(DS_ACCELERATOR="cpu", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return [float(line) for line in re.findall(r"^(?:loss )?(\d+\.\d+(?:e-\d+)?)$", result.stdout, re.M)]


def run_task(folder: Path, page: str) -> list[float]:
    """Run the command of a page, and return the losses of the run."""
    [command] = re.findall(r"`paceline\s+(train my\.py:Net --ranks 2 --plan [^`]+)`", page)
    succeed(*command.split(), "--run-dir", "run", at=folder)
    return [step.loss for step in events_of_kind(folder / "run", Step)]


def write_blocks(folder: Path, page: str) -> dict[str, str]:
    """Write the programs of a page. Those that it lacks are those of the page about DDP."""
    write_weights(folder, "net." if page.endswith("lightning.md") else "")
    blocks = read_blocks("docs/from-ddp.md") | read_blocks(page)
    for name, text in blocks.items():
        (folder / name).write_text(text)
    return blocks


@pytest.mark.processes
@pytest.mark.slow
def test_ddp_and_task_compute_the_same_losses(tmp_path):
    blocks = write_blocks(tmp_path, "docs/from-ddp.md")
    losses = run_task(tmp_path, (ROOT / "docs/from-ddp.md").read_text())
    native = run_native(tmp_path, blocks["ddp.py"])
    assert len(losses) == len(native) == STEPS
    assert losses == pytest.approx(native, rel=1e-6)
    without_momentum = blocks["ddp.py"].replace(", momentum=0.9", "")
    assert losses != pytest.approx(run_native(tmp_path, without_momentum), rel=1e-3)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "module"),
    [
        ("fsdp2", "torch"),
        ("accelerate", "accelerate"),
        ("deepspeed", "deepspeed"),
        ("lightning", "lightning"),
    ],
)
def test_tool_and_task_compute_the_same_losses(tool, module, tmp_path):
    skip_without(module)
    blocks = write_blocks(tmp_path, f"docs/from-{tool}.md")
    losses = run_task(tmp_path, (ROOT / f"docs/from-{tool}.md").read_text())
    native = run_native(tmp_path, blocks["theirs.py"])
    assert len(losses) == len(native) == STEPS
    assert losses == pytest.approx(native, rel=1e-6)


def skip_without(module: str) -> None:
    """Skip a test if a tool is not installed. Its import may warn, so that it is not imported here."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.ray
def test_ray_train_and_task_compute_the_same_losses(tmp_path):
    blocks = write_blocks(tmp_path, "docs/from-ray-train.md")
    losses = run_task(tmp_path, (ROOT / "docs/from-ray-train.md").read_text())
    run_native(tmp_path, blocks["theirs.py"], "theirs.py")
    native = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == len(native) == STEPS
    assert losses == pytest.approx(native, rel=1e-6)


@pytest.mark.processes
@pytest.mark.slow
def test_trainer_and_trainer_task_compute_the_same_losses(tmp_path):
    skip_without("transformers")
    skip_without("accelerate")
    blocks = write_blocks(tmp_path, "docs/from-hf-trainer.md")
    native = run_native(tmp_path, blocks["theirs.py"])
    losses = run_native(tmp_path, blocks["ours.py"], "theirs.py")
    assert len(losses) == len(native) == STEPS
    assert losses == pytest.approx(native, rel=1e-6)
