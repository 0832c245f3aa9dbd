"""Change brightness, contrast, saturation and hue of batches of RGB images."""

import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.sample_rng import SampleRng

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601, as in Pillow
Factor = float | Tensor  # for all images, or of shape (batch,)


def adjust_brightness(images: Tensor, factor: Factor) -> Tensor:
    """Return images blended with black: 0 gives black images, 1 the same images."""
    return _blend(images, 0.0, factor)


def adjust_contrast(images: Tensor, factor: Factor) -> Tensor:
    """Return images blended with the mean of their gray: 0 gives gray images, 1 the same images."""
    return _blend(images, _gray(_unit(images)).mean((-2, -1), keepdim=True), factor)


def adjust_saturation(images: Tensor, factor: Factor) -> Tensor:
    """Return images blended with their gray: 0 gives images without colors, 1 the same images."""
    return _blend(images, _gray(_unit(images)), factor)


def adjust_hue(images: Tensor, shift: Factor) -> Tensor:
    """Return images whose hue is shifted around the color circle; 1 is a whole turn."""
    red, green, blue = _check_rgb(_unit(images)).unbind(-3)
    largest, smallest = (function(_unit(images), -3) for function in (torch.amax, torch.amin))
    chroma = largest - smallest
    divisor = torch.where(chroma > 0, chroma, 1.0)
    hue = torch.where(
        largest == red,
        (green - blue) / divisor,
        torch.where(largest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue + 6 * _by_image(shift, images)[..., 0, :, :]
    # Each channel is a trapezoid of the hue (Alvy Ray Smith, Color gamut transform pairs, 1978).
    turns = torch.tensor([5.0, 3.0, 1.0], dtype=hue.dtype, device=hue.device)[:, None, None]
    position = torch.remainder(turns + hue.unsqueeze(-3), 6)
    share = torch.minimum(position, 4 - position).clamp(0, 1)
    return _like(largest.unsqueeze(-3) - chroma.unsqueeze(-3) * share, images)


def color_jitter(
    images: Tensor,
    rng: SampleRng,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
) -> Tensor:
    """Return images with random brightness, contrast, saturation and hue, changed in this order.

    brightness, contrast, saturation: the factor is uniform from max(0, 1 - value) to 1 + value.
    hue: the shift is uniform from -hue to hue, at most 0.5. Raises TaskError for other values.
    """
    for name, value, most in (
        *(("brightness", brightness, None), ("contrast", contrast, None)),
        *(("saturation", saturation, None), ("hue", hue, 0.5)),
    ):
        if value < 0 or (most is not None and value > most):
            limit = "at least 0" if most is None else f"from 0 to {most}"
            raise TaskError(f"color_jitter: {name} must be {limit}, got {value}")
    for value, adjust in (
        *((brightness, adjust_brightness), (contrast, adjust_contrast)),
        (saturation, adjust_saturation),
    ):
        draws = rng.rand()  # drawn always, so that one factor does not change the others
        if value:
            low = max(0.0, 1 - value)
            images = adjust(images, low + (1 + value - low) * draws)
    shift = (2 * rng.rand() - 1) * hue
    return adjust_hue(images, shift) if hue else images


def _unit(images: Tensor) -> Tensor:
    """Return the images with values from 0 to 1."""
    return images if images.is_floating_point() else images.float() / 255


def _like(values: Tensor, images: Tensor) -> Tensor:
    """Return values from 0 to 1 in the dtype of `images`."""
    values = values.clamp(0, 1)
    return values if images.is_floating_point() else (values * 255).round().to(images.dtype)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = _check_rgb(images).unbind(-3)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(-3)


def _check_rgb(images: Tensor) -> Tensor:
    if images.dim() < 3 or images.shape[-3] != 3:
        raise TaskError(
            f"colors require RGB images of shape (batch, 3, height, width), got {tuple(images.shape)}"
        )
    return images


def _by_image(factor: Factor, images: Tensor) -> Tensor:
    values = torch.as_tensor(factor, device=images.device)
    values = values.to(images.dtype if images.is_floating_point() else torch.float32)
    return values.reshape(-1, 1, 1, 1)


def _blend(images: Tensor, other: Tensor | float, factor: Factor) -> Tensor:
    share = _by_image(factor, images)
    return _like(share * _unit(images) + (1 - share) * other, images)
