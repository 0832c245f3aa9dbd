"""BigEarthNet: synthetic twins of both layouts, by independent writers; its metrics; its recipe."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from command import events_of_kind, succeed
from paceline import Spec, TaskError
from paceline.data.loader import batches
from paceline.data.open_samples import open_training_samples
from paceline.errors import DataError
from paceline.events import Evaluated, Step
from paceline.metrics import MeanAveragePrecision, MultilabelF1
from paceline.tasks.bigearthnet import BANDS, BigEarthNet
from paceline.tasks.bigearthnet_files import CLASSES, CLASSES_43, NUMBERS_V1, WITHOUT_CLASS

RECIPE = Path(__file__).parents[2] / "examples/recipes/bigearthnet.toml"
EXACT = ("--set=spec.precision=fp64", "--set=spec.batch_norm=global")
SIDES = {band: 120 if band in ("B02", "B03", "B04", "B08") else 60 for band in BANDS} | {"B01": 20, "B09": 20}
COUNTS = {"train": 8, "validation": 5, "test": 3}
Arrays = dict[str, np.ndarray]


def draw_bands(seed: int, **sides: int) -> Arrays:
    draw = np.random.default_rng(seed)
    return {
        band: draw.integers(0, 12_000, (side, side)).astype(np.uint16)
        for band, side in (SIDES | sides).items()
    }


def encode_tiff(pixels: np.ndarray) -> bytes:
    """Return an uncompressed TIFF of 16 bits with one strip, as of the specification of TIFF 6.0."""
    height, width = pixels.shape
    tags = [(256, 3, width), (257, 3, height), (258, 3, 16), (259, 3, 1), (262, 3, 1), (273, 4, 0)]
    tags += [(277, 3, 1), (278, 3, height), (279, 4, pixels.nbytes)]
    begin = 8 + 2 + 12 * len(tags) + 4
    tags[5] = (273, 4, begin)
    entries = b"".join(
        struct.pack("<HHI", tag, kind, 1) + struct.pack("<I" if kind == 4 else "<Hxx", value)
        for tag, kind, value in tags
    )
    header = b"II*\0" + struct.pack("<IH", 8, len(tags))
    return header + entries + struct.pack("<I", 0) + pixels.astype("<u2").tobytes()


def write_v1(folder: Path) -> dict[str, list[tuple[Arrays, list[str]]]]:
    """Write the layout of v1 and return bands and labels of each split."""
    written, number, labels = {}, 0, [*NUMBERS_V1, *sorted(WITHOUT_CLASS)]
    for split, file in {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}.items():
        names, written[split] = [], []
        for _ in range(COUNTS[split]):
            name, bands = f"S2A_MSIL2A_20170613T101031_{number}_48", draw_bands(number)
            chosen = [labels[(number * 5 + step * 7) % len(labels)] for step in range(3)]
            (folder / name).mkdir(parents=True)
            for band, pixels in bands.items():
                (folder / name / f"{name}_{band}.tif").write_bytes(encode_tiff(pixels))
            metadata = json.dumps({"labels": chosen, "tile_source": "S2A.SAFE"})
            (folder / name / f"{name}_labels_metadata.json").write_text(metadata)
            names.append(name)
            written[split].append((bands, chosen))
            number += 1
        (folder / file).write_text("\n".join(f"{name},S1_{name}" for name in names) + "\n")
    return written


def encode_safetensors(arrays: Arrays) -> bytes:
    header, data = {}, b""
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": "U16", "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_v2(folder: Path) -> dict[str, list[tuple[Arrays, list[str]]]]:
    """Write the layout of v2, with bands B01 of two shapes, and return bands and labels of each split."""
    lmdb, pyarrow = pytest.importorskip("lmdb"), pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    written: dict[str, list[tuple[Arrays, list[str]]]] = {split: [] for split in COUNTS}
    names, splits, labels = [], [], []
    environment = lmdb.open(str(folder / "BENv2.lmdb"), map_size=2**28)
    with environment, environment.begin(write=True) as writer:
        for number in range(sum(COUNTS.values())):
            split = next(split for split in reversed(COUNTS) if len(written[split]) < COUNTS[split])
            bands = draw_bands(number, B01=60 if number % 2 else 20)
            chosen = [list(CLASSES)[(number * 3 + step * 5) % 19] for step in range(1 + number % 3)]
            names.append(f"S2B_{number}_T33_{number}")
            splits.append(split)
            labels.append(chosen)
            written[split].append((bands, chosen))
            writer.put(names[-1].encode(), encode_safetensors(bands))
    table = {"patch_id": names, "labels": labels, "split": splits, "country": ["Austria"] * len(names)}
    parquet.write_table(pyarrow.table(table), folder / "metadata.parquet")
    return written


WRITERS: dict[str, Callable[[Path], Any]] = {"v1": write_v1, "v2": write_v2}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def twin(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, WRITERS[request.param](folder)


def resize_by_pillow(pixels: np.ndarray, side: int) -> np.ndarray:
    image = Image.fromarray(pixels.astype(np.float32))
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


def number_of(label: str) -> list[int]:
    """Return the class of a label of v1 or v2, by the names of the nomenclature."""
    return [number for number, (name, parts) in enumerate(CLASSES.items()) if label in (name, *parts)]


@pytest.mark.parametrize("side", [120, 60])
def test_samples_are_those_of_the_files(twin: Any, side: int) -> None:
    folder, written = twin
    task = BigEarthNet(folder=str(folder), size=side, bands=tuple(BANDS))
    for split, expected in written.items():
        dataset = task.dataset(split)
        assert dataset is not None
        assert len(dataset) == len(expected)
        for index, (bands, labels) in enumerate(expected):
            image, target = dataset[index]
            for found, band in zip(image, BANDS, strict=True):
                if len(bands[band]) == side:
                    assert np.array_equal(found.numpy(), bands[band])
                else:
                    resized = resize_by_pillow(bands[band], side)
                    np.testing.assert_allclose(found.numpy(), resized, rtol=1e-4, atol=0.1)
            numbers = {number for label in labels for number in number_of(label)}
            assert target.nonzero()[:, 0].tolist() == sorted(numbers)
    assert task.dataset("other") is None


def test_the_nomenclature_is_complete() -> None:
    """19 classes have 32 of the 43 classes of CORINE, and eleven have none."""
    assert (len(CLASSES), len(NUMBERS_V1), len(WITHOUT_CLASS)) == (19, 32, 11)
    assert not NUMBERS_V1.keys() & WITHOUT_CLASS
    assert sorted(CLASSES_43) == sorted({*NUMBERS_V1, *WITHOUT_CLASS})


def test_labels_may_be_the_43_of_v1(twin: Any) -> None:
    folder, written = twin
    task = BigEarthNet(folder=str(folder), labels=43, arch="resnet18", size=20)
    if (folder / "metadata.parquet").exists():
        with pytest.raises(TaskError, match="has BigEarthNet v2, whose labels are 19 classes; use --set lab"):
            task.dataset("train")
        return
    dataset = task.dataset("train")
    assert dataset is not None
    for index, (_, labels) in enumerate(written["train"]):
        found = [CLASSES_43[number] for number in dataset[index][1].nonzero()[:, 0].tolist()]
        assert sorted(found) == sorted(labels)
    assert dataset[0][1].shape == (43,)


def losses_of(run: Path) -> list[float]:
    assert {"f1/micro", "f1/macro", "map"} <= events_of_kind(run, Evaluated)[-1].metrics.keys()
    return [step.loss for step in events_of_kind(run, Step)]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_one_and_several_ranks_have_the_same_loss(kind: str, tmp_path: Path) -> None:
    """The recipe, on the twin: another batch, and a small model."""
    pytest.importorskip("transformers")
    (tmp_path / "data").mkdir()
    WRITERS[kind](tmp_path / "data")
    words = ["train", str(RECIPE), "--set=folder=data", "--set=arch=resnet18", "--set=size=32", "--steps=2"]
    words += [
        "--batch=8",
        "--lr=0.01",
        "--set=data.workers=1",
        "--set=schedule.warmup=0",
        "--no-report",
        *EXACT,
    ]
    runs = {"single": 1, "ddp": 4}
    for plan, ranks in runs.items():
        succeed(*words, f"--plan={plan}", f"--ranks={ranks}", f"--run-dir={plan}", at=tmp_path)
    assert losses_of(tmp_path / "ddp") == pytest.approx(losses_of(tmp_path / "single"), rel=1e-9)


def test_workers_read_the_same_samples(twin: Any) -> None:
    """Also after this process has read samples, whose database the workers cannot use."""
    samples = open_training_samples(BigEarthNet(folder=str(twin[0]), size=30), Spec())
    parts = [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    here, there = (list(batches(samples, parts, torch.device("cpu"), workers, 2)) for workers in (0, 1))
    for (images, labels), (expected_images, expected_labels) in zip(there, here, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder: none; specify the folder of BigEarthNet"):
        BigEarthNet(folder="none").dataset("train")
    with pytest.raises(TaskError, match="no band 'B10'; available: B01, B02"):
        BigEarthNet(folder="none", bands=("B10",)).model()
    with pytest.raises(DataError, match=r"train.csv: No such file or directory; put the published lists"):
        BigEarthNet(folder=str(tmp_path)).dataset("train")
    (tmp_path / "train.csv").write_text("../other,x")
    with pytest.raises(DataError, match=r"has '../other', which is no name of a patch"):
        BigEarthNet(folder=str(tmp_path)).dataset("train")
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot read patch_id, labels and split of"):
        BigEarthNet(folder=str(tmp_path)).dataset("train")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_v1(tmp_path)
    dataset = BigEarthNet(folder=str(tmp_path)).dataset("train")
    assert dataset is not None
    name = "S2A_MSIL2A_20170613T101031_1_48"
    (tmp_path / name / f"{name}_B08.tif").write_bytes(b"II*\0")
    with pytest.raises(DataError, match=f"{name}_B08.tif is not a GeoTIFF|cannot read .*{name}_B08.tif"):
        dataset[1]
    (tmp_path / name / f"{name}_labels_metadata.json").write_text('{"labels": ["Moon"]}')
    with pytest.raises(DataError, match=r"labels_metadata.json has the label 'Moon'; expected one of CORINE"):
        dataset.patches.read_labels(1)
    (tmp_path / name / f"{name}_labels_metadata.json").write_text("[]")
    with pytest.raises(DataError, match=r"labels_metadata.json has no labels of BigEarthNet: TypeError"):
        dataset.patches.read_labels(1)


def count_by_hand(scores: np.ndarray, targets: np.ndarray) -> tuple[float, float, float]:
    """Return micro F1, macro F1 and mAP by their definitions, one decision after the other."""
    f1, found, micro = [], [], np.zeros(3)
    for score, target in zip(scores.T, targets.T, strict=True):
        hits = sum(1 for s, t in zip(score, target, strict=True) if s > 0 and t)
        counts = np.array([hits, (score > 0).sum(), target.sum()])
        micro += counts
        f1.append(2 * hits / (counts[1] + counts[2]) if counts[1] + counts[2] else 0.0)
        if not target.sum():
            continue
        previous, precision_sum = 0.0, 0.0
        for threshold in sorted(set(score), reverse=True):
            chosen = score >= threshold
            recall = (target[chosen]).sum() / target.sum()
            precision_sum += (recall - previous) * target[chosen].mean()
            previous = recall
        found.append(precision_sum)
    return 2 * micro[0] / (micro[1] + micro[2]), float(np.mean(f1)), float(np.mean(found))


def test_metrics_equal_their_definitions() -> None:
    draw = np.random.default_rng(3)
    scores, targets = draw.integers(-4, 5, (60, 6)) / 2, draw.integers(0, 2, (60, 6))
    targets[:, 2] = 0  # a class without labels
    micro, macro, precision = count_by_hand(scores, targets)
    for order in (range(3), (2, 0, 1)):
        f1, mean = MultilabelF1(), MeanAveragePrecision()
        for part in order:
            chosen = slice(20 * part, 20 * part + 20)
            tensors = torch.from_numpy(scores[chosen]), torch.from_numpy(targets[chosen])
            f1.merge(MultilabelF1().update(*tensors))
            mean.merge(MeanAveragePrecision().update(*tensors))
        assert f1.finish() == pytest.approx({"micro": micro, "macro": macro})
        assert mean.finish() == pytest.approx(precision)


@pytest.mark.parametrize("metric", [MultilabelF1, MeanAveragePrecision])
def test_bad_arguments_of_metrics(metric: Any) -> None:
    scores: Tensor = torch.zeros(4, 3)
    with pytest.raises(TaskError, match=r"must have the same shape \(…, classes\), got \(4, 3\) and \(4,\)"):
        metric().update(scores, torch.zeros(4))
    with pytest.raises(TaskError, match="targets must be 0 or 1"):
        metric().update(scores, torch.full((4, 3), 2))
