"""Tests of models in a pipeline whose forward hooks keep outputs of parts."""

from typing import Any

import pytest
from torch import Tensor, nn

import models
from faults import replaced
from harness import differences_from_single, ranks, train_on_ranks, train_on_this_rank
from paceline import Spec, Task
from paceline.errors import Error
from paceline.parallel.pipeline import stage
from paceline.spec import Optimizer

pytestmark = pytest.mark.processes

SPEC = Spec(batch=8, steps=2, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.05, weight_decay=0.1))
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Collector(nn.Module):
    """Collects outputs by hooks, which its first forward pass installs, and uses one of them by its index.

    kind: "outputs" and "inputs" of blocks, hidden "layers" of blocks, or "sums", which its hook computes.
    """

    def __init__(self, kind: str, index: int):
        super().__init__()
        self.kind, self.index, self.kept, self.is_hooked = kind, index, [], False  # type: ignore[var-annotated]
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def install(self) -> None:
        for block in self.blocks:
            if self.kind == "layers":
                block.up.register_forward_hook(lambda module, args, output: self.kept.append(output))
            elif self.kind == "inputs":
                block.register_forward_hook(
                    lambda module, args, kwargs, output: self.kept.append(args[0]), with_kwargs=True
                )
            elif self.kind == "sums":
                block.register_forward_hook(lambda module, args, output: self.kept.append(output.sum(1)))
            else:
                block.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.install()
        self.kept.clear()
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        kept = self.kept[self.index]
        return self.head(x + 0.1 * kept[:, :1] if kept.dim() > 1 else x + 0.1 * kept[:, None])


class Collected(Task):
    kind: str = "outputs"
    index: int = 3

    def model(self) -> nn.Module:
        return Collector(self.kind, self.index)

    def dataset(self, split: str) -> Any:
        return models.Pairs(x=models.random_normal(24, 4)) if split == "train" else None

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[0][:, :3]).square()


CASES = [("outputs", 3), ("outputs", 1), ("inputs", 2), ("layers", 2), ("layers", 3)]
PLANS = [
    (2, "pp=2"),
    pytest.param(2, "pp=2,pp_schedule=interleaved,stages=2", marks=pytest.mark.slow),
    pytest.param(4, "zero3,dp=2,pp=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "plan"), PLANS)
@pytest.mark.parametrize(("kind", "index"), CASES)
def test_kept_outputs_have_the_same_index_on_all_stages(kind: str, index: int, size: int, plan: str) -> None:
    assert not differences_from_single(size, plan, Collected(kind=kind, index=index), SPEC)


def skip_hooks() -> Any:
    return replaced(stage, "replay_hooks", lambda original: lambda *_: None)


@pytest.mark.slow
def test_without_their_calls_the_index_is_missing() -> None:
    for kind, index in (("outputs", 3), ("layers", 2)):
        with pytest.raises(AssertionError, match="IndexError"):
            train_on_ranks(2, Collected(kind=kind, index=index), SPEC, "pp=2", skip_hooks)


def return_refusal(task: Task) -> str:
    with pytest.raises(Error) as raised:
        train_on_this_rank(task, SPEC, "pp=2,pp_schedule=interleaved,stages=2")
    return str(raised.value)


def test_results_of_hooks_bar_cuts() -> None:
    """A hook that computes runs only on the stage of its part."""
    assert not differences_from_single(2, "pp=2", Collected(kind="sums", index=0), SPEC)
    for error in ranks(2)(return_refusal, Collected(kind="sums", index=0)):
        assert "also needs values computed earlier" in error
