"""Batches of packed files are those of their samples, and batches pass from workers unchanged."""

import ctypes
import mmap
import os
import pickle
import time
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from image_files import write_images
from paceline.data import Folder, Shards, batch_memory
from paceline.data.batch_memory import MIN_BYTES, SLOT_BYTES, BatchMemory, BytesWriter, load
from paceline.data.batch_queue import BatchPickler, BatchReaders
from paceline.data.loader import batches
from paceline.data.samples import FailedSample, Samples
from paceline.data.shards.pack import pack
from paceline.data.shards.read_ahead import BLOCK_BYTES, ReadAhead
from paceline.data.shards.shard_files import ShardFiles
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


def test_many_samples_of_shards_are_those_of_each(packed: Path) -> None:
    dataset = Shards(packed / "packed")
    assert dataset.read_many(ORDER) == [dataset[index] for index in ORDER]
    with pytest.raises(IndexError):
        dataset.read_many([0, len(dataset)])


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
        return bytes([index]) * 30_000, torch.full((300, 300), index), {"n": index}


def test_workers_pass_the_same_batches() -> None:
    parts = [(list(range(at, at + 4)), list(range(at, at + 4))) for at in range(0, 40, 4)]
    for workers in (0, 2):
        samples = Samples(Pairs(), "train", 0, None)
        for (indices, _), (content, tensor, rest) in zip(
            parts, batches(samples, parts, CPU, workers, 2), strict=True
        ):
            assert list(content) == [bytes([index]) * 30_000 for index in indices]
            assert tensor[:, 0, 0].tolist() == indices
            assert rest["n"].tolist() == indices


def test_only_the_queue_of_batches_is_large() -> None:
    context = BatchReaders(2, 2)
    batches_queue, other = context.Queue(), context.Queue()
    assert type(batches_queue) is not type(other)
    for queue in (batches_queue, other):
        queue.close()
        queue.join_thread()


def pass_bytes(batch: Any, memory: BatchMemory, is_freed: bool = True) -> tuple[Any, int]:
    """Return the batch as a rank receives it from worker 1, and the size of what was pickled."""
    writer = BytesWriter(memory, 1)
    content = pickle.dumps(writer.replace(batch))
    place = None if writer.slot is None or not is_freed else (memory.number, writer.slot)
    return load(content, place), len(content)


LARGE = [bytes([value]) * size for value, size in enumerate((MIN_BYTES, 0, 7, 100_000))]


@pytest.mark.parametrize(
    ("batch", "is_small"),
    [
        (LARGE, True),
        ((3, [tuple(LARGE), torch.arange(4)]), True),
        ({"jpg": LARGE, "nested": {"json": LARGE[::-1]}, "n": [1, 2]}, True),
        ([LARGE[2]], True),  # few bytes are pickled
        ([*LARGE, "text"], False),
        ([bytes(SLOT_BYTES + 1)], False),
        ([], True),
    ],
    ids=["list", "tuple", "dict", "few", "mixed", "too_large", "empty"],
)
def test_bytes_are_passed_in_memory(batch: Any, is_small: bool) -> None:
    memory = BatchMemory(2, 1)
    for _ in range(3):  # the slot is free again
        found, size = pass_bytes(batch, memory)
        assert str(found) == str(batch) if isinstance(batch, tuple) else found == batch
        assert (size < 5000) == is_small
    assert set(memory.marks[:]) == {0}


def test_a_slot_is_not_written_before_it_was_read() -> None:
    memory = BatchMemory(2, 2)
    for expected_small in (True, True, False):
        found, size = pass_bytes(LARGE, memory, is_freed=False)
        assert found == LARGE
        assert (size < 5000) == expected_small
    assert memory.marks[:] == b"\0\0\1\1"


def test_batches_of_workers_use_the_memory() -> None:
    parts = [(list(range(at, at + 4)), list(range(at, at + 4))) for at in range(0, 40, 4)]
    with closing(batches(Samples(Pairs(), "train", 0, None), parts, CPU, 1, 2)) as source:
        first = next(source)
        [memory] = [each for each in batch_memory._memories.values() if each.slots == 3]
        assert memory.contents[30_000:30_001] == b"\1"
        rest = list(source)
    assert set(memory.marks[:]) == {0}
    contents = [content for batch in (first, *rest) for content in batch[0]]
    assert contents == [bytes([index]) * 30_000 for index in range(40)]


def test_what_is_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.array([BLOCK_BYTES * 2 + 1, 10, BLOCK_BYTES])
    files, offsets = np.array([0, 2, 0, 1, 0]), np.array([BLOCK_BYTES * 2, 5, 100, 0, 9], dtype=np.uint64)
    ahead = ReadAhead(sizes)
    blocks = [
        (0, 0, BLOCK_BYTES),
        (0, 2 * BLOCK_BYTES, BLOCK_BYTES),
        (1, 0, BLOCK_BYTES),
        (2, 0, BLOCK_BYTES),
    ]
    assert list(ahead.choose(files, offsets, files + 1)) == blocks
    assert list(ahead.choose(files, offsets, files + 1)) == []
    more = np.array([0]), np.array([BLOCK_BYTES * 2 - 1]), np.array([1])
    assert list(ahead.choose(*more)) == [(0, BLOCK_BYTES, BLOCK_BYTES)]
    monkeypatch.setattr("paceline.data.shards.read_ahead.free_memory_bytes", lambda: 1000)
    for _ in range(2):
        parts = [(0, 2 * BLOCK_BYTES, 1), (2, 5, 3), (0, 100, 1), (1, 0, 2), (0, 9, 1)]
        assert list(ReadAhead(sizes).choose(files, offsets, files + 1)) == parts


def is_in_memory(path: Path, offset: int) -> bool:
    """Return whether a page of a file is in memory. Asking does not read it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.frombuffer(mapped, dtype=np.uint8)
        page = ctypes.c_void_p(pages.ctypes.data + offset // mmap.PAGESIZE * mmap.PAGESIZE)
        found = ctypes.create_string_buffer(1)
        assert ctypes.CDLL(None).mincore(page, ctypes.c_size_t(1), found) == 0
        del pages
    return bool(found.raw[0] & 1)


def test_neighbors_are_read_ahead(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for number in range(40):
        (tmp_path / f"files/{number:02}.bin").write_bytes(bytes([number]) * 50_000)
    pack([tmp_path / "files"], tmp_path / "packed", 2**30, 1)
    [shard] = (tmp_path / "packed").glob("*.tar")
    files = ShardFiles(tmp_path / "packed")
    with open(shard, "r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_in_memory(shard, 4096):
        pytest.skip("the file system keeps files in memory")
    late = np.array([17])  # the system itself reads ahead only what follows
    assert files.read(17) == bytes([17]) * 50_000
    assert not is_in_memory(shard, 4096)
    assert files.read_many(late) == [bytes([17]) * 50_000]
    deadline = time.monotonic() + 60
    while not is_in_memory(shard, 4096):
        assert time.monotonic() < deadline
        time.sleep(0.01)
