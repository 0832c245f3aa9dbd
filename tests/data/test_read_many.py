"""Batches of packed files are those of their samples, and batches pass from workers unchanged."""

import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from image_files import write_images
from paceline.data import Folder
from paceline.data.batch_queue import BatchPickler, BatchReaders
from paceline.data.loader import FailedSample, Samples, batches
from paceline.data.pack import pack
from paceline.errors import DataError

CPU = torch.device("cpu")
ORDER = [7, 0, 10, 3, 3, 9]
# by the workers of a data loader, from Python 3.12 on
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "images", {"a": 5, "b": 6})
    (folder / "images/a/notes.txt").write_text("no image")
    pack([folder / "images"], folder / "packed", 1500, 1)
    assert len(list((folder / "packed").glob("*.tar"))) > 2
    return folder


@pytest.mark.parametrize("name", ["packed", "images"])
def test_many_samples_are_those_of_each(packed: Path, name: str) -> None:
    for decode in (None, len):
        dataset = Folder(packed / name, decode)
        assert dataset.read_many(ORDER) == [dataset[index] for index in ORDER]


class Reversed(Folder):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        content, label = super().__getitem__(index)
        return content[::-1], label


def test_a_subclass_with_its_own_samples_is_used(packed: Path) -> None:
    samples = Samples(Reversed(packed / "packed", None), "train", 0, None)
    plain = Folder(packed / "images", None)
    for _ in range(2):  # the first batch reads samples one by one
        contents, labels = samples[(ORDER, ORDER)]
        assert list(contents) == [plain[index][0][::-1] for index in ORDER]
        assert labels.tolist() == [plain[index][1] for index in ORDER]


def test_an_error_names_its_sample(packed: Path) -> None:
    def decode(content: bytes) -> int:
        if content == bad:
            raise ValueError("bad picture")
        return len(content)

    dataset = Folder(packed / "packed", decode)
    bad = dataset.read_raw(3)
    samples = Samples(dataset, "train", 0, None)
    assert not isinstance(samples[([0, 1], [0, 1])], FailedSample)
    failed = samples[(ORDER, ORDER)]
    assert isinstance(failed, FailedSample)
    assert failed.message.startswith("sample 3 of 'train' raised ValueError: bad picture")


def test_damage_is_found(packed: Path, tmp_path: Path) -> None:
    pack([packed / "images"], tmp_path / "packed", 1500, 1)
    dataset = Folder(tmp_path / "packed", None)
    file = sorted((tmp_path / "packed").glob("*.tar"))[0]
    data = bytearray(file.read_bytes())
    at = data.index(dataset.read_raw(0))
    data[at + 9] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="is damaged: its checksum differs"):
        dataset.read_many(ORDER)
    assert dataset.read_many([10]) == [dataset[10]]


def through_pickle(value: Any) -> Any:
    file = BytesIO()
    BatchPickler(file).dump(value)
    return pickle.loads(file.getvalue())


TENSORS = {
    "float32": torch.randn(3, 5),
    "bfloat16": torch.randn(7).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(3, 5).T,
    "large": torch.arange(100_000.0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_passed(name: str) -> None:
    found = through_pickle([TENSORS[name]])[0]
    assert found.dtype == TENSORS[name].dtype
    assert torch.equal(found, TENSORS[name])
    found.zero_()  # may be changed


def test_small_tensors_need_no_descriptor() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    kept = [through_pickle(TENSORS["float32"]) for _ in range(50)]
    assert count() <= before  # others may have been closed
    assert len(kept) == 50


class Pairs:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[bytes, Tensor, dict[str, int]]:
        return bytes([index]) * 9000, torch.full((300, 300), index), {"n": index}


def test_workers_pass_the_same_batches() -> None:
    parts = [(list(range(at, at + 4)), list(range(at, at + 4))) for at in range(0, 40, 4)]
    for workers in (0, 2):
        samples = Samples(Pairs(), "train", 0, None)
        for (indices, _), (content, tensor, rest) in zip(
            parts, batches(samples, parts, CPU, workers, 2), strict=True
        ):
            assert list(content) == [bytes([index]) * 9000 for index in indices]
            assert tensor[:, 0, 0].tolist() == indices
            assert rest["n"].tolist() == indices


def test_only_the_queue_of_batches_is_large() -> None:
    context = BatchReaders()
    batches_queue, other = context.Queue(), context.Queue()
    assert type(batches_queue) is not type(other)
    for queue in (batches_queue, other):
        queue.close()
        queue.join_thread()
