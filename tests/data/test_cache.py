"""data.cache: samples are those of the dataset, whoever is killed, and nothing is left behind."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from image_files import write_images, write_tar
from paceline.data import Folder, Mixture, Shards, Stream, Tokens
from paceline.data.cache.encoding import decode, encode
from paceline.data.cache.folder import CacheFolder
from paceline.data.cache.opening import open_caches
from paceline.data.cache.store import SampleStore
from paceline.data.samples import Samples
from paceline.data.shards.pack import pack
from paceline.distributed.world import World
from paceline.errors import DataError
from paceline.spec import Loading

LIMIT = 2**24
# by the workers of a data loader, from Python 3.12 on
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def open_store(place: Path, samples: int = 50, limit: int = LIMIT) -> SampleStore:
    return SampleStore(CacheFolder(place, "name"), samples, limit)


def content(index: int) -> bytes:
    return np.random.default_rng(index).bytes(1000 + 37 * (index % 50))


def fork(function: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def wait_until(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes true. Nothing is measured: 30 s end a test that would fail anyway."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


# Encoding.

TRANSPOSED = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
VALUES: dict[str, Any] = {
    "numbers": (1, -(2**70), 0.1, float("inf"), True, None, "ä\udc80"),
    "nested": {"a": [(), [], {}, {3: b"\0\1"}], "b": b""},
    "tensors": [torch.tensor(3), torch.randn(3, 5), torch.empty(0, 4), torch.tensor([True, False])],
    "bfloat16": torch.randn(7).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "strides": TRANSPOSED,
    "expanded": torch.arange(3).expand(2, 3),
    "arrays": (np.arange(5, dtype=">i2"), np.float32(0.1), np.array(["ab", "c"]), np.zeros((0, 3))),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "dates": np.array(["2026-01-01"], dtype="M8[D]"),
}


def is_same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, (np.ndarray, np.generic)):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(is_same(found[key], expected[key]) for key in expected)
    return bool(found == expected)


@pytest.mark.parametrize("name", VALUES)
def test_samples_are_restored(name: str) -> None:
    assert is_same(decode(encode(VALUES[name])), VALUES[name])


def test_memory_formats_are_restored() -> None:
    assert decode(encode(TRANSPOSED)).stride() == TRANSPOSED.stride()
    decode(encode(torch.zeros(3))).add_(1)  # may be changed


class Custom(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [Custom(), {1, 2}, np.array([object()]), torch.zeros(2).to_sparse(), torch.zeros(2, requires_grad=True)],
    ids=["class", "set", "objects", "sparse", "gradient"],
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"data\.cache cannot store a .*; return tensors"):
        encode([value])


# The store.


def test_processes_share_contents(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    assert first.read(7) is None
    assert first.write(7, content(7))
    assert second.write(8, content(8))
    assert second.read(7) == content(7)
    assert first.read(8) == content(8)
    assert 7 in second
    assert 9 not in second
    usage = first.usage()
    assert (usage.stored, usage.samples, usage.full) == (2, 50, "")
    first.close()
    assert second.read(7) == content(7)
    assert second.folder.path.exists()
    second.close()
    assert not second.folder.path.exists()


def test_killed_writers_leave_nothing_corrupt(tmp_path: Path) -> None:
    store = open_store(tmp_path, samples=4000)

    def write(seed: int) -> None:
        mine = open_store(tmp_path, samples=4000)
        for index in np.random.default_rng(seed).permutation(4000).tolist():
            mine.write(index, content(index))

    children = [fork(lambda seed=seed: write(seed)) for seed in range(3)]  # type: ignore[misc]
    for at, child in enumerate(children):
        assert wait_until(lambda at=at: store.usage().stored > 150 * (at + 1))  # type: ignore[misc]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = {index: store.read(index) for index in range(4000) if index in store}
    assert len(found) > 400
    assert all(data == content(index) for index, data in found.items())
    assert store.usage().used_bytes <= LIMIT
    store.close()


def test_damage_counts_as_not_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write(3, content(3))
    chunk = store.folder.path / "chunk-0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    assert store.read(3) is None
    chunk.write_bytes(data[:10])
    assert store.read(3) is None
    table = store.folder.path / "table"
    with open(table, "r+b") as file:  # a row of which only the place was written
        file.seek(64 + 16 * 9)
        file.write((1).to_bytes(8, "little"))
    assert store.read(9) is None
    assert store.write(9, content(9))
    assert store.read(9) == content(9)
    store.close()


def test_space_is_bounded(tmp_path: Path) -> None:
    store, other = open_store(tmp_path, limit=400_000), open_store(tmp_path, limit=10**9)
    written = [index for index in range(50) for each in (store, other) if each.write(index, bytes(20_000))]
    assert 5 < len(written) < 20
    files = sum(path.stat().st_size for path in store.folder.path.iterdir())
    assert files <= 400_000
    assert other.usage().full == "its limit of 390.6 KiB is reached"
    assert not store.write(0, b"")  # from then on nothing
    other.close()
    store.close()


def test_a_large_sample_does_not_end_the_cache(tmp_path: Path) -> None:
    store = open_store(tmp_path, limit=400_000)
    assert not store.write(0, bytes(500_000))
    assert store.write(1, bytes(100_000))
    assert store.read(1) == bytes(100_000)
    store.close()


def test_a_full_disk_ends_caching(tmp_path: Path) -> None:
    def write() -> None:
        store = open_store(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # the system refuses larger files
        assert store.write(1, bytes(6000))
        assert not store.write(2, bytes(6000))
        assert store.read(1) == bytes(6000)
        assert store.read(2) is None
        assert store.usage().full == "the disk is full"

    store = open_store(tmp_path)
    child = fork(write)
    assert os.waitpid(child, 0)[1] == 0
    assert store.read(1) == bytes(6000)
    store.close()


def test_many_samples_need_room_for_their_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs more than .* GiB, but its limit is .*; use a larger data"):
        open_store(tmp_path, samples=10**9)


# The folder.


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    base = tmp_path / f"paceline-cache-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="cannot create a cache in"):
        CacheFolder(tmp_path, "name")
    base.unlink()
    base.mkdir(mode=0o755)
    with pytest.raises(DataError, match="which other users can open; remove it"):
        CacheFolder(tmp_path, "name")
    base.chmod(0o700)
    (base / "name").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="cannot create a cache in"):
        CacheFolder(tmp_path, "name")
    (base / "name").unlink()
    folder = CacheFolder(tmp_path, "name")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "table").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        folder.open_file("table", os.O_RDWR)
    folder.close()
    assert Path("/etc/passwd").exists()


def test_a_killed_job_leaves_nothing(tmp_path: Path) -> None:
    def work() -> None:
        store = open_store(tmp_path)
        store.folder.start_janitor()
        store.write(0, content(0))
        (tmp_path / "ready").touch()
        time.sleep(60)

    child = fork(work)
    assert wait_until((tmp_path / "ready").exists)
    [folder] = (tmp_path / f"paceline-cache-{os.geteuid()}").iterdir()
    other = open_store(tmp_path)  # another job on this node
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert other.read(0) == content(0)
    os.close(other.folder.folder)  # it ends
    assert wait_until(lambda: not folder.exists())
    assert not list(folder.parent.iterdir())


def test_abandoned_folders_are_removed_later(tmp_path: Path) -> None:
    child = fork(lambda: open_store(tmp_path).write(0, content(0)))  # without a janitor
    os.waitpid(child, 0)
    folder = tmp_path / f"paceline-cache-{os.geteuid()}/name"
    assert folder.exists()
    used = CacheFolder(tmp_path, "used")
    used.remove_abandoned()
    assert not folder.exists()
    assert used.path.exists()
    used.close()


# Datasets.


@contextlib.contextmanager
def cached(dataset: Any, place: Path, local: tuple[int, int] = (0, 1), **options: Any) -> Iterator[Any]:
    samples = Samples(dataset, "train", 0, None)
    world = World(local[0], local[1], local[0], local[1])
    loading = Loading(cache="scratch", cache_folder=str(place), **options)
    with open_caches([samples], loading, world, "job", 2) as caches:
        yield samples.source, caches


class Counted:
    """Writes each index that is read into a file."""

    def __init__(self, log: Path, count: int = 40):
        self.log, self.count = log, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return torch.full((3,), float(index)), index

    def reads(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()]


def datasets(folder: Path) -> dict[str, Any]:
    write_images(folder / "images", {"a": 5, "b": 6})
    pack([folder / "images"], folder / "packed", 2**20, 1)
    (folder / "tar").mkdir()
    write_tar(folder / "tar/0.tar", {f"{n}.{kind}": bytes([n]) * n for n in range(9) for kind in ("x", "y")})
    np.arange(500, dtype="<u2").tofile(folder / "tokens.bin")
    tokens = Tokens(folder / "tokens.bin", 16, (0.1, 0.9), "uint16")
    images, packed = Folder(folder / "images"), Folder(folder / "packed")
    return {
        "images": images,
        "packed": packed,
        "shards": Shards(folder / "tar"),
        "tokens": tokens,
        "mixture": Mixture([(images, 0.5), (packed, 0.5)]),
        "pairs": [(torch.tensor(n), {"n": n}) for n in range(7)],
    }


@pytest.mark.parametrize("content", [None, "decoded"])
def test_samples_are_those_of_the_dataset(tmp_path: Path, content: str | None) -> None:
    for name, dataset in datasets(tmp_path).items():
        with cached(dataset, tmp_path, cache_content=content) as (source, caches):
            for _ in range(2):
                assert all(is_same(source[index], dataset[index]) for index in range(len(dataset))), name
            [text] = caches.describe()
            what = "decoded samples" if content or name == "pairs" else "files"
            assert f"cache of 'train': {len(dataset)} of {len(dataset)} {what} in" in text
    assert not list((tmp_path / f"paceline-cache-{os.geteuid()}").iterdir())


def test_samples_are_read_once(tmp_path: Path) -> None:
    dataset = Counted(tmp_path / "log")
    with cached(dataset, tmp_path) as (one, _), cached(dataset, tmp_path, (1, 2)) as (two, _):
        for source in (one, two, two, one):
            assert [source[index][1] for index in range(40)] == list(range(40))
        assert sorted(dataset.reads()) == list(range(40))


def test_staging_reads_each_sample_once(tmp_path: Path) -> None:
    dataset = Counted(tmp_path / "log")
    with (
        cached(dataset, tmp_path, (0, 2), stage="before") as (one, _),
        cached(dataset, tmp_path, (1, 2), stage="before") as (two, _),
    ):
        assert sorted(dataset.reads()) == list(range(40))
        assert is_same(one[39], two[39])
        assert len(dataset.reads()) == 40
    with cached(dataset, tmp_path, stage="background") as (_, caches):
        store = caches.datasets["train"].store
        assert wait_until(lambda: store.usage().stored == 40)


def test_jobs_share_only_what_is_identified(tmp_path: Path) -> None:
    found = datasets(tmp_path)
    for name, is_shared in {"packed": True, "shards": True, "tokens": True, "images": False}.items():
        samples = [Samples(found[name], "train", 0, None) for _ in range(2)]
        loading = Loading(cache="scratch", cache_folder=str(tmp_path))
        with (
            open_caches(samples[:1], loading, World(), "first job", 1) as first,
            open_caches(samples[1:], loading, World(), "second job", 1) as second,
        ):
            places = [each.datasets["train"].store.folder.path for each in (first, second)]
            assert (places[0] == places[1]) == is_shared, name


class Drawing(Counted):
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3)


class Whole(Counted):
    def batch_of(self, indices: list[int]) -> Any:
        return indices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Drawing, "draws random numbers, which data.cache would repeat in each epoch; draw them in Task"),
        (Whole, r"cannot be cached: it has batch_of\(indices\)"),
        (lambda log: Stream(range(9), length=9), "cannot be cached: it is a Stream"),
    ],
    ids=["draws", "batches", "stream"],
)
def test_what_cannot_be_cached(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    with pytest.raises(DataError, match=message), cached(make(tmp_path), tmp_path) as (source, _):
        source[0]


def test_raw_requires_files(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="requires a Folder, Shards or Tokens, got Counted; use 'decoded'"),
        cached(Counted(tmp_path / "log"), tmp_path, cache_content="raw"),
    ):
        pass


def test_staging_ends_with_its_rank(tmp_path: Path) -> None:
    class Slow(Counted):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.05)
            return super().__getitem__(index)

    def work() -> None:
        with cached(Slow(tmp_path / "log", 2000), tmp_path, stage="background"):
            time.sleep(60)

    child = fork(work)
    assert wait_until((tmp_path / "log").exists)
    filling = psutil.Process(child).children()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert wait_until(lambda: not any(process.is_running() for process in filling))
    base = tmp_path / f"paceline-cache-{os.geteuid()}"
    assert wait_until(lambda: not list(base.iterdir()))


def test_the_janitor_imports_nothing_of_paceline(tmp_path: Path) -> None:
    import sys

    from paceline.data.cache import janitor

    (tmp_path / "gone/sub").mkdir(parents=True)
    words = [
        sys.executable,
        "-I",
        "-S",
        "-X",
        "importtime",
        str(janitor.__file__),
        str(tmp_path / "gone/sub"),
    ]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert not (tmp_path / "gone/sub").exists()
    assert "paceline.data" not in result.stderr
