"""`paceline replay`: one step of a run, repeated on one process."""

import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

from command import PACELINE, TASK, clean_environment, events_of_kind, paceline, succeed, write_task
from paceline.debug.replay import measure_gradients, replay
from paceline.errors import PlanError
from paceline.events import Step
from paceline.run import RunFolder, create
from paceline.spec import Launch, Spec

pytestmark = pytest.mark.processes

LOGGED = (
    TASK.replace(
        "        return self.x[index]",
        """        if "LOG" in os.environ:
            with open(os.environ["LOG"], "a") as file:
                file.write(f"{index}\\n")
        return self.x[index]""",
    )
    + """

class Broken(Regression):
    where: str = "loss"

    def model(self):
        return nn.Sequential(super().model(), Divide()) if self.where == "model" else super().model()

    def loss(self, output, batch):
        zero = (output - output.detach()).square()
        root = zero.sqrt()
        return torch.where(zero > 0, root, output.square()) if self.where == "loss" else output.square()


class Divide(nn.Module):
    def forward(self, x):
        return x / (x.detach() * 0)
"""
)
LINE = 1 + LOGGED.split("zero.sqrt()")[0].count("\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with the run r of two ranks: 7 steps in float64, with checkpoints of steps 3, 6 and 7."""
    at = tmp_path_factory.mktemp("replay")
    write_task(at, LOGGED)
    fixed = ("train", "my.py:Regression", "--run-dir", "r", "--steps", "7", "--batch", "12")
    options = ("--precision", "fp64", "--set", "dropout=0.0", "--clip", "0.5", "--device", "cpu")
    save = ("--save-every", "3", "--set", "save.keep=9", "--set", "schedule.warmup=30")
    plan = ("--ranks", "2", "--plan", "zero3,microbatches=2")
    succeed(*fixed, *options, *save, *plan, at=at)
    return at


@pytest.mark.parametrize(("step", "begin"), [(2, 0), (4, 3), (6, 3), (7, 6)])
def test_the_step_equals_that_of_the_run(trained, monkeypatch, step, begin):
    """The run had two ranks, shards and two micro-batches."""
    monkeypatch.chdir(trained)
    monkeypatch.setenv("LOG", str(trained / f"log{step}"))
    before = {path: path.read_bytes() for path in (trained / "r").rglob("*") if path.is_file()}
    found = replay(RunFolder(Path("r")), step, "cpu")
    [event] = [event for event in events_of_kind(trained / "r", Step) if event.step == step]
    assert found.begin == begin
    assert found.loss == pytest.approx(event.loss, rel=1e-10)
    assert found.grad_norm == pytest.approx(event.grad_norm, rel=1e-10)
    assert found.lr == pytest.approx(event.lr, rel=1e-12)
    assert (found.run_loss, found.run_grad_norm) == (event.loss, event.grad_norm)
    norms = [entry.norm for entry in found.gradients]
    assert math.hypot(*norms) == pytest.approx(event.grad_norm, rel=1e-10)
    assert [entry.module for entry in found.gradients][:2] == ["0", "2.0"]
    read = [int(line) for line in (trained / f"log{step}").read_text().split()][-12:]
    assert [index for part in found.indices for index in part] == read
    assert [len(part) for part in found.indices] == [6, 6]
    after = {path: path.read_bytes() for path in (trained / "r").rglob("*") if path.is_file()}
    assert after == before, "the run folder was changed"


def test_a_changed_checkpoint_changes_the_step(trained, monkeypatch, tmp_path):
    """Negative control: from other weights, the loss is not that of the run."""
    monkeypatch.chdir(trained)
    monkeypatch.setattr(
        "paceline.debug.replay.load_", lambda *args: None
    )  # begins with the initial weights instead
    found = replay(RunFolder(Path("r")), 7, "cpu")
    assert abs(found.loss / found.run_loss - 1) > 1e-3


def test_output_of_the_command(trained):
    result = succeed("replay", "r", "--step", "5", "--device", "cpu", at=trained)
    assert "step 5 on one process, from the checkpoint of step 3" in result.out
    assert "the run had plan zero3,microbatches=2; this is one process in 2 micro-batches" in result.out
    assert re.search(r"^samples of micro-batch 2: \d+( \d+){5}$", result.out, re.M)
    [loss, of_run] = re.findall(r"^loss: (\S+) \(in the run: (\S+)\)$", result.out, re.M)[0]
    assert loss == of_run


@pytest.mark.parametrize(
    ("where", "message"),
    [
        pytest.param("loss", rf"the gradient of Sqrt is NaN \(my\.py, line {LINE}\)", id="loss"),
        pytest.param(
            "model", r"the output of module 1 \(Divide\) is not finite", marks=pytest.mark.slow, id="model"
        ),
    ],
)
def test_anomaly_names_the_place(trained, where, message):
    """The run diverges: its gradient or its output is not finite in step 1."""
    words = ("--steps", "3", "--batch", "12", "--device", "cpu", "--set", f"where={where}")
    failed = paceline("train", "my.py:Broken", "--run-dir", where, *words, at=trained)
    assert failed.status != 0
    result = succeed("replay", where, "--step", "1", "--device", "cpu", "--anomaly", at=trained)
    assert re.search(message, result.out), result.all
    plain = succeed("replay", where, "--step", "1", "--device", "cpu", at=trained)
    assert not re.search(message, plain.out)
    assert "nan" in plain.out


@pytest.mark.slow
@pytest.mark.parametrize("end", ["quit", "continue\ncontinue"])
def test_debugger_stops_in_the_loss(trained, end):
    result = subprocess.run(
        [*PACELINE, "replay", "r", "--step", "7", "--device", "cpu", "--debugger"],
        cwd=trained,
        input=f"p ('shape', tuple(output.shape))\n{end}\n",
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "('shape', (6, 3))" in result.stdout
    assert "Traceback" not in result.stderr
    assert ("learning rate" in result.stdout) == (end != "quit")


@pytest.mark.parametrize("plan", ["local-sgd,period=2", "parameter-server"])
def test_plan_with_other_updates_is_refused(tmp_path, plan):
    run = create(tmp_path / "r", Spec(steps=6), Launch(plan=plan, ranks=3))
    with pytest.raises(PlanError, match=rf"plan {plan} makes other updates than one process"):
        replay(run, 1, "cpu")


def test_gradients_by_module():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    model[0].weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    model[2].bias.grad = torch.tensor([math.nan])
    first, second = measure_gradients(model, scale=2.0)
    assert (first.module, first.norm, first.num_params, first.not_finite) == ("0", 2.5, 1, 0)
    assert (second.module, second.num_params, second.not_finite) == ("2", 1, 1)
    assert math.isnan(second.norm)
