"""Images as tensors."""

import io

import torch
from torch import Tensor

from paceline.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff")


def decode_image(content: bytes) -> Tensor:
    """Return the pixels of an image file in RGB, uint8 of shape (3, height, width). It requires Pillow.

    Gray images get three equal channels; transparency is dropped. Of an animation this is the first picture.
    Raises DataError for a file that is no image or is damaged.
    """
    try:
        import numpy as np
        from PIL import Image
    except ImportError as error:
        raise DataError('decoding images requires Pillow: pip install "paceline[images]"') from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.array(image.convert("RGB"))
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, struct.error
        raise DataError(f"it is not an image, or is damaged: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
