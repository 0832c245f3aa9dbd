"""decode_image: the pixels of unusual images, and what is no image."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data import decode_image
from paceline.errors import DataError


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_images_have_three_channels(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (3, 2)).save(file, "TIFF")
    image = decode_image(file.getvalue())
    assert (image.shape, image.dtype) == ((3, 2, 3), torch.uint8)


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_images_of_sixteen_bits() -> None:
    values = np.array([[0, 255, 256], [32768, 65279, 65535]], dtype=np.uint16)
    pgm = b"P5 3 2 65535\n" + values.astype(">u2").tobytes()
    for content in (*(save(Image.fromarray(values), kind) for kind in ("PNG", "TIFF")), pgm):
        for channel in decode_image(content):
            assert channel.tolist() == [[0, 0, 1], [128, 254, 255]]
    for numbers in (values.astype(np.float32), values.astype(np.int32)):
        with pytest.raises(DataError, match=r"its pixels have 32 bits \(mode [IF]\), whose range is unknown"):
            decode_image(save(Image.fromarray(numbers), "TIFF"))


def test_unusual_images() -> None:
    for content, problem in ((b"", "it is empty"), (b"text", "its format is unknown")):
        with pytest.raises(DataError, match=f"it is not an image, or is damaged: {problem}$"):
            decode_image(content)
    red, blue = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    animation = save(red, "GIF", save_all=True, append_images=[blue])
    transparent = save(red.convert("P"), "PNG", transparency=bytes(256))  # a warning is an error here
    for content in (animation, transparent):
        assert decode_image(content)[:, 0, 0].tolist() == [255, 0, 0]
    ink = decode_image(save(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))[:, 4, 4]
    assert ink[0] > 240
    assert max(ink[1:]) < 15
