"""The tasks imagefolder, cifar10 and cifar100 on folders and files in their layouts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from command import events_of_kind, paceline, succeed
from harness import differences_from_single
from image_files import write_images
from paceline import Spec, TaskError
from paceline.data import Folder
from paceline.data.cache.sizes import find_source_sizes
from paceline.data.shards.pack import pack
from paceline.errors import DataError
from paceline.events import Step
from paceline.spec import Optimizer
from paceline.tasks.cifar import Cifar10, Cifar100
from paceline.tasks.image_models import EFFICIENTNETS, RESNETS, build_image_model
from paceline.tasks.imagefolder import ImageFolder

PIXELS = 3 * 32 * 32
EXACT = ("--set=spec.precision=fp64", "--set=spec.batch_norm=global")
SPEC = Spec(steps=2, batch=12, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.05, momentum=0))


def write_cifar(
    folder: Path, names: list[str], num_labels: int, classes: int, count: int = 10
) -> list[bytes]:
    """Write files of images and return their rows."""
    draw = np.random.default_rng(0)
    files = []
    for name in names:
        rows = draw.integers(0, 256, (10, num_labels + PIXELS), dtype=np.uint8)
        rows[:, :num_labels] %= classes
        (folder / name).write_bytes(rows.tobytes())
        files.append(rows.tobytes())
    return files


def write_cifar10(folder: Path) -> list[bytes]:
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    return write_cifar(folder, names, 1, 10)


def test_images_are_those_of_the_files(tmp_path: Path) -> None:
    rows = write_cifar10(tmp_path)
    images, labels = Cifar10(folder=str(tmp_path)).dataset("train").batch_of([0, 17])  # type: ignore[union-attr]
    for image, label, content in (
        (images[0], labels[0], rows[0]),
        (images[1], labels[1], rows[1][7 * 3073 :]),
    ):
        assert label == content[0]
        for channel, row, column in ((0, 0, 1), (1, 5, 31), (2, 31, 0)):
            byte = content[1 + channel * 1024 + row * 32 + column]
            assert image[channel, row, column].item() == pytest.approx(byte / 255)
    assert len(Cifar10(folder=str(tmp_path)).dataset("train") or ()) == 50
    assert Cifar10(folder=str(tmp_path)).dataset("test") is None


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    rows = write_cifar(tmp_path, ["train.bin", "test.bin"], 2, 100)
    _, labels = Cifar100(folder=str(tmp_path)).dataset("validation").batch_of([3])  # type: ignore[union-attr]
    assert labels.tolist() == [rows[1][3 * 3074 + 1]]
    write_cifar(tmp_path, [f"data_batch_{number}.bin" for number in range(1, 6)], 1, 200)
    with pytest.raises(DataError, match="but there are 10 classes"):
        Cifar10(folder=str(tmp_path)).dataset("train")


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    file = tmp_path / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3.bin has 30,729 bytes, not a multiple of the 3,073"):
        Cifar10(folder=str(tmp_path)).dataset("train")
    file.unlink()
    with pytest.raises(DataError, match=r"cannot read .*data_batch_3.bin: No such file"):
        Cifar10(folder=str(tmp_path)).dataset("train")


@pytest.mark.processes
@pytest.mark.parametrize(("size", "plan"), [(2, "ddp"), (2, "zero3")])
def test_cifar_trains_like_one_process(size: int, plan: str, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "cifar"
    if not folder.exists():
        folder.mkdir()
        write_cifar10(folder)
    task = Cifar10(folder=str(folder), width=4, depth=1, cutmix=1.0)
    assert not differences_from_single(size, plan, task, SPEC.model_copy(update={"batch_norm": "global"}))


def write_splits(folder: Path) -> None:
    for split in ("train", "val"):
        write_images(folder / split, {"cat": 7, "dog": 6})
    Image.new("RGB", (40, 9), (250, 0, 0)).save(folder / "val" / "dog" / "wide.jpg")


def test_images_of_a_folder(tmp_path: Path) -> None:
    write_splits(tmp_path)
    task = ImageFolder(folder=str(tmp_path), size=8)
    dataset = task.dataset("validation")
    assert dataset is not None
    images, labels = task.collate([dataset[index] for index in range(len(dataset))])
    assert images.shape == (14, 3, 8, 8)
    assert labels.tolist() == [0] * 7 + [1] * 7
    torch.testing.assert_close(images[-1, :, 4, 4], torch.tensor([250.0, 0, 0]) / 255, atol=0.03, rtol=0)
    assert task.dataset("test") is None


def test_folders_may_be_packed(tmp_path: Path) -> None:
    """The samples are the same, whether the splits or the folder that has them are packed."""
    write_splits(tmp_path / "images")
    (tmp_path / "images/train/.empty").mkdir()
    pack([tmp_path / "images"], tmp_path / "whole", 2**20, 1)
    (tmp_path / "splits").mkdir()
    for split in ("train", "val"):
        pack([tmp_path / "images" / split], tmp_path / "splits" / split, 2**20, 1)
    plain, *packed = (
        ImageFolder(folder=str(tmp_path / name), size=8) for name in ("images", "whole", "splits")
    )
    for task in packed:
        assert task.classes == ["cat", "dog"]
        assert task.dataset("test") is None
        for split in ("train", "validation"):
            expected, found = plain.dataset(split), task.dataset(split)
            assert expected is not None
            assert found is not None
            assert len(found) == len(expected)
            assert found.labels.tolist() == expected.labels.tolist()
            for at in range(len(found)):
                assert torch.equal(found[at][0], expected[at][0])
                assert found.read_many([at])[0][1] == expected[at][1]
            assert Path(found.path(9)).parts[-2:] == Path(expected.path(9)).parts[-2:]
    train, validation = (packed[0].dataset(split) for split in ("train", "validation"))
    assert train is not None
    assert validation is not None
    assert train.fingerprint() != validation.fingerprint()
    assert [source.bytes for source in find_source_sizes(train)] < [
        source.bytes for source in find_source_sizes(validation)
    ]
    with pytest.raises(DataError, match=r"no such folder: .*whole/other, which .*whole does not contain"):
        Folder(tmp_path / "whole/other")


@pytest.mark.slow
@pytest.mark.processes
def test_commands(tmp_path: Path) -> None:
    """Train by one and by two ranks with equal losses; mistakes are one sentence."""
    write_splits(tmp_path / "images")
    words = ["train", "imagefolder", "--set=arch=resnet18", "--set=size=32", "--set=folder=images"]
    words += ["--set=mixup=0.2", "--set=jitter=0.2", "--batch=4", "--steps=4", "--no-report"]
    words += ["--optimizer=sgd", "--lr=0.01"]  # AdamW amplifies rounding where gradients are almost 0
    losses = []
    for plan, ranks in (("single", 1), ("ddp", 2)):
        more = [f"--ranks={ranks}", f"--run-dir=run{ranks}", f"--plan={plan}", *EXACT]
        succeed(*words, *more, at=tmp_path)
        losses.append([step.loss for step in events_of_kind(tmp_path / f"run{ranks}", Step)])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    (tmp_path / "images/train/cat/03.png").write_bytes(b"no image")
    for more, message in (
        ((), "images/train/cat/03.png: it is not an image, or is damaged"),
        (("--set=arch=resnet19",), "no image model 'resnet19' for 3 channels; available: resnet18"),
        (
            ("--set=folder=none",),
            "no such folder: none/train; specify the folder of train: --set folder=PATH",
        ),
    ):
        kept = [word for word in words if word.split("=")[1:2] != [more[0].split("=")[1]]] if more else words
        result = paceline(*kept, *more, f"--run-dir=refused{len(message)}", at=tmp_path)
        assert (result.status, message in " ".join(result.all.split())) == (2, True), result.all


@pytest.mark.parametrize(
    ("name", "millions"),
    # Table 1 of He et al. by torchvision, and table 2 of Tan and Le
    [("resnet18", 11.69), ("resnet50", 25.56), ("resnet152", 60.19), ("efficientnet_b0", 5.29)],
)
def test_models_have_the_published_sizes(name: str, millions: float) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = build_image_model(name, 1000)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=2e-3)


def test_models_by_name() -> None:
    assert not RESNETS.keys() & EFFICIENTNETS.keys()
    with torch.device("meta"):
        images = torch.rand(2, 12, 32, 32)
        assert build_image_model("resnet34", 5, channels=12)(images).shape == (2, 5)
    with pytest.raises(TaskError, match="no image model 'other:x' for 3 channels"):
        build_image_model("other:x", 5)
