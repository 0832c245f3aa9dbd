"""Stream: the order, the ranks and the resumes of samples that are read one after another."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from command import events_of_kind, paceline, succeed
from paceline import Spec
from paceline.data import Mixture, Stream
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.open_samples import choose_order
from paceline.data.samples import Samples
from paceline.errors import DataError
from paceline.events import Noted, Started
from paceline.spec import Loading

IN_ORDER = Spec(data=Loading(shuffle="none"))
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Numbers(IterableDataset):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_samples_in_any_order():
    started, decoded = [], []

    def make():
        started.append(1)
        yield from "abcdefgh"

    stream = Stream(make, 6, lambda letter: decoded.append(letter) or letter.upper())
    assert "".join(stream[index] for index in range(6)) == "ABCDEF"
    assert (len(stream), len(started), stream.skipped) == (6, 1, 0)
    assert stream[4] == "E"  # starts again, and skips four
    assert (len(started), stream.skipped, "".join(decoded)) == (2, 4, "abcdefe")
    with pytest.raises(IndexError):
        stream[6]
    again = pickle.loads(pickle.dumps(Stream(Numbers(9), 9)))
    assert [again[index] for index in (2, 3, 8)] == [2, 3, 8]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (3, 2)])
def test_each_sample_once(ranks, microbatches, workers):
    dataset = Numbers(100)  # an epoch has 96 of them
    found = []
    for rank in range(ranks):
        samples = Samples(Stream(dataset, 96), "train", 0, None)
        part = RankBatchSlice(12, microbatches, rank, ranks)
        parts = training_parts(part, choose_order(samples, IN_ORDER), 3, 12)
        mine = torch.stack(list(batches(samples, parts, torch.device("cpu"), workers, 2)))
        found.append(mine.reshape(9, microbatches, -1))
    assert torch.cat(found, dim=2).reshape(-1).tolist() == (np.arange(36, 144) % 96).tolist()


def test_stream_in_a_mixture():
    mixture = Mixture({Stream(Numbers(50), 50): 0.5, Stream(iter_letters, 26): 0.5})
    samples = Samples(mixture, "train", 0, None)
    order = choose_order(samples, IN_ORDER)
    read = [mixture[index] for index in order.indices(np.arange(40)).tolist()]
    assert [value for value in read if isinstance(value, int)] == list(range(20))
    assert "".join(value for value in read if isinstance(value, str)) == "abcdefghijklmnopqrst"


def iter_letters():
    return iter("abcdefghijklmnopqrstuvwxyz")


def test_bad_streams():
    with pytest.raises(DataError, match="length of a stream must be at least 1 sample, got 0"):
        Stream([1], 0)
    with pytest.raises(DataError, match="the stream ended after 3 of 5 samples; specify length=3"):
        Stream([1, 2, 3], 5)[4]
    for dataset in (Stream([1], 1), Mixture({Stream([1], 1): 1})):
        with pytest.raises(DataError, match=r"its own order, got data\.shuffle='full'; use --set"):
            choose_order(Samples(dataset, "train", 0, None), Spec())


TASK = """
import paceline
import torch
from paceline.data import Stream
from torch import nn


def points():
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.rand(3, generator=generator)


def note(point):
    with open("read", "a") as file:
        file.write(f"{point.tolist()} {torch.rand(()).item()}\\\\n")
    return point


class Streamed(paceline.Task):
    length: int = 60

    def model(self):
        return nn.Linear(3, 1)

    def dataset(self, split):
        if split != "train":
            return None
        return Stream(points, self.length, note) if self.length else points()

    def loss(self, output, batch):
        return output.square()
""".replace("\\\\n", "\\n")


@pytest.mark.processes
def test_trainings_read_the_same_samples(tmp_path):
    (tmp_path / "streamed.py").write_text(TASK)
    options = ("--batch", "12", "--no-report", "--no-profile", "--set", "data.shuffle=none")

    def read(count):
        lines = (tmp_path / "read").read_text().splitlines()[-count:]
        (tmp_path / "read").unlink()
        return sorted(lines)

    succeed("train", "streamed.py", *options, "--run-dir", "a", "--steps", "6", at=tmp_path)
    lines = (tmp_path / "read").read_text().splitlines()[-72:]
    assert len(set(lines)) == 72  # of a second epoch are other random numbers
    assert len({line.partition("]")[0] for line in lines}) == 60
    expected = read(72)
    words = ("--ranks", "2", "--plan", "ddp,microbatches=2", "--workers", "2", "--steps", "3")
    succeed("train", "streamed.py", *options, "--run-dir", "b", *words, at=tmp_path)
    first = read(36)
    succeed("resume", "b", "--steps", "6", "--ranks", "1", "--plan", "single", at=tmp_path)
    assert sorted({*first, *read(36)}) == expected
    started = events_of_kind(tmp_path / "b", Started)[-1]
    assert any("begins with skipping the samples before number 36" in note for note in started.notes)
    noted = [event.message for event in events_of_kind(tmp_path / "b", Noted)]
    assert any(message.startswith("reading the stream up to sample 36 took ") for message in noted)
    result = paceline("train", "streamed.py", "--set", "length=0", "--run-dir", "c", at=tmp_path)
    assert result.status == 2
    assert "must have len() and [i], got generator; wrap it in a Stream" in result.err
