"""Ragged tensors are padded to the longest of the global batch, on every rank and in every micro-batch."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import harness
from harness import TrainingResult, differences, take_sgd_step_, train_on_ranks
from paceline import Ragged, Spec, Task
from paceline.data.order import shuffle
from paceline.data.ragged import pad_each, pad_together
from paceline.errors import PlanError
from paceline.spec import Optimizer
from paceline.training.init.deferred_init import fill_, record

SPEC = Spec(
    steps=4,
    batch=8,
    seed=5,
    precision="fp64",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0),
    evaluate_every=4,
)
COUNT, VALIDATION, PADDING = 13, 11, -2.0


class Net(nn.Module):
    """A model whose output depends on the padding: it subtracts the mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x - x.mean(1, keepdim=True)).tanh()
        return self.head(x).squeeze(-1)  # type: ignore[no-any-return]


def make_series(count: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=draw).tolist()
    return [torch.randn(length, 2, generator=draw) for length in lengths]


class Series(Task):
    """The loss has an item for each position, and the padding counts."""

    is_global: bool = True
    multiple: int = 1

    def model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Any:
        return make_series(COUNT, 1) if split == "train" else make_series(VALIDATION, 2)

    def collate(self, samples: list[Tensor]) -> Any:
        if not self.is_global:
            return {"x": nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PADDING)}
        return {"x": Ragged(samples, PADDING, self.multiple)}

    def inputs(self, batch: Any) -> Tensor:
        return batch["x"]  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch["x"].sum(-1)).square()

    def weights(self, batch: Any) -> Tensor:
        return torch.ones_like(batch["x"][..., 0])


@cache
def train_plainly(multiple: int) -> TrainingResult:
    """Return what a plain loop on whole batches computes."""
    model, weights, _ = record(Net, SPEC.seed)
    fill_(model, weights, torch.device("cpu"))
    model.double()

    def losses_of(series: list[Tensor]) -> Tensor:
        longest = max(len(x) for x in series)
        longest = -(-longest // multiple) * multiple
        x = torch.full((len(series), longest, 2), PADDING, dtype=torch.float64)
        for row, part in zip(x, series, strict=True):
            row[: len(part)] = part
        return (model(x) - x.sum(-1)).square()  # type: ignore[no-any-return]

    losses, norms = [], []
    train, validation = make_series(COUNT, 1), make_series(VALIDATION, 2)
    for indices in shuffle(np.arange(32), COUNT, SPEC.seed).reshape(4, 8).tolist():
        loss = losses_of([train[index] for index in indices]).mean()
        norms.append(take_sgd_step_(model, loss, 0.1))
        losses.append(loss.item())
    with torch.no_grad():
        values = torch.cat([losses_of(validation[:8]).flatten(), losses_of(validation[8:]).flatten()])
    final = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return TrainingResult(losses, norms, [0.1] * 4, [{"loss": values.mean().item()}], final, ())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "plan", "multiple"),
    [
        (1, "single,microbatches=2", 1),
        (2, "ddp,microbatches=2", 1),
        (2, "ddp,microbatches=2", 4),
        (2, "zero3", 1),
        (4, "zero2", 1),
        (3, "ddp,uneven=1", 1),
        (2, "tp=2", 1),
    ],
)
def test_padding_is_that_of_the_global_batch(ranks: int, plan: str, multiple: int) -> None:
    found = train_on_ranks(ranks, Series(multiple=multiple), SPEC, plan)
    assert not differences(found, train_plainly(multiple), 1e-10)


@pytest.mark.processes
def test_padding_of_each_rank_differs() -> None:
    found = train_on_ranks(
        2, Series(is_global=False), SPEC.model_copy(update={"allow_local_loss": True}), "ddp"
    )
    assert differences(found, train_plainly(1), 1e-10)


def refusal() -> str:
    try:
        harness.train_on_this_rank(Series(), SPEC, "pp=2,microbatches=2")
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_pipeline_refuses_other_lengths() -> None:
    for message in harness.ranks(2)(refusal):
        assert "a pipeline requires micro-batches of one shape" in message
        assert message.endswith("use a plan without pp")


def test_all_dims_are_padded_at_their_end() -> None:
    first = pad_each([Ragged([torch.ones(1, 3), torch.ones(2, 1)], -1), "text"])
    second = pad_each([Ragged([torch.ones(1, 4)], -1), "text"])
    (a, text), (b, _) = pad_together([first, second])
    assert text == "text"
    assert a.tolist() == [[[1, 1, 1, -1], [-1] * 4], [[1, -1, -1, -1], [1, -1, -1, -1]]]
    assert b.tolist() == [[[1, 1, 1, 1], [-1] * 4]]
    [(c, _)] = pad_together([second], lambda sizes: [size + 1 for size in sizes])
    assert c.shape == (1, 2, 5)


def test_tensors_that_cannot_be_padded_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch.float32 with 1 dims, torch.int64 with 1 dims"):
        Ragged([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="got list"):
        Ragged([[1, 2]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="pad_to_multiple_of must be at least 1, got 0"):
        Ragged([torch.ones(2)], pad_to_multiple_of=0)
