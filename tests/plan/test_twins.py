"""Identical places of a pipeline are simulated once; their volumes match separate simulations."""

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
from paceline.training.dry_run import dry_run
from paceline.training.model_facts import model_analysis
from volumes import make_spec, measure_step

pytestmark = pytest.mark.processes

DEEP = models.ShortText(depth=8, width=64)


def simulate(
    monkeypatch: pytest.MonkeyPatch, task: Task, plan: str, size: int
) -> tuple[int, list[CommVolume]]:
    """Return the number of simulated places of `plan`, and the volumes of all places."""
    calls: list[Any] = []
    simulate_rank = dry_run._simulate_rank
    monkeypatch.setattr(dry_run, "_simulate_rank", lambda *args: calls.append(args) or simulate_rank(*args))
    volumes = dry_run.compute_stage_volumes(Spec(batch=48), parse(plan), size, task)
    monkeypatch.undo()
    return len(calls), volumes


def simulate_each_place(task: Task, plan: str, size: int) -> list[CommVolume]:
    copies = parse(plan).resolve(size).ranks_per_stage
    return [
        dry_run.compute_comm_volume(Spec(batch=48), parse(plan), size, place * copies, task)
        for place in range(parse(plan).pp)
    ]


@pytest.mark.parametrize(
    ("plan", "size", "num_simulated"),
    [
        ("pp=4", 4, 3),
        pytest.param("pp=4,tp=2,recompute=full", 8, 3, marks=pytest.mark.slow),
        pytest.param("pp=4,tp=2,dp=2,zero=2", 16, 3, marks=pytest.mark.slow),
        pytest.param("pp=4,dp=2,zero=3,pp_schedule=interleaved", 8, 3, marks=pytest.mark.slow),
        # What is gathered depends on what runs next.
        pytest.param("pp=4,dp=2,zero=3", 8, 4, marks=pytest.mark.slow),
        pytest.param("pp=4,pp_schedule=zero-bubble", 4, 4, marks=pytest.mark.slow),
    ],
)
def test_volumes_match_simulating_each_place(
    monkeypatch: pytest.MonkeyPatch, plan: str, size: int, num_simulated: int
) -> None:
    task = models.ShortText(depth=16, width=64) if "interleaved" in plan else DEEP
    volumes = simulate(monkeypatch, task, plan, size)
    assert volumes == (num_simulated, simulate_each_place(task, plan, size))


def test_volumes_match_real_ranks() -> None:
    real = [volume for volume, _ in ranks(4)(measure_step, DEEP, make_spec(), "pp=4")]
    assert dry_run.compute_stage_volumes(make_spec(), parse("pp=4"), 4, DEEP) == real


class Block(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        inner = 8 if kind == "wider" else 4
        self.mlp = nn.Sequential(nn.Linear(6, inner), nn.Tanh(), nn.Linear(inner, 6))
        self.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpointed":
            return x + checkpoint(self.mlp, x, use_reentrant=False)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.kind != "without gradients"):
            y = self.mlp(x)
        return x + (y + y if self.kind == "doubled" else y)


class Stack(nn.Module):
    """Six blocks; the third may differ."""

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
            models.Pairs(x=models.random_normal(64, 6), y=models.random_normal(64, 6, seed=1))
            if split == "train"
            else None
        )


@pytest.mark.parametrize(
    "third",
    [
        "wider",
        *(
            pytest.param(third, marks=pytest.mark.slow)
            for third in ("", "frozen", "shared", "checkpointed", "without gradients", "doubled")
        ),
    ],
)
def test_different_blocks_are_simulated(monkeypatch: pytest.MonkeyPatch, third: str) -> None:
    task, plan, size = Stacked(third=third), "pp=6,dp=2,microbatches=2,pp_schedule=gpipe", 12
    num_simulated, volumes = simulate(monkeypatch, task, plan, size)
    assert num_simulated == (4 if third else 3)
    assert volumes == simulate_each_place(task, plan, size)
    sent = [
        {(entry.collective, entry.axis, entry.calls, entry.bytes) for entry in volumes[place].entries}
        for place in (1, 2)
    ]
    assert (sent[0] != sent[1]) == (third in ("wider", "frozen", "shared", "without gradients"))


def test_no_cut_between_a_column_and_a_row_layer() -> None:
    """The second layer of a pair takes the split output of the first; only whole values cross cuts."""
    task, plan = Digits(width=4), parse("tp=2,pp=3,microbatches=3").resolve(6)
    analysis = model_analysis.analyze_model(Spec(batch=48), plan, task, torch.device("cpu"))
    styles = analysis.splits.styles
    rows = [at for at, call in enumerate(analysis.trace.calls) if styles.get(call.part) == "row"]
    assert rows
    assert not set(rows) & set(analysis.trace.cuts)
    without_tp = model_analysis.analyze_model(
        Spec(batch=48), parse("pp=3,microbatches=3").resolve(3), task, torch.device("cpu")
    )
    assert set(rows) & set(without_tp.trace.cuts)
