"""Task.transform and Task.batch_transform: equal under every plan, any workers and after a resume."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from command import succeed
from drawing import Oracle
from faults import replaced
from harness import differences_from_single, train_on_ranks
from models import SAMPLES, Rows, random_normal
from paceline import SampleRng, Spec, Task, TaskError
from paceline.data import augment
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.open_samples import open_samples, open_training_samples
from paceline.data.order import SampleOrder
from paceline.distributed.rng import derive_seed
from paceline.drill.sample_log_task import NumberedSample, SampleLog, wrap_task
from paceline.errors import DataError
from paceline.plan.plan import parse
from paceline.spec import Loading, Optimizer
from paceline.task import check_task_class

CPU = torch.device("cpu")
SPEC = Spec(
    steps=4, batch=8, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.05, momentum=0.0)
)


class Points:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "x": random_normal(SAMPLES, 5)[index],
            "y": random_normal(SAMPLES, 3, seed=1)[index],
            "index": torch.tensor(index),
        }


class WholeBatches(Rows):
    def batch_of(self, indices: list[int]) -> dict[str, Tensor]:
        return self[indices]  # type: ignore[index]


class Jittered(Task):
    """Each sample gets noise from `rng` and from numpy, and each batch noise from `rng`."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def dataset(self, split: str) -> Any:
        return Points()

    def inputs(self, batch: Any) -> Tensor:
        return batch["x"]

    def transform(self, sample: Any, rng: SampleRng) -> Any:
        noise = rng.randn(5)[0] + float(np.random.rand())
        return sample | {"x": sample["x"] + noise, "rng": rng.rand(2)[0]}

    def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
        return batch | {"x": batch["x"] * (1 + rng.rand(5)), "both": rng.rand(2)}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch["y"]).square()


class WithGlobalDraws(Jittered):
    def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
        return batch | {"x": batch["x"] + torch.rand(5)}


def read(rank: int, ranks: int, microbatches: int, workers: int, first: int = 0) -> dict[int, list[float]]:
    """Return the inputs of the samples of four steps by their number."""
    part = RankBatchSlice(8, microbatches, rank, ranks)
    parts = list(training_parts(part, SampleOrder(SAMPLES, 3), first, 4))
    samples = open_training_samples(Jittered(), SPEC)
    found = {}
    for (numbers, indices), batch in zip(parts, batches(samples, parts, CPU, workers, 2), strict=True):
        assert batch["index"].tolist() == indices
        found |= dict(zip(numbers, batch["x"].tolist(), strict=True))
    return found


@pytest.mark.parametrize(
    ("ranks", "microbatches", "workers", "first"), [(1, 4, 0, 0), (3, 1, 0, 0), (2, 2, 2, 0), (1, 1, 1, 2)]
)
def test_samples_do_not_depend_on_who_reads_them(
    ranks: int, microbatches: int, workers: int, first: int
) -> None:
    whole = read(0, 1, 1, 0)
    found: dict[int, list[float]] = {}
    for rank in range(ranks):
        found |= read(rank, ranks, microbatches, workers, first)
    assert found == {number: row for number, row in whole.items() if number >= first * 8}
    assert len({tuple(row) for row in whole.values()}) == 32  # each epoch has other numbers


def test_draws_equal_an_oracle() -> None:
    [batch] = batches(open_training_samples(Jittered(), SPEC), [([4, 9], [0, 1])], CPU, 0, 2)
    seed = derive_seed(3, "rng", "train")
    for row, number in enumerate([4, 9]):
        stream = Oracle(number, seed, "transform")
        stream.call = 0  # randn came first
        np.testing.assert_array_equal(batch["rng"][row], stream.rand(2))
        stream = Oracle(number, seed, "batch_transform")
        stream.call = 0
        np.testing.assert_array_equal(batch["both"][row], stream.rand(2))


def test_evaluations_do_not_augment() -> None:
    for split in ("train", "validation"):
        samples = open_samples(Jittered(), split, SPEC)
        assert samples is not None
        [batch] = batches(samples, [([4, 9], [0, 1])], CPU, 0, 2)
        assert torch.equal(batch["x"], random_normal(SAMPLES, 5)[:2].double())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"), [(2, "zero3,microbatches=2"), (2, "pp=2,microbatches=2"), (3, "ddp,uneven=1")]
)
def test_plans_train_like_one_process(size: int, plan: str) -> None:
    spec = SPEC.model_copy(update={"data": Loading(workers=1)}) if "zero3" in plan else SPEC
    assert not differences_from_single(size, plan, Jittered(), spec)


@contextmanager
def numbered_by_position() -> Iterator[None]:
    """Number the samples by their position on the rank."""

    def open_rng(self: Any, numbers: Any, name: str, device: Any) -> SampleRng:
        return SampleRng(range(len(numbers)), 0, dtype=torch.float64, name=name)

    with replaced(augment.Augmentation, "_open_rng", lambda original: open_rng):
        yield


@pytest.mark.processes
def test_numbering_by_position_is_detected() -> None:
    assert differences_from_single(2, "ddp", Jittered(), SPEC, numbered_by_position)


def test_other_random_numbers_are_refused_when_the_batch_is_divided() -> None:
    divided = open_training_samples(WithGlobalDraws(), SPEC, parse("ddp").resolve(2))
    with pytest.raises(TaskError, match=r"do not come from rng.*plan ddp.*by_sample"):
        list(batches(divided, [([0], [0])], CPU, 0, 2))
    whole = open_training_samples(WithGlobalDraws(), SPEC, parse("single").resolve(1))
    assert len(list(batches(whole, [([0], [0])], CPU, 0, 2))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: None, "returned None"),
        (lambda batch: {"x": batch["x"][:1]}, "returned 1 samples for a batch of 2"),
        (lambda batch: batch["z"], r"batch_transform\(\) raised KeyError: 'z' \(.*test_augment"),
    ],
    ids=["none", "fewer", "raises"],
)
def test_wrong_batches_are_one_sentence(change: Callable[[Any], Any], message: str) -> None:
    class Wrong(Jittered):
        def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
            return change(batch)

    with pytest.raises(TaskError, match=message):
        list(batches(open_training_samples(Wrong(), SPEC), [([0, 1], [0, 1])], CPU, 0, 2))


def test_wrong_definitions_are_refused() -> None:
    class NoRng(Jittered):
        def transform(self, sample: Any) -> Any:  # type: ignore[override]
            return sample

    class Whole(Jittered):
        def dataset(self, split: str) -> Any:
            return WholeBatches(x=random_normal(SAMPLES, 5))

    with pytest.raises(TaskError, match=r"has no parameter rng; define transform\(self, sample, rng"):
        check_task_class(NoRng, "my.py")
    with pytest.raises(DataError, match=r"Whole.transform\(\) would not be called.*batch_of"):
        open_training_samples(Whole(), SPEC)


def test_a_drill_augments_the_samples_of_the_user(tmp_path: Any) -> None:
    (tmp_path / "pace").write_text("0")
    logged = wrap_task(Jittered, SampleLog(tmp_path, tmp_path / "pace", 2, 1))()
    parts = [([4, 9], [0, 1])]
    [batch] = batches(open_training_samples(logged, SPEC), parts, CPU, 0, 2)
    [expected] = batches(open_training_samples(Jittered(), SPEC), parts, CPU, 0, 2)
    assert isinstance(batch, NumberedSample)
    assert torch.equal(batch.content["x"], expected["x"])
    assert batch.indices.tolist() == [0, 1]


@pytest.mark.processes
def test_losses_of_a_run_with_workers_equal_those_without() -> None:
    with_workers = SPEC.model_copy(update={"data": Loading(workers=2)})
    assert train_on_ranks(1, Jittered(), with_workers).losses == train_on_ranks(1, Jittered(), SPEC).losses


@pytest.mark.processes
def test_the_example_of_the_documentation_trains(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    section = page.partition("## Augmentation")[2]
    (tmp_path / "augmented.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    succeed(*["train", "augmented.py", "--ranks", "2", "--epochs", "1", "--no-report"], at=tmp_path)
