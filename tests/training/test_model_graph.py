"""The graph of a model, found by TensorBoard's own reader."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from command import succeed
from harness import ranks
from paceline import Spec, train
from paceline.events import Noted, Step
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Save
from paceline.training.model_facts.model_graph import build_model_graph
from pages import read_blocks

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = pytest.mark.processes

SPEC = Spec(batch=8, steps=3, evaluate_every=100, save=Save(minutes=float("inf")), profile=False, graph=True)


class TwoLayers(models.Points):
    """A model with a known graph: a sum of two branches of one input."""

    def model(self) -> nn.Module:
        return Branches()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + torch.relu(self.right(x))


class NeedsValues(models.Points):
    def model(self) -> nn.Module:
        return Branching(super().model())


class Branching(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if x.sum().item() > 0 else 1.0)


def read(folder: Path) -> dict[str, Any]:
    board = accumulators.EventAccumulator(str(folder / "tensorboard/graph"))
    board.Reload()
    return {node.name: node for node in board.Graph().node}


def train_on_rank(task: Any, spec: Spec, plan: str, folder: str) -> tuple[list[Any], list[str]]:
    events = list(train(spec, parse(plan), task=task, run=RunFolder(Path(folder)), device="cpu"))
    losses = [(event.loss, event.grad_norm) for event in events if isinstance(event, Step)]
    return losses, [event.message for event in events if isinstance(event, Noted)]


def test_known_graph(tmp_path: Path) -> None:
    ranks(2)(train_on_rank, TwoLayers(), SPEC, "ddp", str(tmp_path))
    nodes = read(tmp_path)
    sources = {name: set(node.input) for name, node in nodes.items()}
    x = next(name for name in nodes if name.startswith("input/") and name in sources["Branches/left/linear"])
    assert sources["Branches/left/linear"] == {x, "Branches/left/weight", "Branches/left/bias"}
    assert sources["Branches/right/linear"] == {x, "Branches/right/weight"}
    assert sources["Branches/relu"] == {"Branches/right/linear"}
    assert sources["Branches/add"] == {"Branches/left/linear", "Branches/relu"}
    shape = nodes["Branches/add"].attr["_output_shapes"].list.shape[0]
    assert [size.size for size in shape.dim] == [8, 3]


@pytest.mark.parametrize("plan", ["zero3", "pp=2,microbatches=2"])
def test_graph_under_a_plan_changes_no_result(plan: str, tmp_path: Path) -> None:
    task = models.ShortText()
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    first = ranks(2)(train_on_rank, task, SPEC, plan, str(tmp_path / "with"))
    plain = SPEC.model_copy(update={"graph": False})
    assert ranks(2)(train_on_rank, task, plain, plan, str(tmp_path / "without")) == first
    assert not (tmp_path / "without/tensorboard").exists()
    nodes = read(tmp_path / "with")
    assert set(nodes) == {node.name for node in build_model_graph(SPEC, task)}, "that of the whole model"
    done: set[str] = set()
    for name, node in nodes.items():
        assert set(node.input) <= done, f"{name} uses what comes later"
        done.add(name)
    parameters = {name.partition("/")[2].replace("/", ".") for name in nodes if nodes[name].op == "Parameter"}
    assert parameters == {name for name, _ in task.model().named_parameters()}


def test_model_that_needs_values(tmp_path: Path) -> None:
    losses, [note] = ranks(1)(train_on_rank, NeedsValues(), SPEC, "single", str(tmp_path))[0]
    assert note.startswith("the graph of the model is not written: ")
    assert len(losses) == 3, "the training continues"


def test_command_of_the_page(tmp_path: Path) -> None:
    [line] = read_blocks("docs/tensorboard.md")["graph"].splitlines()
    succeed(*shlex.split(line)[1:], at=tmp_path)
    assert any(node.op == "linear" for node in read(tmp_path / "runs/g").values())
