"""A NaN in the part of one rank: all ranks stop or skip together, and the training resumes."""

import json
from pathlib import Path

import numpy as np
import pytest

from command import paceline, succeed, write_task
from harness import relative_difference
from paceline.data.order import shuffle
from paceline.run import RunFolder
from paceline.training.checkpoint.stored import load_weights

STEPS, BATCH, SAMPLES, SEED = 7, 8, 40, 3
BAD_STEP = 4  # from 0, so that step 5 is reported
# The last sample of a batch is in the part of the last rank, and in the last micro-batch.
BAD_SAMPLE = int(shuffle(np.arange(BAD_STEP * BATCH, (BAD_STEP + 1) * BATCH), SAMPLES, SEED)[-1])

TASK = f"""
import os

import torch
from torch import nn

from paceline import Task


class Pairs:
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn({SAMPLES}, 6, generator=draw), torch.randn({SAMPLES}, 3, generator=draw)
        if "WITH_NAN" in os.environ:
            self.x[{BAD_SAMPLE}, 2] = torch.nan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(Task):
    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def dataset(self, split):
        return Pairs() if split == "train" else None

    def loss(self, output, batch):
        return (output - batch[1]).square()
"""
WORDS = (
    *("train", "my.py:Net", "--precision", "fp64", "--lr", "0.01", "--seed", str(SEED)),
    *("--batch", str(BATCH), "--steps", str(STEPS), "--set", "save.every=2", "--set", "spec.profile=false"),
)
SINGLE = ("--ranks", "1", "--plan", "single")
SENTENCE = "paceline: the loss is nan at step 5; the last finite loss was "
PLANS = ("zero3", "ddp", "tp=2", "pp=2,microbatches=2")


def weights_of(run: Path) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load_weights(RunFolder(run).checkpoint(STEPS)).items()}


def differs_by(run: Path, expected: Path) -> float:
    weights = weights_of(run)
    return max(relative_difference(weights[name], value) for name, value in weights_of(expected).items())


def notes_of(run: Path) -> list[str]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["message"] for event in events if event["event"] == "noted"]


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of one process: without the NaN, and skipping it."""
    folder = tmp_path_factory.mktemp("singles")
    write_task(folder, TASK)
    succeed(*WORDS, *SINGLE, "--run-dir", "clean", at=folder)
    skip = ("--set", "optimizer.on_nan=skip")
    succeed(*WORDS, *SINGLE, *skip, "--run-dir", "skipped", at=folder, WITH_NAN="1")
    assert differs_by(folder / "skipped", folder / "clean") > 1e-6
    return folder


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan", [plan if plan == "zero3" else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS]
)
def test_all_ranks_stop_and_resume(plan: str, singles: Path, tmp_path: Path) -> None:
    write_task(tmp_path, TASK)
    on_ranks = ("--ranks", "2", "--plan", plan)
    stopped = paceline(*WORDS, *on_ranks, "--run-dir", "run", at=tmp_path, WITH_NAN="1")
    assert stopped.status == 2, stopped.all
    assert stopped.err.startswith(SENTENCE), stopped.all
    assert "go back to step 4 with: paceline resume run" in stopped.err
    assert stopped.err.count("\n") == 1, stopped.all
    run = RunFolder(tmp_path / "run")
    assert run.checkpoints() == [2, 4]
    sentence = stopped.err.removeprefix("paceline: ").strip()
    for rank in range(2):  # both, and at the same step
        assert sentence in (run.path / "ranks" / f"{rank}.log").read_text().splitlines()[-1]
    succeed("resume", "run", at=tmp_path)
    assert differs_by(tmp_path / "run", singles / "clean") <= 1e-10


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_skip(plan: str, singles: Path, tmp_path: Path) -> None:
    write_task(tmp_path, TASK)
    words = (*WORDS, "--set", "optimizer.on_nan=skip", "--ranks", "2", "--plan", plan, "--run-dir", "run")
    succeed(*words, at=tmp_path, WITH_NAN="1")
    assert differs_by(tmp_path / "run", singles / "skipped") <= 1e-10
    assert [note for note in notes_of(tmp_path / "run") if note.startswith("step 5: the loss is nan, so the")]
