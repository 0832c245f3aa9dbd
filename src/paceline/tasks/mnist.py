"""MNIST, or other images in its format: IDX files, also gzipped, from the folder in --set folder=PATH."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.errors import DataError
from paceline.tasks.digits import VALIDATION, Images

SPLITS = {"train": "train", "validation": "t10k"}


def read_idx(path: Path) -> Tensor:
    """Return the tensor of bytes in an IDX file. Raises DataError.

    Format: two zero bytes, the type, the number of dims, the dims, the data (big-endian).
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; download it again") from error
    if content[:3] != b"\x00\x00\x08":
        raise DataError(
            f"{path} is not an IDX file of bytes: it must begin with 000008,"
            f" got {content[:3].hex() or 'nothing'}; download it again"
        )
    if len(content) < (header := 4 + 4 * content[3] if len(content) > 3 else 4):
        raise DataError(
            f"{path} has {len(content)} bytes, but its header requires {header}; download it again"
        )
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    data = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * len(shape))
    if data.size != np.prod(shape):
        raise DataError(
            f"{path} has {data.size} bytes of data, but its shape {shape} requires {np.prod(shape)};"
            " download it again"
        )
    return torch.from_numpy(data.reshape(shape).copy())


def find_file(folder: Path, stem: str) -> Path | None:
    """Return the first file whose name starts with `stem`, or None."""
    return next(iter(sorted(folder.glob(f"{stem}*"))), None)


class Mnist(Task):
    """Classification of images by a small CNN.

    The test images are the validation split. If the folder has only training or only test images, every
    fifth image is for validation.
    """

    folder: str = "mnist"  # folder of the IDX files
    width: int = 32  # channels of the first convolution

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * self.width * 49, 4 * self.width),
            nn.ReLU(),
            nn.Linear(4 * self.width, 10),
        )

    def dataset(self, split: str) -> Images:
        folder = Path(self.folder)
        if not folder.is_dir():
            raise DataError(
                f"no such folder: {folder}; specify the folder with the IDX files: --set folder=PATH"
            )
        files = {
            name: (find_file(folder, f"{stem}-images"), find_file(folder, f"{stem}-labels"))
            for name, stem in SPLITS.items()
        }
        splits = {
            name: (read_idx(images), read_idx(labels))
            for name, (images, labels) in files.items()
            if images and labels
        }
        if not splits:
            raise DataError(
                f"{folder} has no IDX files (train-images…, train-labels…, t10k-images…, t10k-labels…);"
                " specify another folder: --set folder=PATH"
            )
        images, labels = splits.get(split) or next(iter(splits.values()))
        if len(splits) == 1:
            chosen = (torch.arange(len(labels)) % VALIDATION == 0) == (split == "validation")
            images, labels = images[chosen], labels[chosen]
        return Images(images.unsqueeze(1).float() / 255, labels.long())

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}
