"""Crop, flip, resize and normalize batches of images."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import TaskError
from paceline.sample_rng import SampleRng

Size = int | tuple[int, int]  # one number for height and width
TRIES = 10  # of random_resized_crop, as in Szegedy et al., Going deeper with convolutions, 2014


def center_crop(images: Tensor, size: Size) -> Tensor:
    """Return the middle of each image, of shape (batch, channels, *size). Raises TaskError."""
    height, width = _check_crop("center_crop", images, size)
    top, left = ((have - want) // 2 for have, want in zip(images.shape[-2:], (height, width), strict=True))
    return images[..., top : top + height, left : left + width]


def random_crop(images: Tensor, rng: SampleRng, size: Size, padding: int = 0) -> Tensor:
    """Return a part of each image at a random place, of shape (batch, channels, *size).

    padding: rows and columns of zeros that are added on each side before. Raises TaskError if the images are
    smaller than `size`.
    """
    images = F.pad(images, [padding] * 4) if padding else images
    height, width = _check_crop("random_crop", images, size)
    top = rng.randint(0, images.shape[-2] - height + 1)[:, None] + _count(height, images)
    left = rng.randint(0, images.shape[-1] - width + 1)[:, None] + _count(width, images)
    sample = _count(len(images), images)[:, None, None]
    # Indices around a slice put the channels last.
    return images[sample, :, top[:, :, None], left[:, None, :]].movedim(-1, 1).contiguous()


def random_flip(images: Tensor, rng: SampleRng, p: float = 0.5) -> Tensor:
    """Return each image, mirrored left to right with probability `p`."""
    return torch.where(rng.bernoulli(p, 1, 1, 1).to(images.device), images.flip(-1), images)


def resize(images: Tensor, size: Size) -> Tensor:
    """Return the images with another size, by bilinear interpolation with antialiasing.

    size: (height, width), or the length of the shorter side. uint8 images are rounded and equal those of
    Pillow's BILINEAR filter within 1.
    """
    if isinstance(size, int):
        height, width = images.shape[-2:]
        shorter = min(height, width)
        size = (int(size * height / shorter), int(size * width / shorter))
    if min(size) < 1:
        raise TaskError(f"resize: size must be at least 1, got {size}")
    if tuple(images.shape[-2:]) == size:
        return images
    floats = images if images.is_floating_point() else images.float()
    resized = F.interpolate(floats, size=size, mode="bilinear", antialias=True, align_corners=False)
    return resized if images.is_floating_point() else resized.round_().clamp_(0, 255).to(images.dtype)


def random_resized_crop(
    images: Tensor,
    rng: SampleRng,
    size: Size,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Return a random part of each image, resized to the shape (batch, channels, *size).

    scale: range of the share of the area. ratio: range of width divided by height; its logarithm is uniform.
    If a part does not fit ten times, the largest part in the middle with the nearest ratio is taken.
    """
    for name, (low, high) in (("scale", scale), ("ratio", ratio)):
        if not 0 < low <= high:
            raise TaskError(f"random_resized_crop: {name} must be a range above 0, got {(low, high)}")
    height, width = images.shape[-2:]
    draws = torch.stack([rng.rand(TRIES) for _ in range(4)], -1).double().cpu().tolist()
    target = (size, size) if isinstance(size, int) else size
    parts = []
    for image, tries in zip(images, draws, strict=True):
        top, left, tall, wide = _choose_part(tries, height, width, scale, ratio)
        parts.append(resize(image[None, :, top : top + tall, left : left + wide], target))
    return torch.cat(parts) if parts else images.new_zeros((0, images.shape[1], *target))


def _choose_part(
    tries: list[list[float]],
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a part. tries: four numbers from 0 to 1 for each try."""
    for area, shape, down, right in tries:
        target = height * width * (scale[0] + area * (scale[1] - scale[0]))
        aspect = math.exp(math.log(ratio[0]) + shape * math.log(ratio[1] / ratio[0]))
        wide, tall = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide
    aspect = min(max(width / height, ratio[0]), ratio[1])
    wide, tall = min(width, round(height * aspect)), min(height, round(width / aspect))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (images - mean) / std by channel. uint8 images are divided by 255 before.

    Raises TaskError if `mean` and `std` do not have a number for each channel, or if one of std is 0.
    """
    channels = images.shape[-3]
    if len(mean) != channels or len(std) != channels or not all(std):
        raise TaskError(
            f"normalize: {channels} channels require as many numbers in mean and in std, none of std 0,"
            f" got {list(mean)} and {list(std)}"
        )
    images = images if images.is_floating_point() else images.float() / 255
    center, spread = (
        torch.tensor(list(values), dtype=images.dtype, device=images.device)[:, None, None]
        for values in (mean, std)
    )
    return (images - center) / spread


def _check_crop(what: str, images: Tensor, size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if not (0 < height <= images.shape[-2] and 0 < width <= images.shape[-1]):
        raise TaskError(
            f"{what}: size {height} × {width} is not within the images of {images.shape[-2]} ×"
            f" {images.shape[-1]}; use a smaller size, padding or resize"
        )
    return height, width


def _count(count: int, images: Tensor) -> Tensor:
    return torch.arange(count, device=images.device)
