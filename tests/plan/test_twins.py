"""Places of a pipeline that are alike are played once, and what is said of the others is what each would say itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import models
from harness import ranks
from paceline import Spec, Task
from paceline.plan.comm_volume import CommVolume
from paceline.plan.plan import parse
from paceline.tasks.digits import Digits
from paceline.training import model_analysis
from paceline.training.dry_run import dry_run
from volumes import counted, wanted

pytestmark = pytest.mark.processes

DEEP = models.ShortText(depth=8, width=64)


def played(monkeypatch: pytest.MonkeyPatch, task: Task, plan: str, size: int) -> tuple[int, list[CommVolume]]:
    """How many places of `plan` were played, and what is said of all."""
    kept: list[Any] = []
    play = dry_run._simulate_rank
    monkeypatch.setattr(dry_run, "_simulate_rank", lambda *args: kept.append(args) or play(*args))
    found = dry_run.compute_stage_volumes(Spec(batch=48), parse(plan), size, task)
    monkeypatch.undo()
    return len(kept), found


def each(task: Task, plan: str, size: int) -> list[CommVolume]:
    copies = parse(plan).resolve(size).ranks_per_stage
    return [
        dry_run.compute_comm_volume(Spec(batch=48), parse(plan), size, place * copies, task)
        for place in range(parse(plan).pp)
    ]


@pytest.mark.parametrize(
    ("plan", "size", "plays"),
    [
        ("pp=4", 4, 3),
        pytest.param("pp=4,tp=2,recompute=full", 8, 3, marks=pytest.mark.slow),
        pytest.param("pp=4,tp=2,dp=2,zero=2", 16, 3, marks=pytest.mark.slow),
        pytest.param("pp=4,dp=2,zero=3,pp_schedule=interleaved", 8, 3, marks=pytest.mark.slow),
        pytest.param(
            "pp=4,dp=2,zero=3", 8, 4, marks=pytest.mark.slow
        ),  # what is gathered depends on what runs next
        ("pp=4,pp_schedule=zero-bubble", 4, 4),
    ],
)
def test_it_is_what_each_place_would_say(
    monkeypatch: pytest.MonkeyPatch, plan: str, size: int, plays: int
) -> None:
    task = models.ShortText(depth=16, width=64) if "interleaved" in plan else DEEP
    found = played(monkeypatch, task, plan, size)
    assert found == (plays, each(task, plan, size))


def test_it_is_what_real_ranks_send() -> None:
    real = [volume for volume, _ in ranks(4)(counted, DEEP, wanted(), "pp=4")]
    assert dry_run.compute_stage_volumes(wanted(), parse("pp=4"), 4, DEEP) == real


class Block(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        inner = 8 if kind == "wider" else 4
        self.mlp = nn.Sequential(nn.Linear(6, inner), nn.Tanh(), nn.Linear(inner, 6))
        self.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "run again":
            return x + checkpoint(self.mlp, x, use_reentrant=False)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.kind != "without gradients"):
            y = self.mlp(x)
        return x + (y + y if self.kind == "doubled" else y)


class Stack(nn.Module):
    """Six blocks, of which the third may be another."""

    def __init__(self, third: str):
        super().__init__()
        self.blocks = nn.ModuleList([Block(third if at == 2 else "") for at in range(6)])
        if third == "shared":
            self.blocks[2].mlp[0].weight = self.blocks[5].mlp[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stacked(models.Points):
    third: str = ""

    def model(self) -> nn.Module:
        return Stack(self.third)

    def dataset(self, split: str) -> models.Pairs | None:
        return (
            models.Pairs(x=models.drawn(64, 6), y=models.drawn(64, 6, seed=1)) if split == "train" else None
        )


@pytest.mark.parametrize(
    "third", ["", "wider", "frozen", "shared", "run again", "without gradients", "doubled"]
)
def test_what_is_not_alike(monkeypatch: pytest.MonkeyPatch, third: str) -> None:
    task, plan, size = Stacked(third=third), "pp=6,dp=2,microbatches=2,pp_schedule=gpipe", 12
    plays, found = played(monkeypatch, task, plan, size)
    assert plays == (4 if third else 3)
    assert found == each(task, plan, size)
    sent = [
        {(entry.collective, entry.axis, entry.calls, entry.bytes) for entry in found[place].entries}
        for place in (1, 2)
    ]
    assert (sent[0] != sent[1]) == (third in ("wider", "frozen", "shared", "without gradients"))


def test_no_cut_between_layers_that_are_split_in_pairs() -> None:
    """The second of a pair takes what the first has made, in parts; whole values cross cuts."""
    task, plan = Digits(width=4), parse("tp=2,pp=3,microbatches=3").resolve(6)
    study = model_analysis.analyze_model(Spec(batch=48), plan, task, torch.device("cpu"))
    styles = study.splits.styles
    rows = [at for at, call in enumerate(study.recording.calls) if styles.get(call.part) == "row"]
    assert rows
    assert not set(rows) & set(study.recording.cuts)
    alone = model_analysis.analyze_model(
        Spec(batch=48), parse("pp=3,microbatches=3").resolve(3), task, torch.device("cpu")
    )
    assert set(rows) & set(alone.recording.cuts)
