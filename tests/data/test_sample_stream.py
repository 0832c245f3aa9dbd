"""The stream of samples is the same, number by number, for any ranks, workers and restarts after kill -9.

Mixtures, packed documents and augmentation are compared together. Each rank is a process that reads its
share with the loader of a training and writes what it got to a file.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import Spec, Task
from paceline.data import Mixture
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.open_samples import choose_order, open_training_samples
from paceline.data.packing import PackedDocuments
from paceline.spec import Loading

BATCH, MICROBATCHES, STEPS, LENGTH = 24, 2, 6, 16  # the slices of 1 to 4 ranks are equal
CPU = torch.device("cpu")
# by the workers of a data loader, from Python 3.12 on
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def draw_documents(seed: int, count: int) -> list[Tensor]:
    generator = np.random.default_rng(seed)
    return [torch.from_numpy(generator.integers(0, 1000, size)) for size in generator.integers(2, 40, count)]


class Plain:
    def __init__(self, documents: list[Tensor]):
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.documents[index][:2].clone()}


class Stream(Task):
    is_mixed: bool = True
    is_packed: bool = True

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        make: Any = (lambda found: PackedDocuments(found, LENGTH)) if self.is_packed else Plain
        sources = [make(draw_documents(seed, count)) for seed, count in ((1, 30), (2, 11))]
        return Mixture([(sources[0], 0.7), (sources[1], 0.3)]) if self.is_mixed else sources[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        raise NotImplementedError


class AugmentedStream(Stream):
    def transform(self, sample: Any, rng: Any) -> Any:
        return sample | {"noise": rng.randn(3)[0]}

    def batch_transform(self, batch: Any, rng: Any) -> Any:
        return batch | {"scale": rng.rand()}


class Case(NamedTuple):
    shuffle: str
    is_mixed: bool
    is_packed: bool
    is_augmented: bool


def read_rank(case: Case, rank: int, ranks: int, workers: int, first: int, seed: int = 5) -> Iterator[str]:
    """Yield a line for each micro-batch: its first sample number, and all values of its samples."""
    task = (AugmentedStream if case.is_augmented else Stream)(
        is_mixed=case.is_mixed, is_packed=case.is_packed
    )
    loading = Loading(workers=workers, shuffle=case.shuffle)  # type: ignore[arg-type]
    spec = Spec(steps=STEPS, batch=BATCH, seed=seed, data=loading)
    samples = open_training_samples(task, spec)
    part = RankBatchSlice(BATCH, MICROBATCHES, rank, ranks)
    order = choose_order(samples, spec)
    parts = list(training_parts(part, order, first, STEPS))
    for (numbers, _), batch in zip(parts, batches(samples, parts, CPU, workers, 2), strict=True):
        for at, number in enumerate(numbers):
            values = {name: tensor[at].tolist() for name, tensor in batch.items()}
            yield json.dumps([number, values])


@cache
def reference(case: Case) -> dict[int, Any]:
    return dict(json.loads(line) for line in read_rank(case, 0, 1, 0, 0))


def run_ranks(folder: Path, case: Case, ranks: int, workers: int, first: int, killed_after: int) -> int:
    """Run the ranks until the first is killed after some samples, and return the steps that all finished."""
    children, per_step, number = [], BATCH // ranks, len(list(folder.iterdir()))
    paths = [folder / f"{number + rank}" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        child = os.fork()
        if not child:
            try:
                write_rank(path, case, rank, ranks, workers, first, killed_after)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    status = os.waitpid(children[0], 0)[1]
    for child, path in zip(children[1:], paths[1:], strict=True):
        if killed_after:
            while count_lines(path) <= per_step:
                time.sleep(0.01)
            os.kill(child, signal.SIGKILL)
        status |= os.waitpid(child, 0)[1]
    assert bool(status) == bool(killed_after)
    return first + min(map(count_lines, paths)) // per_step


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def write_rank(
    path: Path, case: Case, rank: int, ranks: int, workers: int, first: int, killed_after: int
) -> None:
    with open(path, "wb", buffering=0) as file:
        for count, line in enumerate(read_rank(case, rank, ranks, workers, first), 1):
            file.write(line.encode() + b"\n")
            if count == killed_after and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def check_case(folder: Path, case: Case, ranks: int, workers: int) -> None:
    expected = reference(case)
    assert sorted(expected) == list(range(BATCH * STEPS))
    step = run_ranks(folder, case, ranks, workers, 0, killed_after=4 * BATCH // ranks + 1)
    found: dict[int, Any] = {}
    assert 0 < step < STEPS
    assert run_ranks(folder, case, ranks % 4 + 1, 2 - workers, step, killed_after=0) == STEPS
    for path in folder.iterdir():
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # the killed rank may have written a part
                number, values = json.loads(line)
                assert found.setdefault(number, values) == values
    assert found == expected


CASES = [Case("full", True, True, True), Case("window", False, True, False)]
PRODUCT = [
    Case(shuffle, *flags)
    for shuffle in ("full", "window", "none")
    for flags in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize(("case", "ranks", "workers"), [(CASES[0], 3, 2), (CASES[1], 2, 0)])
def test_the_stream_survives_kill_and_resume(tmp_path: Path, case: Case, ranks: int, workers: int) -> None:
    check_case(tmp_path, case, ranks, workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stream_survives_kill_and_resume(tmp_path: Path, ranks: int, workers: int) -> None:
    for number, case in enumerate(PRODUCT):
        (tmp_path / str(number)).mkdir()
        check_case(tmp_path / str(number), case, ranks, workers)


def test_differences_are_found() -> None:
    """Negative controls: another seed, and a resume that is one step late."""
    case = CASES[0]
    expected = reference(case)
    other = dict(json.loads(line) for line in read_rank(case, 0, 1, 0, 0, seed=6))
    assert other.keys() == expected.keys()
    assert other != expected
    late = dict(json.loads(line) for line in read_rank(case, 0, 1, 0, 1))
    assert late.keys() != expected.keys()
    assert [late[n] for n in late] == [expected[n] for n in late]
    shifted = [expected[n - BATCH] for n in late]
    assert [late[n] for n in late] != shifted
