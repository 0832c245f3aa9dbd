"""Images as tensors."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff")


def decode_image(content: bytes) -> Tensor:
    """Return the pixels of an image file in RGB, uint8 of shape (3, height, width). It requires Pillow.

    Gray images get three equal channels; transparency is dropped. Of 16 bits, the upper 8 are used. Of an
    animation this is the first picture. Raises DataError for a file that is no image or is damaged, and for
    pixels of 32 bits, whose range is unknown.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError('decoding images requires Pillow: pip install "paceline[images]"') from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = _to_rgb(image)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        problem = "its format is unknown" if content else "it is empty"
        raise DataError(f"it is not an image, or is damaged: {problem}") from error
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, struct.error
        raise DataError(f"it is not an image, or is damaged: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _to_rgb(image: Any) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image of Pillow, of shape (height, width, 3)."""
    # Pillow opens PNG and PGM of 16 bits as I;16 or I, and its conversion cuts their values off at 255.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        gray = (np.array(image).astype(np.int64) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise DataError(
            f"its pixels have 32 bits (mode {image.mode}), whose range is unknown; specify decode="
        )
    if image.mode == "P" and "transparency" in image.info:  # Pillow would warn of each image
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))
