"""Tests of a vocabulary that tp does not divide: the last rank has fewer rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from faults import replaced
from harness import differences_from_single, ranks, train_on_this_rank
from paceline import Layout, Spec, Task, train
from paceline.distributed.dtensor import has_no_empty_shard, shard_size
from paceline.errors import PlanError
from paceline.parallel.tensor import linear as layers
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer
from paceline.training.checkpoint.stored import load_weights
from paceline.training.model_facts.model_analysis import analyze_model
from volumes import check_volumes

pytestmark = pytest.mark.processes

SPEC = Spec(
    steps=3, batch=8, seed=3, precision="fp64", optimizer=Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class OddVocabulary(models.Text):
    """A model of 11 tokens, which 2 and 4 do not divide."""

    tied: bool = False
    split: str | None = None

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Embedding(11, 8), Mlp(), Mlp(), nn.Linear(8, 11, bias=not self.tied))
        if self.tied:
            model[3].weight = model[0].weight
        return model

    def inputs(self, batch: Any) -> Any:
        return batch["tokens"][:, :-1]

    def layout(self) -> Layout:
        return Layout(tensor={"3": self.split} if self.split else None)


def test_shard_sizes() -> None:
    assert [shard_size(11, parts) for parts in (1, 2, 4)] == [11, 6, 3]
    assert [has_no_empty_shard(11, parts) for parts in (2, 4, 5, 6, 12)] == [True, True, False, True, False]


@pytest.mark.parametrize(
    ("size", "plan", "tied"),
    [
        (4, "tp=4,microbatches=2", True),
        (4, "dp=2,tp=2,zero=3", False),
        (4, "pp=2,tp=2,microbatches=2", False),
        *(pytest.param(2, "tp=2", tied, marks=pytest.mark.slow) for tied in (False, True)),
        *(pytest.param(4, f"dp=2,tp=2,zero={zero}", True, marks=pytest.mark.slow) for zero in (0, 1, 2, 3)),
        pytest.param(4, "pp=2,tp=2,microbatches=2", True, marks=pytest.mark.slow),
        pytest.param(8, "dp=2,pp=2,tp=2,microbatches=2,zero=3", False, marks=pytest.mark.slow),
    ],
)
def test_trains_as_one_process(size: int, plan: str, tied: bool) -> None:
    task = OddVocabulary(tied=tied)
    styles = analyze_model(SPEC, parse(plan).resolve(size), task, torch.device("cpu")).splits.styles
    assert {name: style for name, style in styles.items() if name in ("0", "3")} == {
        "0": "vocabulary",
        "3": "head",
    }
    assert not differences_from_single(size, plan, task, SPEC)


def find_split_sizes(task: Task, plan: str) -> list[bool]:
    sizes: list[nn.Module] = []
    with replaced(
        layers, "as_split_dtensor", lambda original: lambda *args: sizes.append(args[1]) or original(*args)
    ):
        train_on_this_rank(task, SPEC, plan)
    return sizes


def test_loss_over_split_vocabulary() -> None:
    for parts in ranks(4)(find_split_sizes, OddVocabulary(), "tp=4"):
        assert set(parts) == {11}


def test_comm_volume() -> None:
    check_volumes(2, "tp=2", OddVocabulary(), SPEC.model_copy(update={"steps": 4}))


def plant_wrong_offset() -> Any:
    return replaced(layers, "shard_size", lambda original: lambda size, parts: size // parts)


@pytest.mark.parametrize("tp", [2, 4])
def test_wrong_offset_is_detected(tp: int) -> None:
    assert differences_from_single(tp, f"tp={tp}", OddVocabulary(), SPEC, plant_wrong_offset)


def train_to(plan: str, steps: int, run: Path) -> None:
    list(
        train(
            SPEC.model_copy(update={"steps": steps}),
            parse(plan),
            task=OddVocabulary(tied=True),
            run=RunFolder(run),
        )
    )


@pytest.mark.slow
def test_resume_under_other_plans(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    stops = (
        (1, "single", 5, whole),
        (4, "dp=2,tp=2,zero=3", 2, run),
        (4, "tp=4", 3, run),
        (1, "single", 4, run),
        (2, "tp=2", 5, run),
    )
    for size, plan, steps, path in stops:
        path.mkdir(exist_ok=True)
        ranks(size)(train_to, plan, steps, path)
    expected, found = (load_weights(RunFolder(path).checkpoint(5)) for path in (whole, run))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)


def test_rank_without_rows() -> None:
    """Without a layout the head stays whole, with a note. A layout that splits it is an error."""
    plan = parse("tp=12").resolve(12)
    found = analyze_model(
        SPEC.model_copy(update={"batch": 12}), plan, OddVocabulary(), torch.device("cpu")
    ).splits
    assert not {"0", "3"} & found.styles.keys()
    assert found.notes == ("tp: 0, 3 not split",)
    with pytest.raises(PlanError, match=r"tp=12 does not divide the 11 features of 3$"):
        analyze_model(SPEC, plan, OddVocabulary(split="head"), torch.device("cpu"))
