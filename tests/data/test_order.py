"""data.shuffle: orders as functions of (seed, number), their properties and their exactness."""

import tracemalloc

import numpy as np
import pytest

from command import paceline, succeed, write_task
from paceline import Spec
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.order import BLOCKS_PER_WINDOW, SampleOrder
from paceline.spec import Loading

SIZES = [(1, 1), (1, 64), (5, 64), (64, 64), (65, 64), (1000, 64), (1000, 1), (1000, 128), (1000, 130)]
SIZES += [(999, 333), (1000, 1000), (1000, 5000), (4097, 640), (30011, 6400)]


def epoch_of(order: SampleOrder, epoch: int = 0) -> np.ndarray:
    return order.indices(epoch * order.samples + np.arange(order.samples))


@pytest.mark.parametrize(("samples", "window"), SIZES, ids=[f"{a} by {b}" for a, b in SIZES])
def test_each_epoch_has_each_sample_once(samples, window):
    for seed in (0, 7):
        for epoch in (0, 1, 10**6):
            found = epoch_of(SampleOrder(samples, seed, "window", window), epoch)
            assert sorted(found) == list(range(samples))


def test_windows_consist_of_whole_blocks():
    window, samples = 640, 12345
    block = window // BLOCKS_PER_WINDOW
    order = epoch_of(SampleOrder(samples, 3, "window", window))
    for begin in range(0, samples - window, window):
        inside = np.unique(order[begin : begin + window] // block)
        assert len(inside) <= BLOCKS_PER_WINDOW + 2  # those at its ends and the short block may be divided
    assert len(np.unique(epoch_of(SampleOrder(samples, 3))[:window] // block)) > 5 * BLOCKS_PER_WINDOW  # full


def test_windows_epochs_and_seeds_differ():
    def first(seed, epoch, window=64, begin=0):
        return tuple(epoch_of(SampleOrder(1000, seed, "window", window), epoch)[begin : begin + 64])

    assert len({first(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16
    # offsets of neighboring windows, of one block each, are not the same permutation
    order = epoch_of(SampleOrder(64 * 6400, 5, "window", 6400))
    ranks = {tuple(np.argsort(order[begin : begin + 6400])) for begin in range(0, len(order), 6400)}
    assert len(ranks) == 64


@pytest.mark.parametrize("shuffle", ["full", "window", "none"])
def test_any_number_can_be_computed_independently(shuffle):
    order = SampleOrder(997, 5, shuffle, 64) if shuffle == "window" else SampleOrder(997, 5, shuffle)
    numbers = np.arange(3 * 997)
    together = order.indices(numbers)
    assert [order.indices(numbers[at : at + 1])[0] for at in numbers] == together.tolist()
    assert order.indices(numbers[::-1])[::-1].tolist() == together.tolist()


def test_order_of_the_dataset():
    assert SampleOrder(5, 9, "none").indices(np.arange(12)).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_first_samples_are_equally_likely():
    first = np.array([SampleOrder(1000, seed, "window", 128).indices(np.zeros(1))[0] for seed in range(1000)])
    assert abs(first.mean() - 499.5) < 5 * 289 / 1000**0.5
    assert len(np.unique(first)) > 550  # 632 are expected


def test_sorted_classes_are_mixed():
    """A dataset that is sorted by class, as folders of classes are: neighbors in the order are unrelated."""

    def correlate(order):
        labels = order * 100 // 60000
        return np.corrcoef(labels[:-1], labels[1:])[0, 1]

    assert correlate(np.arange(60000)) > 0.99
    assert abs(correlate(epoch_of(SampleOrder(60000, 1)))) < 0.02
    assert abs(correlate(epoch_of(SampleOrder(60000, 1, "window", 16384)))) < 0.05
    # negative control: one block at a time is hardly mixed
    assert correlate(epoch_of(SampleOrder(60000, 1, "window", 64)) // 256 * 256) < 0.9


@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_long_datasets_take_no_memory(shuffle):
    order = SampleOrder(10**12, 0, shuffle)
    order.indices(np.arange(2))
    tracemalloc.start()
    found = order.indices(3 * 10**12 + np.arange(64))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert len(set(found.tolist())) == 64
    assert found.min() >= 0
    assert found.max() < 10**12


def test_the_order_is_stable_between_releases():
    def begin(samples, seed, window, first=0):
        return SampleOrder(samples, seed, "window", window).indices(first + np.arange(6)).tolist()

    assert begin(1797, 0, 128) == GOLDEN[0]
    assert begin(1797, 0, 128, 1794) == GOLDEN[1]
    assert begin(10**9 + 7, 123, 16384, 10**12) == GOLDEN[2]


GOLDEN = [
    [258, 1092, 1181, 1180, 148, 648],
    [501, 1771, 1588, 253, 149, 1347],
    [226756760, 698394212, 962834682, 443818447, 416342192, 941909126],
]


@pytest.mark.parametrize("shuffle", ["window", "none"])
def test_ranks_micro_batches_and_resumes_have_one_order(shuffle):
    order = SampleOrder(1009, 2, shuffle, 64) if shuffle == "window" else SampleOrder(1009, 2, shuffle)
    expected = [indices for _, indices in training_parts(RankBatchSlice(24, 1, 0, 1), order, 0, 100)]
    for ranks, microbatches, first in ((2, 1, 0), (3, 2, 50), (4, 3, 99)):
        parts = [
            list(training_parts(RankBatchSlice(24, microbatches, rank, ranks), order, first, 100))
            for rank in range(ranks)
        ]
        for step in range(first, 100):
            mine = [
                index
                for at in range((step - first) * microbatches, (step - first + 1) * microbatches)
                for rank in range(ranks)
                for index in parts[rank][at][1]
            ]
            assert mine == expected[step]


def test_settings():
    assert SampleOrder(5, 0).describe(3) == "full"
    assert SampleOrder(5, 0, "window").describe(3) == "window 16384"
    with pytest.raises(ValueError, match=r"data\.window=5 requires data\.shuffle='window', got 'full'"):
        Loading(window=5)
    assert Spec(data={"shuffle": "none"}).data.shuffle == "none"


READS = """

class Reads(Regression):
    def dataset(self, split):
        return ReadPoints(super().dataset(split)) if split == "train" else None


class ReadPoints:
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        with open("read", "a") as file:
            file.write(f"{index}\\n")
        return self.data[index]
"""


@pytest.mark.processes
def test_training_in_the_order_of_the_dataset(tmp_path):
    write_task(tmp_path)
    with open(tmp_path / "my.py", "a") as file:
        file.write(READS)
    options = ("--batch", "8", "--set", "data.shuffle=none", "--no-report", "--no-profile")
    succeed("train", "my.py:Reads", *options, "--steps", "3", "--run-dir", "r", at=tmp_path)
    (tmp_path / "read").unlink()
    succeed("resume", "r", "--steps", "5", at=tmp_path)
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert read[-16:] == list(range(24, 40))
    spec = tmp_path / "r/spec.toml"
    spec.write_text(spec.read_text().replace('shuffle = "none"', 'shuffle = "window"'))
    result = paceline("resume", "r", "--steps", "6", "--edited", at=tmp_path)
    assert result.status == 2
    assert "was made with order of samples none, got window 16384; the order of samples depends" in result.err
