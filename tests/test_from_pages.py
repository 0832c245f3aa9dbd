"""The pages for people who come from other tools: both programs of a pair compute the same losses."""

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


def write_weights(folder: Path) -> None:
    torch.manual_seed(5)
    state = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).state_dict()
    torch.save(state, folder / "start.pt")
    save_file(state, folder / "start.safetensors")


def run_native(folder: Path, program: str) -> list[float]:
    """Return the losses that a program prints under torchrun on 2 ranks."""
    (folder / "native.py").write_text(program)
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "native.py",
    )
    result = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return [float(line) for line in result.stdout.split()]


@pytest.mark.processes
@pytest.mark.slow
def test_ddp_and_task_compute_the_same_losses(tmp_path):
    page = (ROOT / "docs/from-ddp.md").read_text()
    blocks = read_blocks("docs/from-ddp.md")
    write_weights(tmp_path)
    (tmp_path / "my.py").write_text(blocks["my.py"])
    [command] = re.findall(r"`paceline (train my\.py:Net --ranks 2 --plan [^`]+)`", page)
    succeed(*command.split(), "--run-dir", "run", at=tmp_path)
    losses = [step.loss for step in events_of_kind(tmp_path / "run", Step)]
    native = run_native(tmp_path, blocks["ddp.py"])
    assert len(losses) == len(native) == STEPS
    assert losses == pytest.approx(native, rel=1e-6)
    without_momentum = blocks["ddp.py"].replace(", momentum=0.9", "")
    assert losses != pytest.approx(run_native(tmp_path, without_momentum), rel=1e-3)
