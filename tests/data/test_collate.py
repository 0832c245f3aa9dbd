"""Batches that `Task.collate` makes."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from harness import TrainingResult, differences, take_sgd_step_, train_on_ranks
from paceline import Spec, Task
from paceline.data.loader import batches
from paceline.data.open_samples import open_samples, open_training_samples
from paceline.data.order import shuffle
from paceline.data.samples import FailedSample, Samples
from paceline.drill.sample_log_task import NumberedSample, wrap_task
from paceline.errors import DataError
from paceline.plan.plan import parse
from paceline.spec import Optimizer
from paceline.training.init.deferred_init import fill_, record

CPU = torch.device("cpu")
SPEC = Spec(steps=3, batch=8, seed=5, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0))
EVALUATED = SPEC.model_copy(update={"evaluate_every": SPEC.steps})
COUNT = 13  # samples, so that steps span epochs


class Series(NamedTuple):
    x: Tensor  # (length, 2)
    y: Tensor  # (length,)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).squeeze(-1)  # type: ignore[no-any-return]


def make_series(count: int) -> list[Series]:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (count,), generator=draw).tolist()
    return [
        Series(torch.randn(length, 2, generator=draw), torch.randn(length, generator=draw))
        for length in lengths
    ]


class Padded(Task):
    fault: bool = False

    def model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Any:
        return make_series(COUNT if split == "train" else 7)

    def collate(self, samples: list[Series]) -> dict[str, Tensor]:
        mask = pad_sequence([torch.ones(len(sample.y)) for sample in samples], batch_first=True)
        return {
            "x": pad_sequence([sample.x for sample in samples], batch_first=True),
            "y": pad_sequence([sample.y for sample in samples], batch_first=True),
            "mask": torch.ones_like(mask) if self.fault else mask,
        }

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output - batch["y"]).square()

    def weights(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["mask"]


def train_without_padding() -> TrainingResult:
    """Return what a plain loop computes, one series after the other."""
    model, weights, _ = record(Net, SPEC.seed)
    fill_(model, weights, CPU)
    model.double()
    losses, norms = [], []

    def mean_loss(series: list[Series]) -> Tensor:
        total = sum((model(x.double()) - y).square().sum() for x, y in series)
        return total / sum(len(y) for _, y in series)  # type: ignore[return-value]

    order = shuffle(np.arange(SPEC.steps * SPEC.batch), COUNT, SPEC.seed).tolist()  # type: ignore[operator]
    dataset = make_series(COUNT)
    for step in range(SPEC.steps):  # type: ignore[arg-type]
        loss = mean_loss([dataset[index] for index in order[step * SPEC.batch : (step + 1) * SPEC.batch]])
        norms.append(take_sgd_step_(model, loss, 0.1))
        losses.append(loss.item())
    with torch.no_grad():
        metrics = [{"loss": mean_loss(make_series(7)).item()}]
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return TrainingResult(losses, norms, [0.1] * len(losses), metrics, final, ())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (1, "single,microbatches=2"),
        (2, "ddp,microbatches=2"),
        (2, "zero3"),
        (2, "tp=2"),
        (4, "zero2,uneven=1,microbatches=2"),
    ],
)
def test_padded_batches_equal_a_plain_loop(ranks: int, plan: str) -> None:
    assert not differences(train_on_ranks(ranks, Padded(), EVALUATED, plan), train_without_padding(), 1e-10)


@pytest.mark.processes
def test_unmasked_padding_is_found() -> None:
    found = train_on_ranks(1, Padded(fault=True), EVALUATED, "single")
    assert differences(found, train_without_padding(), 1e-10)


class Own(Task):
    """A task whose collate function does what `how` says."""

    how: str = "stack"

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def dataset(self, split: str) -> Any:
        return Whole() if self.how == "batch_of" else [{"x": torch.full((3,), float(i))} for i in range(8)]

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        match self.how:
            case "draw":
                return torch.stack([sample["x"] for sample in samples]) + torch.rand(())
            case "none":
                return None
            case "raise":
                raise KeyError("labels")
            case "library":
                return default_collate([{"x": torch.ones(len(samples))}, {"x": torch.ones(1)}])
        return torch.stack([sample.pop("x") for sample in samples])  # changes its samples

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output


class Whole:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(3)

    def batch_of(self, indices: list[int]) -> Tensor:
        return torch.ones(len(indices), 3)


def samples_of(how: str, plan: str = "single", ranks: int = 1) -> Samples:
    return open_training_samples(Own(how=how), SPEC, parse(plan).resolve(ranks))


PART = ([8, 9], [3, 5])


def test_collate_gets_the_samples_as_they_are() -> None:
    expected = torch.tensor([[3.0] * 3, [5.0] * 3], dtype=torch.float64)
    for workers in (0, 1):
        [batch] = batches(samples_of("stack"), [PART], CPU, workers, 1)
        assert torch.equal(batch, expected)


def test_collate_may_draw_only_if_the_plan_does_not_divide_batches() -> None:
    once, again = samples_of("draw"), samples_of("draw")
    again[[0, 1], [0, 1]]  # batches before it do not matter
    torch.manual_seed(99)
    assert torch.equal(once[PART], again[PART])
    assert not torch.equal(once[PART], once[[10, 11], [3, 5]])
    for plan, ranks in (("ddp", 2), ("single,microbatches=2", 1), ("dp=1,pp=2,microbatches=2", 2)):
        failed = samples_of("draw", plan, ranks)[PART]
        assert isinstance(failed, FailedSample)
        assert "collate() of the samples [3, 5] of 'train' draws random numbers" in failed.message
        assert "use a plan that does not divide the batch" in failed.message
        assert isinstance(samples_of("stack", plan, ranks)[PART], Tensor)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "raise",
            [
                "collate() of the samples [3, 5] of 'train' raised KeyError: 'labels' (",
                "test_collate.py, line",
            ],
        ),
        ("library", ["stack expects each tensor to be equal size", "test_collate.py, line"]),
        ("none", ["collate() of the samples [3, 5] of 'train' returned None; it must return the batch"]),
    ],
)
def test_a_collate_function_that_fails_is_reported(how: str, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        list(batches(samples_of(how), [PART], CPU, 0, 1))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "default_collate" not in str(caught.value)


def test_collate_beside_batch_of_is_refused() -> None:
    with pytest.raises(DataError, match=r"Own.collate\(\) would not be called.*remove collate or batch_of"):
        open_samples(Own(how="batch_of"), "train", SPEC)


def test_the_default_is_that_of_torch() -> None:
    samples = make_series(1) * 3
    assert torch.equal(Task.collate(Padded(), samples).x, default_collate(samples).x)


def test_a_drill_collates_what_the_user_collates() -> None:
    task = wrap_task(Own, None)()  # type: ignore[arg-type]
    batch = task.collate([NumberedSample({"x": torch.ones(3)}, 4), NumberedSample({"x": torch.zeros(3)}, 2)])
    assert batch.content.tolist() == [[1.0] * 3, [0.0] * 3]
    assert batch.indices.tolist() == [4, 2]
