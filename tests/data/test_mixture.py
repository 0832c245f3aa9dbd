"""Mixture: shares, exactness and changes of weights, against counting the samples one by one."""

import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from command import events_of_kind, paceline, succeed
from paceline.data import Mixture
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.mixture_schedule import MixtureSchedule
from paceline.errors import DataError
from paceline.events import Started
from paceline.spec import Loading, MixtureWeights

WEIGHTS = {
    "two": [0.7, 0.3],
    "thirds": [1, 1, 1],
    "least": [0.998, 0.001, 0.001],
    "awkward": [0.0012345, 0.31415, 0.2718, 0.4128155],
    "many": [1 / k for k in range(1, 41)],
    "zero": [0.25, 0, 0.75],
    "one": [3],
    "thousandths": [0.001] * 1000,
}


def split(schedule, count, first=0):
    """Return the sources of the samples, after a check that each source counts its samples without a gap."""
    sources, draws = schedule.locate(first + np.arange(count))
    if first == 0:
        for source in np.unique(sources):
            assert draws[sources == source].tolist() == list(range((sources == source).sum()))
    return sources


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_counts_are_within_one_of_their_shares(weights):
    count = 50_000
    schedule = MixtureSchedule([10**6] * len(weights), [(0, weights)])
    sources = split(schedule, count)
    totals = np.zeros(len(weights), dtype=int)
    exact = [Fraction(str(float(weight))) for weight in weights]
    whole = sum(exact)
    for end in range(1000, count + 1, 1000):
        totals += np.bincount(sources[end - 1000 : end], minlength=len(weights))
        for total, weight in zip(totals.tolist(), exact, strict=True):
            assert abs(total - end * weight / whole) <= 1


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.0012345, 0.31415, 0.2718, 0.4128155]])
def test_far_samples_are_within_one_of_their_shares(weights):
    """The number of a draw is the count of the samples before, which the sums of shares bound."""
    schedule = MixtureSchedule([10**6] * len(weights), [(0, weights)])
    first = 10**12 * 1000
    sources, draws = schedule.locate(first + np.arange(1000))
    total = sum(Fraction(str(weight)) for weight in weights)
    for source, weight in enumerate(weights):
        begin = draws[sources == source].min()
        assert abs(begin - first * Fraction(str(weight)) / total) <= 1


def test_sources_are_spread_within_a_block():
    sources = split(MixtureSchedule([100, 100], [(0, [0.9, 0.1])]), 1000)
    assert set(np.diff(np.flatnonzero(sources == 1))) == {10}
    for begin in range(0, 1000, 50):
        assert 4 <= (sources[begin : begin + 50] == 1).sum() <= 6


def make(lengths, weights, once=()):
    sources = [[(source, at) for at in range(length)] for source, length in enumerate(lengths)]
    return Mixture(list(zip(sources, weights, strict=True)), [sources[at] for at in once])


def read(mixture, numbers, seed=0, loading=None):
    order = mixture.make_order(seed, loading or Loading())
    return [mixture[index] for index in order.indices(np.asarray(numbers)).tolist()]


def test_each_source_repeats_in_another_order():
    mixture = make([50, 30], [0.5, 0.5])
    samples = read(mixture, range(1000))
    for source, length in ((0, 50), (1, 30)):
        of_source = [at for number, at in samples if number == source]
        passes = [of_source[begin : begin + length] for begin in range(0, len(of_source) - length, length)]
        assert all(sorted(each) == list(range(length)) for each in passes)
        assert len({tuple(each) for each in passes}) == len(passes)
    assert mixture.make_order(0, Loading()).epoch_samples in (99, 100)  # until each had all its samples
    assert len(mixture) == 80
    first, second = [(0, at) for at in range(50)], [(1, at) for at in range(30)]
    assert [mixture[index] for index in range(80)] == first + second


def test_sources_that_are_read_once():
    mixture = make([300, 1000, 40], [0.5, 0.3, 0.2], once=(0, 1))
    order = mixture.make_order(3, Loading())
    epoch = order.epoch_samples
    for number in range(3):
        samples = read(mixture, number * epoch + np.arange(epoch), 3)
        counts = Counter(source for source, _ in samples)
        assert (counts[0], counts[1]) == (300, 1000)
        assert len({sample for sample in samples if sample[0] < 2}) == 1300
        end = max(at for at, (source, _) in enumerate(samples) if source == 0)
        # afterwards the others share: 0.3 and 0.2 become 0.6 and 0.4
        rest = [source for source, _ in samples[end + 1 :]]
        assert abs(rest.count(1) - 0.6 * len(rest)) <= 5
        assert samples[-1][0] == 1  # an epoch ends with the last source that is read once
    drawn = [at for source, at in read(mixture, range(3 * epoch), 3) if source == 2]
    for begin in range(0, len(drawn) - 40, 40):
        assert sorted(drawn[begin : begin + 40]) == list(range(40))


def test_all_sources_once_are_all_samples_in_each_epoch():
    mixture = make([300, 100, 7], [0.2, 0.5, 0.3], once=(0, 1, 2))
    order = mixture.make_order(1, Loading())
    assert order.epoch_samples == 407
    for epoch in (0, 1, 1000):
        assert sorted(order.indices(epoch * 407 + np.arange(407))) == list(range(407))


@pytest.mark.parametrize("first", [1, 999, 1000, 12345])
def test_weights_change_at_a_sample(first):
    mixture = make([5000, 3000, 10], [0.7, 0.3, 0])
    changed = Loading(weights=(MixtureWeights(first=first, weights=(0.2, 0.5, 0.3)),))
    before, after = read(mixture, range(40_000)), read(mixture, range(40_000), loading=changed)
    assert after[:first] == before[:first]
    counts = Counter(source for source, _ in after[first : first + 20_000])
    for source, share in enumerate((0.2, 0.5, 0.3)):
        assert abs(counts[source] - share * 20_000) <= 1
    for source, length in ((0, 5000), (1, 3000), (2, 10)):  # no sample is lost or repeated at the change
        drawn = [at for number, at in after if number == source]
        assert sorted(drawn[:length]) == list(range(length))
    assert mixture.make_order(0, changed).epoch_samples == mixture.make_order(0, Loading()).epoch_samples


@pytest.mark.parametrize("shuffle", ["full", "window", "none"])
@pytest.mark.parametrize("once", [(), (1,)])
def test_ranks_micro_batches_and_resumes_have_one_order(shuffle, once):
    order = make([700, 300], [0.6, 0.4], once).make_order(5, Loading(shuffle=shuffle))
    expected = [indices for _, indices in training_parts(RankBatchSlice(24, 1, 0, 1), order, 0, 200)]
    for ranks, microbatches, first in ((2, 1, 0), (3, 2, 150), (4, 3, 199)):
        parts = [
            list(training_parts(RankBatchSlice(24, microbatches, rank, ranks), order, first, 200))
            for rank in range(ranks)
        ]
        for step in range(first, 200):
            at = range((step - first) * microbatches, (step - first + 1) * microbatches)
            assert [i for m in at for rank in range(ranks) for i in parts[rank][m][1]] == expected[step]


def test_long_mixtures_take_no_memory():
    order = MixtureSchedule([10**12, 10**11], [(0, [0.7, 0.3])])
    order.locate(np.arange(64))
    tracemalloc.start()
    order.locate(10**14 + np.arange(64))
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()


def test_the_order_is_stable_between_releases():
    mixture = make([1000, 500], [0.7, 0.3])
    assert read(mixture, range(6), 4) == GOLDEN[0]
    assert read(mixture, 10**9 + np.arange(6), 4) == GOLDEN[1]


GOLDEN = [
    [(0, 655), (1, 406), (0, 734), (0, 169), (0, 855), (1, 49)],
    [(0, 408), (1, 464), (0, 345), (0, 72), (0, 621), (1, 395)],
]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mixture({}), "requires at least one dataset"),
        (lambda: make([3, 4], [0.5, -0.5]), r"must be at least 0, and one above it, got \[0\.5, -0\.5\]"),
        (lambda: make([3, 4], [0, 0]), "one above it"),
        (lambda: make([3, 4], [float("nan"), 1]), "one above it"),
        (lambda: make([3, 4], [0.0005, 1]), r"weight 0\.0005 is a share of 0\.0005; a share must be"),
        (lambda: make([3, 0], [1, 1]), "dataset 1 of the mixture is empty"),
        (lambda: make([3, 4], [1, 0], once=(1,)), "dataset 1 of the mixture is in once, but its weight is 0"),
        (lambda: Mixture([([1], 1)], once=[[1]]), "once has a dataset that is not in the mixture"),
    ],
    ids=["none", "negative", "zero", "nan", "small", "empty", "unread", "foreign"],
)
def test_bad_mixtures(build, message):
    with pytest.raises(DataError, match=message):
        build()


def test_bad_changes():
    def order(*changes, once=()):
        weights = tuple(MixtureWeights(first=first, weights=each) for first, each in changes)
        return make([3, 4], [1, 1], once).make_order(0, Loading(weights=weights))

    with pytest.raises(DataError, match=r"a mixture of 2 sources requires as many weights, got \[1\.0\]"):
        order((8, (1.0,)))
    with pytest.raises(DataError, match=r"growing numbers of samples from 0 on, got \[0, 9, 8\]"):
        order((9, (1.0, 1.0)), (8, (1.0, 1.0)))
    with pytest.raises(DataError, match="weights cannot change in a mixture with sources that are read once"):
        order((8, (1.0, 2.0)), once=(0,))


TASK = """
import paceline
import torch
from paceline.data import Mixture
from torch import nn


class Points:
    def __init__(self, source, count):
        self.source, self.count = source, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        point = torch.rand(3)  # a random number of the sample
        with open("read", "a") as file:
            file.write(f"{self.source} {index} {point[0].item()}\\\\n")
        return point + self.source


class Mixed(paceline.Task):
    def model(self):
        return nn.Linear(3, 1)

    def dataset(self, split):
        return Mixture({Points(0, 40): 0.7, Points(1, 30): 0.3}) if split == "train" else None

    def loss(self, output, batch):
        return output.square()
""".replace("\\\\n", "\\n")


def read_lines(folder, count):
    """Return the lines of the last `count` samples that were read, and delete the file."""
    lines = (folder / "read").read_text().splitlines()
    (folder / "read").unlink()
    return lines[-count:]


@pytest.mark.slow
@pytest.mark.processes
def test_trainings_read_the_same_samples(tmp_path):
    """1 and 2 ranks, workers, micro-batches, and a resume on other ranks; another order is refused."""
    (tmp_path / "mixed.py").write_text(TASK)
    options = ("--batch", "12", "--no-report", "--no-profile", "--set", "data.shuffle=window")

    def train(run, *words):
        succeed("train", "mixed.py", *options, "--run-dir", run, *words, at=tmp_path)
        return sorted(read_lines(tmp_path, 72))

    expected = train("a", "--steps", "6")
    assert Counter(line.split()[0] for line in expected)["1"] in (21, 22)
    two = ("--ranks", "2", "--plan", "ddp,microbatches=2", "--workers", "2")
    assert train("b", "--steps", "6", *two) == expected
    train("c", "--steps", "3", *two)
    rest = sorted([*expected])
    succeed("resume", "c", "--steps", "6", "--ranks", "1", "--plan", "single", at=tmp_path)
    lines = read_lines(tmp_path, 36)
    assert set(lines) <= set(rest)
    [started, _] = events_of_kind(tmp_path / "c", Started)
    assert started.samples == 99

    succeed("resume", "a", "--steps", "9", "--weights", "0,1", at=tmp_path)
    assert {line.split()[0] for line in read_lines(tmp_path, 36)} == {"1"}
    succeed("resume", "a", "--steps", "12", at=tmp_path)
    assert {line.split()[0] for line in read_lines(tmp_path, 36)} == {"1"}
    spec = tmp_path / "a/spec.toml"
    assert "first = 72" in spec.read_text()
    spec.write_text(spec.read_text().replace("first = 72", "first = 84"))
    result = paceline("resume", "a", "--steps", "13", "--edited", at=tmp_path)
    assert result.status == 2
    assert "was made with order of samples window 16384, mixture of (40, 30) by 7/10, 3/10 from" in result.err
    for words, message in (
        ("0.7;0.3", "--weights must be numbers such as 0.7,0.3, got '0.7;0.3'"),
        ("1", "a mixture of 2 sources requires as many weights, got [1.0]"),
    ):
        result = paceline("resume", "c", "--steps", "9", "--weights", words, at=tmp_path)
        assert (result.status, message in result.err) == (2, True), result.all
