"""Small images, folders of images, and tar files."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (5, 4), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_images(folder: Path, classes: dict[str, int]) -> Path:
    number = 0
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for at in range(count):
            (folder / name / f"{at:02}.png").write_bytes(picture(number))
            number += 1
    return folder


def write_tar(path: Path, files: dict[str, bytes], **options) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
