"""data.skip_corrupt: other samples replace those that cannot be read, equally on any ranks; their count."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from command import events_of_kind, paceline, succeed
from harness import differences_from_single, train_on_ranks
from image_files import write_images
from models import SAMPLES, random_normal
from paceline import Spec, Task
from paceline.data.loader import batches
from paceline.data.open_samples import open_samples, open_training_samples
from paceline.errors import DataError
from paceline.events import Noted
from paceline.spec import Loading, Optimizer

CPU = torch.device("cpu")
CORRUPT = (2, 3, 7, SAMPLES - 1)
OPTIMIZER = Optimizer(name="sgd", lr=0.05, momentum=0.0)


class Damaged:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in CORRUPT:
            raise DataError(f"{index}.jpg is damaged")
        return random_normal(SAMPLES, 5)[index], torch.tensor(index)


class Photos(Task):
    def model(self) -> nn.Module:
        return nn.Linear(5, 3)

    def dataset(self, split: str) -> Any:
        return Damaged() if split != "validation" else None

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square() * (1 + batch[1][:, None])


def request(skip: int, workers: int = 0) -> Spec:
    loading = Loading(skip_corrupt=skip, workers=workers)
    return Spec(steps=5, batch=12, seed=3, precision="fp64", optimizer=OPTIMIZER, data=loading)


def read(indices: list[int], skip: int, workers: int = 0) -> list[int]:
    samples = open_training_samples(Photos(), request(skip))
    [(_, found)] = batches(samples, [(indices, indices)], CPU, workers, 2)
    assert set(samples.unreadable) <= set(CORRUPT)
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_sample_is_used(workers: int) -> None:
    assert read([1, 2, 3, SAMPLES - 1, 4], 4, workers) == [1, 4, 4, 0, 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_more_are_an_error_with_the_last(workers: int) -> None:
    with pytest.raises(
        DataError, match=r"3 samples cannot be read, more than data.skip_corrupt=2; .*7.jpg is"
    ):
        read([2, 3, 7], 2, workers)


def test_without_the_setting_the_sample_is_an_error() -> None:
    with pytest.raises(DataError, match=r"sample 2 of 'train' raised DataError: 2.jpg is damaged"):
        read([1, 2], 0)


def test_evaluations_count_every_sample() -> None:
    samples = open_samples(Photos(), "train", request(9))
    assert samples is not None
    with pytest.raises(DataError, match=r"2.jpg is damaged"):
        list(batches(samples, [([2], [2])], CPU, 0, 2))


def test_other_exceptions_are_errors() -> None:
    class Broken(Photos):
        def dataset(self, split: str) -> Any:
            return {0: 1, 2: 3}

    with pytest.raises(DataError, match="KeyError"):
        list(batches(open_training_samples(Broken(), request(9)), [([1], [1])], CPU, 0, 2))


@pytest.mark.processes
@pytest.mark.parametrize(("size", "plan", "workers"), [(2, "ddp", 0), (3, "zero2", 1)])
def test_plans_train_like_one_process(size: int, plan: str, workers: int) -> None:
    assert not differences_from_single(size, plan, Photos(), request(4, workers))


@pytest.mark.processes
def test_the_limit_holds_on_ranks() -> None:
    with pytest.raises(AssertionError, match=r"more than data.skip_corrupt=1|jpg is damaged"):
        train_on_ranks(2, Photos(), request(1), "ddp")


PICTURES = """
import paceline
from paceline.data import Folder
from torch import nn
from torch.nn import functional as F

class Pictures(paceline.Task):
    def model(self): return nn.Sequential(nn.Flatten(), nn.Linear(60, 2))
    def dataset(self, split): return Folder("images/train") if split == "train" else None
    def inputs(self, batch): return batch[0].float()
    def loss(self, output, batch): return F.cross_entropy(output, batch[1], reduction="none")
"""


@pytest.mark.processes
def test_the_summary_has_the_count_and_the_path(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images/train", {"cat": 6, "dog": 6})
    for name in ("cat/01.png", "dog/04.png"):
        (folder / name).write_bytes(b"no image")
    (tmp_path / "pictures.py").write_text(PICTURES)
    words = ["train", "pictures.py", "--batch=6", "--steps=4", "--ranks=2", "--plan=ddp", "--no-report"]
    result = succeed(*words, "--set=data.skip_corrupt=2", "--run-dir=run", at=tmp_path)
    notes = events_of_kind(tmp_path / "run", Noted)
    [note] = [note for note in notes if "could not be read" in note.message]
    expected = (
        "2 samples could not be read, and others were used instead: images/train/cat/01.png: it is not an"
    )
    assert note.message.startswith(expected)
    assert note.message.endswith("and 1 more")
    assert "2 samples could not be read" in " ".join(result.all.split())
    refused = paceline(*words, "--run-dir=other", at=tmp_path)
    assert (refused.status, ".png: it is not an image" in " ".join(refused.all.split())) == (2, True)
