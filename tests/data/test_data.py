"""The order of samples is a pure function of (seed, epoch, position).

On any number of ranks, no sample is lost or seen twice.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset

import harness
import models
from harness import differences, relative_difference, train_on_ranks
from paceline import Spec, Task
from paceline.data.batch_slices import RankBatchSlice, training_parts, validation_parts
from paceline.data.loader import batches
from paceline.data.order import SampleOrder, shuffle
from paceline.data.samples import FailedSample, Samples
from paceline.distributed.rng import FIXED_SEED, derive_seed
from paceline.errors import DataError
from paceline.spec import Loading, Optimizer

CPU = torch.device("cpu")
# by the workers of a data loader, from Python 3.12 on
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def order(samples: int, seed: int, epoch: int = 0) -> list[int]:
    return shuffle(epoch * samples + np.arange(samples), samples, seed).tolist()


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 10, 97, 100, 1000, 1024, 1797, 65537])
def test_each_epoch_is_a_permutation(samples: int) -> None:
    for seed in (0, 1, 2**40):
        for epoch in (0, 1, 1000):
            assert sorted(order(samples, seed, epoch)) == list(range(samples))


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(order(97, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


def test_all_orders_are_equally_likely() -> None:
    orders = [tuple(order(4, seed)) for seed in range(2400)]
    counts = [orders.count(entry) for entry in set(orders)]
    assert len(counts) == 24
    assert min(counts) > 60  # 100 ± 10 each
    first = np.array([order(1000, seed)[0] for seed in range(1000)])
    assert abs(first.mean() - 499.5) < 5 * 289 / 1000**0.5


def test_any_number_can_be_shuffled_independently() -> None:
    numbers = np.arange(3 * 97)
    together = shuffle(numbers, 97, 5)
    assert [shuffle(numbers[i : i + 1], 97, 5)[0] for i in numbers] == together.tolist()
    backwards = shuffle(numbers[::-1], 97, 5)
    assert backwards[::-1].tolist() == together.tolist()


def test_the_order_is_stable_between_releases() -> None:
    assert shuffle(np.arange(8), 1797, 0).tolist() == [1171, 1284, 1756, 1277, 1029, 611, 1759, 3]
    assert shuffle(1797 + np.arange(8), 1797, 0).tolist() == [178, 1180, 1428, 659, 1287, 845, 1298, 671]
    assert shuffle(np.arange(10), 10, 7).tolist() == [5, 7, 9, 1, 0, 6, 3, 4, 2, 8]
    assert shuffle(10**12 + np.arange(4), 10**9 + 7, 123).tolist() == [
        263876599,
        912415230,
        293652711,
        87795930,
    ]


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_slices_of_all_ranks_are_the_global_batch(microbatches: int) -> None:
    for ranks in (1, 2, 3, 4, 6):
        parts = [RankBatchSlice(72, microbatches, rank, ranks).numbers(5) for rank in range(ranks)]
        assert {part.shape for part in parts} == {(microbatches, 72 // microbatches // ranks)}
        # each micro-batch has the same samples, in the same order, on any number of ranks
        assert (
            np.concatenate(parts, axis=1).tolist()
            == RankBatchSlice(72, microbatches, 0, 1).numbers(5).tolist()
        )
        assert sorted(np.concatenate(parts, axis=None)) == list(range(360, 432))


def test_batches_span_epochs() -> None:
    """10 samples in batches of 4: 5 steps are 2 epochs; no batch is short and no sample is dropped."""
    taken = []
    for _, indices in training_parts(RankBatchSlice(4, 1, 0, 1), SampleOrder(10, 3), 0, 5):
        assert len(indices) == 4
        taken += indices
    assert taken == order(10, 3, 0) + order(10, 3, 1)


def test_a_batch_may_be_larger_than_an_epoch() -> None:
    [(_, indices)] = training_parts(RankBatchSlice(12, 1, 0, 1), SampleOrder(5, 0), 0, 1)
    assert indices == [*order(5, 0, 0), *order(5, 0, 1), *order(5, 0, 2)[:2]]


def test_training_parts_continue_from_a_step() -> None:
    whole = list(
        training_parts(RankBatchSlice(6, 3, 1, 2), SampleOrder(97, 4), 0, 5000)
    )  # more than one chunk of the shuffle
    assert len(whole) == 3 * 5000
    for step in (1, 17, 4095, 4999):
        rest = training_parts(RankBatchSlice(6, 3, 1, 2), SampleOrder(97, 4), step, 5000)
        assert list(rest) == whole[3 * step :]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_validation_has_each_sample_on_one_rank(ranks: int) -> None:
    for samples in (1, 2, 3, 8, 11, 64, 97):
        for batch in (1, 3, 8, 64):
            parts = [list(validation_parts(samples, batch, rank, ranks)) for rank in range(ranks)]
            assert (
                len({len(of_rank) for of_rank in parts}) == 1
            )  # equally many, so that a collective never waits for ever
            assert sorted(index for of_rank in parts for part in of_rank for index in part) == list(
                range(samples)
            )


class Augmented:
    """Samples that draw from all random generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.tensor(
            [random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1), np.random.randn()]
        )
        return noise + index, torch.tensor(index)


class Noisy(Task):
    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(5, 3)

    def dataset(self, split: str) -> Augmented:
        return Augmented()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square()


def read(
    rank: int, ranks: int, workers: int, split: str = "train", steps: int = 8
) -> Iterator[tuple[int, bytes]]:
    parts = list(training_parts(RankBatchSlice(4, 1, rank, ranks), SampleOrder(11, 9), 0, steps))
    with closing(batches(Samples(Augmented(), split, 9, None), parts, CPU, workers, 2)) as found:
        for (numbers, indices), (x, y) in zip(parts, found, strict=True):
            assert y.tolist() == indices
            yield from zip(numbers, (row.numpy().tobytes() for row in x), strict=True)


def test_augmentation_depends_on_the_sample() -> None:
    random.seed(1)
    torch.manual_seed(1)
    expected = dict(read(0, 1, workers=0))
    assert len(set(expected.values())) == len(expected) == 32  # each epoch has other augmentations
    assert dict(read(0, 1, workers=2)) == expected
    for workers in (0, 2):
        assert dict(read(0, 2, workers)) | dict(read(1, 2, workers)) == expected
    assert not {*expected.values()} & {*dict(read(0, 1, workers=0, split="validation")).values()}


@pytest.mark.parametrize("plan", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_augmentation_is_the_same_on_any_number_of_ranks(plan: str) -> None:
    expected = train_on_ranks(
        1, Noisy(), Spec(steps=5, batch=8, precision="fp64", data=Loading(workers=0)), "single"
    )
    for ranks, workers in ((1, 2), (2, 0), (2, 2)):
        found = train_on_ranks(
            ranks, Noisy(), Spec(steps=5, batch=8, precision="fp64", data=Loading(workers=workers)), plan
        )
        assert not differences(found, expected, 1e-12)


def _draw_and_restore(index: int) -> float:
    """Draw, and restore the state of all streams."""
    of_random, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        drawn = random.random() + np.random.rand() + torch.rand(()).item()
    random.setstate(of_random)
    np.random.set_state(of_numpy)
    return drawn


DRAWS: dict[str, Callable[[int], float]] = {
    "torch": lambda index: torch.rand(()).item(),
    "torch normal": lambda index: torch.randn(3)[0].item(),
    "numpy": lambda index: np.random.rand(),
    "numpy normal": lambda index: np.random.randn(),
    "random": lambda index: random.random(),
    "random normal": lambda index: random.gauss(0, 1),
    "seeds itself": lambda index: [random.seed(index), random.random()][1],  # type: ignore[func-returns-value]
    "own generator": lambda index: torch.rand(
        (), generator=torch.Generator().manual_seed(torch.initial_seed())
    ).item(),
    "own numpy generator": lambda index: np.random.default_rng(torch.initial_seed()).random(),
    "own state": lambda index: torch.rand(
        (), generator=torch.Generator().set_state(torch.get_rng_state())
    ).item(),
    "own random": lambda index: _draw_from_state(random.getstate()),
    "state put back": _draw_and_restore,
}


def _draw_from_state(state: tuple[Any, ...]) -> float:
    own = random.Random()
    own.setstate(state)
    return own.random()


class Drawing:
    """Samples that draw random numbers if `drawing` is true for them. Counts how often each was read."""

    def __init__(self, draw: Callable[[int], float], drawing: Callable[[int], bool]):
        self.draw, self.drawing = draw, drawing
        self.reads = [0] * 97

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> tuple[float, int]:
        self.reads[index] += 1
        return self.draw(index) if self.drawing(index) else 0.0, index


WHICH: dict[str, Callable[[int], bool]] = {
    "never": lambda index: False,
    "always": lambda index: True,
    "rarely": lambda index: index == 41,
    "often": lambda index: index % 3 == 0,
}


def _expected_draws(dataset: Drawing, numbers: list[int], indices: list[int]) -> list[float]:
    """Return the draws of samples whose streams are seeded as torch, numpy and random document it."""
    found = []
    for number, index in zip(numbers, indices, strict=True):
        seed = derive_seed(9, "train", number)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        found.append(dataset[index][0])
    return found


def _draw_after() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("draw", DRAWS)
def test_samples_draw_as_if_each_was_seeded(draw: str, which: str) -> None:
    for rank, ranks in ((0, 1), (2, 3)):
        dataset = Drawing(DRAWS[draw], WHICH[which])
        parts = list(training_parts(RankBatchSlice(24, 1, rank, ranks), SampleOrder(97, 9), 0, 6))
        own, expected = Drawing(DRAWS[draw], WHICH[which]), []
        for numbers, indices in parts:
            expected.append((_expected_draws(own, numbers, indices), _draw_after()))
        found = []
        for drawn, _ in batches(Samples(dataset, "train", 9, None), parts, CPU, 0, 2):
            found.append((drawn.tolist(), _draw_after()))  # which a loss that draws sees
        assert found == expected
        twice = sum(dataset.reads) - sum(own.reads)
        assert twice == 0 if which in ("never", "always") else twice in (0, len(parts[0][0]))  # one batch


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_detects_whether_samples_draw(workers: int) -> None:
    parts = list(training_parts(RankBatchSlice(12, 1, 0, 1), SampleOrder(97, 9), 0, 20))
    draw: Callable[[int], float] = lambda index: random.random() + np.random.rand() + torch.rand(()).item()  # noqa: E731
    own = Drawing(draw, WHICH["rarely"])
    with closing(
        batches(Samples(Drawing(draw, WHICH["rarely"]), "train", 9, None), parts, CPU, workers, 2)
    ) as found:
        for (numbers, indices), (drawn, read) in zip(parts, found, strict=True):
            assert read.tolist() == indices
            assert drawn.tolist() == _expected_draws(own, numbers, indices)


def test_samples_that_do_not_draw_are_seeded_rarely() -> None:
    """Seeding three generators takes longer than reading a sample from memory."""
    calls = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "c_call" and argument.__name__ == "manual_seed"

    counts = {}
    for which in ("never", "always"):
        samples = Samples(Drawing(DRAWS["numpy"], WHICH[which]), "train", 9, None)
        parts = list(training_parts(RankBatchSlice(64, 1, 0, 1), SampleOrder(97, 9), 0, 11))
        samples[parts[0]]
        before = sys.getprofile()
        calls[0] = 0
        sys.setprofile(count)
        for part in parts[1:]:
            samples[part]
        sys.setprofile(before)
        counts[which] = calls[0]
    assert counts["never"] <= 2 * 10
    assert counts["always"] == 64 * 10


@pytest.mark.parametrize("should_fail", [False, True])
def test_a_sample_that_fails_is_read_again_with_its_seed(should_fail: bool) -> None:
    random.seed(FIXED_SEED)
    drawn_first = random.random()

    def draw(index: int) -> float:
        drawn = random.random()
        if (drawn == drawn_first) != should_fail:
            raise ValueError(f"drew {drawn}")
        return drawn

    parts = list(training_parts(RankBatchSlice(8, 1, 0, 1), SampleOrder(97, 9), 0, 12))
    samples = Samples(Drawing(draw, WHICH["rarely"]), "train", 9, None)
    failures = [found.message for part in parts if isinstance(found := samples[part], FailedSample)]
    [number] = [
        number
        for numbers, indices in parts
        for number, index in zip(numbers, indices, strict=True)
        if index == 41
    ]
    random.seed(derive_seed(9, "train", number))
    expected = [f"sample 41 of 'train' raised ValueError: drew {random.random()}"] if should_fail else []
    assert [message.partition(" (")[0] for message in failures] == expected  # without file and line


def test_a_sample_that_fails_without_drawing_is_not_read_again() -> None:
    class Failing(Drawing):
        def __getitem__(self, index: int) -> tuple[float, int]:
            if super().__getitem__(index) and index == 41:
                raise StopIteration
            return 0.0, index

    dataset = Failing(DRAWS["random"], WHICH["never"])
    samples = Samples(dataset, "train", 9, None)
    found = [samples[part] for part in training_parts(RankBatchSlice(8, 1, 0, 1), SampleOrder(97, 9), 0, 12)]
    [failure] = [batch.message for batch in found if isinstance(batch, FailedSample)]
    assert failure.startswith("sample 41 of 'train' raised StopIteration")
    assert max(dataset.reads) == 1


def _read_with_a_held_lock() -> tuple[dict[int, bytes], int]:
    """Read with two workers; the first that is forked never reaches Python code."""
    forks: list[int] = []
    os.register_at_fork(
        before=lambda: forks.append(len(forks)),
        after_in_child=lambda: signal.pause() if forks == [0] else None,
    )
    return dict(read(0, 1, workers=2)), len(forks)


def test_a_worker_that_does_not_start_is_forked_again() -> None:
    [(samples, forks)] = harness.ranks(1)(_read_with_a_held_lock)
    assert samples == dict(read(0, 1, workers=0))
    assert forks == 3


class Counted(Task):
    """A task whose metrics show which samples the evaluation has seen."""

    samples: int = 7
    masked: bool = False

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 3)

    def dataset(self, split: str) -> models.Pairs:
        size = 16 if split == "train" else self.samples
        return models.Pairs(
            x=models.random_normal(size, 2),
            y=models.random_integers(3, size),
            power=2.0 ** torch.arange(size).double(),
        )

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def weights(self, batch: Any) -> Tensor:
        return batch[2] % 3 if self.masked else torch.ones_like(batch[2])

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        # of the shape of the items, and of another shape
        return {"power": batch[2], "powers": batch[2].repeat(2, 1).T}


SLOW_EVALUATIONS = [pytest.param(4, plan, marks=pytest.mark.slow) for plan in ("ddp", "zero2", "hsdp")]


@pytest.mark.parametrize(("ranks", "plan"), [(1, "single"), (2, "ddp"), (2, "zero3"), *SLOW_EVALUATIONS])
@pytest.mark.parametrize("samples", [1, 3, 7, 16])
def test_evaluation_counts_each_sample_once(ranks: int, plan: str, samples: int) -> None:
    spec = Spec(steps=2, batch=4, optimizer=Optimizer(name="sgd", lr=0.1))
    found = train_on_ranks(ranks, Counted(samples=samples), spec, plan)
    power = (2.0**samples - 1) / samples
    assert found.metrics[-1] == pytest.approx(
        found.metrics[-1] | {"power": power, "powers": power}, rel=1e-12
    )


@pytest.mark.parametrize("masked", [False, True])
def test_evaluation_equals_that_of_the_whole_split(masked: bool) -> None:
    task = Counted(masked=masked)
    for ranks, plan in ((1, "single"), (2, "ddp"), (4, "zero3")):
        found = train_on_ranks(ranks, task, Spec(steps=2, batch=4, precision="fp64"), plan)
        x, y, power = (column.double() for column in task.dataset("validation").columns.values())
        weights = power % 3 if masked else torch.ones(7)
        losses = F.cross_entropy(
            x @ torch.tensor(found.weights["weight"]).T + torch.tensor(found.weights["bias"]),
            y.long(),
            reduction="none",
        )
        assert (
            relative_difference(found.metrics[-1]["loss"], (losses * weights).sum() / weights.sum()) < 1e-12
        )
        assert (
            relative_difference(found.metrics[-1]["power"], (power * weights).sum() / weights.sum()) < 1e-12
        )


class Faulty(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 8:
            raise UnicodeDecodeError(
                "utf-8", b"\xff", 0, 1, "invalid start byte"
            )  # one that torch's workers cannot send
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_is_named(workers: int) -> None:
    parts = training_parts(RankBatchSlice(4, 1, 0, 1), SampleOrder(11, 9), 0, 8)
    with (
        closing(batches(Samples(Faulty(), "train", 9, None), parts, CPU, workers, 2)) as found,
        pytest.raises(
            DataError, match=r"sample 8 of 'train' raised UnicodeDecodeError: .*invalid start byte"
        ) as raised,
    ):
        list(found)
    assert "in __getitem__" in str(raised.value.__cause__)


class Whole(Augmented):
    def batch_of(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(indices) / 2, torch.tensor(indices)


def test_a_dataset_may_fetch_whole_batches() -> None:
    parts = list(training_parts(RankBatchSlice(4, 2, 1, 2), SampleOrder(11, 9), 0, 3))
    for (_, indices), (x, y) in zip(
        parts, batches(Samples(Whole(), "train", 9, torch.float64), parts, CPU, 0, 2), strict=True
    ):
        assert y.tolist() == indices
        assert x.dtype == torch.float64
        assert x.tolist() == [index / 2 for index in indices]


def test_torch_subset_is_a_dataset() -> None:
    """torch's convention: `__getitems__` returns a list of samples that are not collated."""
    parts = list(training_parts(RankBatchSlice(4, 1, 0, 1), SampleOrder(6, 9), 0, 3))
    samples = Samples(Subset(Augmented(), [0, 2, 4, 6, 8, 10]), "train", 9, None)
    own = Samples([Augmented()[i] for i in (0, 2, 4, 6, 8, 10)], "train", 9, None)
    for (_, indices), (x, y), (_, expected) in zip(
        parts, batches(samples, parts, CPU, 0, 2), batches(own, parts, CPU, 0, 2), strict=True
    ):
        assert y.tolist() == expected.tolist() == [2 * index for index in indices]
        assert x.shape == (4, 5)
    once, again = (list(batches(samples, parts, CPU, workers, 2)) for workers in (0, 2))
    assert all(torch.equal(x, other) for (x, _), (other, _) in zip(once, again, strict=True))
    split = RankBatchSlice(4, 1, 1, 2)
    for (x, _), (half, _) in zip(
        once, batches(samples, training_parts(split, SampleOrder(6, 9), 0, 3), CPU, 0, 2), strict=True
    ):
        assert torch.equal(x[2:], half)  # augmentation belongs to the sample
