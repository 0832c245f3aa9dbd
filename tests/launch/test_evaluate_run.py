"""`paceline.evaluate` and `paceline evaluate`: a checkpoint on any split, ranks and plan.

The reference is a plain loop over single samples in float64 with the weights of the checkpoint.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline as package
from command import checkpoint_weights, paceline, read_events, succeed
from faults import replaced
from harness import ranks
from paceline import DataError, PlanError, RunFolder, Spec, World, train
from paceline.errors import CheckpointError, SpecError
from paceline.events import Evaluated
from paceline.run import create
from paceline.spec import Launch, Save
from paceline.task import load_task
from pages import read_blocks

pytestmark = pytest.mark.processes

TASKS = """
import torch
import torch.nn.functional as F
from torch import nn

from paceline import Layout, Task
from paceline.tasks.text import Gpt

SIZES = {"train": 12, "validation": 7, "test": 11}


class Pairs:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, x):
        return x * self.scale


class Net(Task):
    dropout: float = 0.5

    def model(self):
        def block():
            return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(self.dropout))

        return nn.Sequential(nn.Linear(5, 8), Scale(), block(), block(), nn.Linear(8, 3))

    def dataset(self, split):
        if split not in SIZES:
            return None
        draw = torch.Generator().manual_seed(SIZES[split])
        x, y = (torch.randn(SIZES[split], width, generator=draw) for width in (5, 3))
        return Pairs(x, y)

    def loss(self, output, batch):
        return (output - batch[1]).square()

    def metrics(self, output, batch):
        return {"near": (output - batch[1]).abs().amax(1) < 1.0}


class Chars(Task):
    def model(self):
        return Gpt(width=8, depth=2, heads=2, context=8)

    def layout(self):
        return Layout(blocks=("blocks",))

    def dataset(self, split):
        if split not in SIZES:
            return None
        draw = torch.Generator().manual_seed(SIZES[split])
        tokens = torch.randint(0, 16, (SIZES[split], 9), generator=draw)
        return Pairs(tokens[:, :-1], tokens[:, 1:])

    def loss(self, output, batch):
        return F.cross_entropy(output.transpose(1, 2), batch[1], reduction="none")

    def metrics(self, output, batch):
        return {"accuracy": output.argmax(-1) == batch[1]}
"""
STEPS = 4


def make_run(folder: Path, name: str, **more) -> Path:
    """Train a task of TASKS in this process, and return the folder of the run."""
    file = folder / f"{name.lower()}_task.py"
    file.write_text(TASKS)
    spec = Spec(
        task=f"{file}:{name}",
        batch=6,
        steps=STEPS,
        seed=3,
        precision="fp64",
        threads=1,
        evaluate_every=2,
        save=Save(every=1, keep=9, minutes=float("inf")),
        **more,
    )
    run = create(folder / name.lower(), spec, Launch(plan="single", ranks=1, device="cpu"))
    torch.manual_seed(0)
    events = list(train(spec, "single", World(), run=run, device="cpu"))
    by_step = {event.step: event.metrics for event in events if isinstance(event, Evaluated)}
    (folder / f"{name.lower()}.json").write_text(json.dumps(by_step))
    return run.path


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("net"), "Net")


@pytest.fixture(scope="module")
def chars(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("chars"), "Chars")


def expected_metrics(run: Path, split: str, step: int) -> dict[str, float]:
    """Return the means over a split, from a plain loop over its samples."""
    task = load_task(f"{run.parent / run.name}_task.py:{run.name.title()}", {})
    model = task.model().double().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("scale"):
            buffer.copy_(torch.linspace(0.5, 1.5, 8))
    weights = {name: torch.from_numpy(array) for name, array in checkpoint_weights(run, step).items()}
    model.load_state_dict(weights)
    dataset = task.dataset(split)
    values: dict[str, list[np.ndarray]] = {}
    for index in range(len(dataset)):
        x, y = (item.double() if item.is_floating_point() else item for item in dataset[index])
        with torch.no_grad():
            output = model(x[None])
        batch = x[None], y[None]
        for name, value in {"loss": task.loss(output, batch), **task.metrics(output, batch)}.items():
            values.setdefault(name, []).append(value.double().numpy().ravel())
    return {name: float(np.concatenate(arrays).mean()) for name, arrays in values.items()}


def evaluate_on_this_rank(run: Path, split: str, checkpoint: str, options: dict):
    return package.evaluate(run, split, checkpoint, **options)


def read_files(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


CASES = [
    ("net", 1, "single", 6),
    ("net", 2, "ddp", 6),
    ("net", 2, "zero1", 4),
    ("net", 2, "zero3", 3),
    ("net", 4, "zero2", 64),
    ("chars", 2, "tp=2", 6),
    ("chars", 2, "cp=2", 5),
    ("chars", 4, "pp=2", 4),
]
SLOW_CASES = [
    (name, size, plan, batch)
    for name in ("net", "chars")
    for size, plan in [
        *((2, plan) for plan in ("ddp", "zero1", "zero2", "zero3", "pp=2", "pp=2,microbatches=2")),
        *((4, plan) for plan in ("hsdp", "zero3", "local-sgd,period=2", "ddp,uneven=1")),
        *((4, plan) for plan in ("dp=2,tp=2", "tp=2,pp=2", "dp=2,cp=2") if name == "chars"),
    ]
    for batch in (1, 6, 7, 64)
]


@pytest.mark.parametrize(
    ("name", "size", "plan", "batch"),
    [*CASES, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES if case not in CASES]],
)
def test_metrics_equal_those_of_a_plain_loop(name, size, plan, batch, request) -> None:
    run = request.getfixturevalue(name)
    files = read_files(run)
    options = {"plan": plan, "batch": batch}
    results = ranks(size)(evaluate_on_this_rank, run, "test", "3", options)
    assert all(result.metrics == results[0].metrics for result in results)
    assert results[0].metrics == pytest.approx(expected_metrics(run, "test", 3), rel=1e-10)
    assert (results[0].samples, results[0].step, results[0].ranks, results[0].batch) == (11, 3, size, batch)
    assert read_files(run) == files


def test_the_check_finds_planted_faults(net) -> None:
    """Another checkpoint, another split, and dropout during the evaluation differ from the reference."""
    expected = expected_metrics(net, "test", 3)
    other_step = package.evaluate(net, "test", 2).metrics
    other_split = package.evaluate(net, "validation", 3).metrics
    with replaced(torch.nn.Module, "eval", lambda eval: lambda self: self):
        dropout = package.evaluate(net, "test", 3).metrics
    for metrics in (other_step, other_split, dropout):
        assert metrics != pytest.approx(expected, rel=1e-6)


def test_metrics_equal_those_of_the_training(net) -> None:
    by_step = json.loads(net.with_suffix(".json").read_text())
    assert {*by_step} == {"2", "4"}
    for step, metrics in by_step.items():
        assert package.evaluate(net, checkpoint=int(step)).metrics == metrics


def test_checkpoint_last_and_best(net, tmp_path) -> None:
    by_step = json.loads(net.with_suffix(".json").read_text())
    assert package.evaluate(net).step == STEPS
    best = min(by_step, key=lambda step: by_step[step]["loss"])
    found = package.evaluate(RunFolder(net), "train", "best")
    assert (found.step, found.split, found.samples) == (int(best), "train", 12)
    damaged = shutil.copytree(net, tmp_path / "damaged")
    for file in (damaged / "ckpt" / f"step_{STEPS}").glob("*.distcp"):
        file.write_bytes(b"damaged")
    found = package.evaluate(damaged)
    assert found.step == STEPS - 1
    assert any("damaged" in note for note in found.notes)
    with pytest.raises(CheckpointError, match=f"step_{STEPS} is damaged"):
        package.evaluate(damaged, checkpoint=STEPS)


def test_a_changed_task_is_reported(net, tmp_path) -> None:
    changed = shutil.copytree(net, tmp_path / "net")
    tasks, spec = tmp_path / "changed_task.py", changed / "spec.toml"
    tasks.write_text(TASKS.replace(".square()", ".abs()"))
    from paceline import spec as specs

    before, launch = specs.load(net / "spec.toml", {})
    specs.save(spec, before.model_copy(update={"task": f"{tasks}:Net"}), launch)
    assert any("code of loss() changed" in note for note in package.evaluate(changed).notes)
    assert package.evaluate(net).notes == ()


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (DataError, r"dataset\('tests'\) returned None", {"split": "tests"}),
        (CheckpointError, "no checkpoint of step 9; steps with a checkpoint: 1, 2, 3, 4", {"checkpoint": 9}),
        (SpecError, "must be best, last or a step, got 'newest'", {"checkpoint": "newest"}),
        (SpecError, "batch", {"batch": 0}),
        (SpecError, "device", {"device": "gpu"}),
        (PlanError, "servers, which evaluate no samples", {"plan": "parameter-server"}),
        (PlanError, "zero3", {"plan": "zerro3"}),
    ],
)
def test_bad_values(error, words, options, net) -> None:
    with pytest.raises(error, match=words):
        package.evaluate(net, **options)


def test_checkpoint_by_the_name_of_its_folder(net) -> None:
    by_name, by_step = (package.evaluate(net, checkpoint=name) for name in ("step_2", "2"))
    assert (by_name.step, by_name.metrics) == (2, by_step.metrics)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7"):
        package.evaluate(net, checkpoint="step_7")


def test_no_best_checkpoint(net, tmp_path) -> None:
    run = shutil.copytree(net, tmp_path / "net")
    for step in (2, 4):
        shutil.rmtree(run / "ckpt" / f"step_{step}")
    with pytest.raises(
        CheckpointError, match=r"no best checkpoint.*use --checkpoint last or a step.*: 1, 3$"
    ):
        package.evaluate(run, checkpoint="best")
    shutil.rmtree(run / "ckpt")
    with pytest.raises(CheckpointError, match="no complete checkpoint; continue it with: paceline resume"):
        package.evaluate(run)


def test_command_on_two_ranks(net, tmp_path) -> None:
    result = succeed(
        *("evaluate", net, "--split", "test", "--checkpoint", "best", "--ranks", "2", "--json", "out.json"),
        at=tmp_path,
    )
    content = json.loads((tmp_path / "out.json").read_text())
    step = content["step"]
    assert content["metrics"] == pytest.approx(expected_metrics(net, "test", step), rel=1e-10)
    assert (content["plan"], content["ranks"], content["samples"]) == ("ddp", 2, 11)
    assert f"step_{step} on test: 11 samples, plan ddp on 2 ranks" in result.out
    assert f"{content['metrics']['near']:.6g}" in result.out


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_unknown_split_of_the_command(ranks, net, tmp_path) -> None:
    result = paceline("evaluate", net, "--split", "tests", "--ranks", ranks, at=tmp_path)
    assert result.status == 2
    assert result.err.startswith("paceline: Net.dataset('tests') returned None")
    assert result.err.count("\n") == 1
    assert not read_events(net)


def test_example_in_the_documentation(net, tmp_path, monkeypatch, capsys) -> None:
    shutil.copytree(net, tmp_path / "runs/a")
    monkeypatch.chdir(tmp_path)
    exec(read_blocks("docs/runs.md")["evaluate"], {})
    expected = package.evaluate(net, "test", "best")
    assert capsys.readouterr().out == f"{expected.step} 11 {expected.metrics['loss']}\n"
