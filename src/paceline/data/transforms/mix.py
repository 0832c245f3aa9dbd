"""Mixup and CutMix: mix each image and its target with those of another sample.

The partner of sample 2k is sample 2k+1, and the reverse. The order of samples is a random permutation, so
each epoch has other pairs. A partner is a function of the number of a sample alone, and each sample draws its
own share. So the result does not depend on ranks and micro-batches, as long as no pair is divided.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import TaskError
from paceline.sample_rng import SampleRng

TRIES = 64  # each is accepted with a probability of at least 1/2


def mixup(
    images: Tensor, targets: Tensor, rng: SampleRng, alpha: float = 0.2, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return share·image + (1 - share)·partner, and the targets likewise.

    The share of each sample is drawn from Beta(alpha, alpha) (Zhang et al., mixup: Beyond empirical risk
    minimization, 2017).

    images: floating-point numbers of shape (batch, …), or uint8 images, which are divided by 255
    targets: classes as integers of shape (batch,), or numbers of shape (batch, classes)
    classes: number of classes, for integers. The new targets are probabilities of shape (batch, classes).

    Raises TaskError if a partner is in another part of the batch, and for unsuitable arguments.
    """
    _check_alpha("mixup", alpha)
    partners = find_partners("mixup", rng).to(images.device)
    images = images if images.is_floating_point() else images.float() / 255
    share = draw_beta(rng, alpha)
    return (
        _mix(images, images[partners], share),
        _mix_targets("mixup", targets, partners, share, classes),
    )


def cutmix(
    images: Tensor, targets: Tensor, rng: SampleRng, alpha: float = 1.0, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the images with a rectangle of their partner, and targets mixed by its area.

    A share is drawn from Beta(alpha, alpha); the rectangle has 1 - share of the area, around a uniform
    center, and is cut off at the borders (Yun et al., CutMix, 2019). Arguments and errors are those of
    `mixup`.
    """
    _check_alpha("cutmix", alpha)
    partners = find_partners("cutmix", rng).to(images.device)
    height, width = images.shape[-2:]
    side = (1 - draw_beta(rng, alpha)).clamp(min=0).sqrt()
    rows = _find_span(rng, side, height)
    columns = _find_span(rng, side, width)
    inside = (rows[:, :, None] & columns[:, None, :]).to(images.device)
    share = 1 - inside.flatten(1).to(side.dtype).mean(1)
    mixed = torch.where(inside.unsqueeze(-3), images[partners], images)
    return mixed, _mix_targets("cutmix", targets, partners, share, classes)


def find_partners(what: str, rng: SampleRng) -> Tensor:
    """Return the row of the partner of each sample. Raises TaskError if it is not in this batch."""
    numbers = rng.numbers.tolist()
    rows = {number: row for row, number in enumerate(numbers)}
    if lonely := [number for number in numbers if number ^ 1 not in rows]:
        raise TaskError(
            f"{what} mixes the samples 2k and 2k + 1, but of {lonely[0]} and {lonely[0] ^ 1} only"
            f" {lonely[0]} is in this part of the batch; use a batch that is a multiple of"
            " 2 × data ranks × microbatches"
        )
    return torch.tensor([rows[number ^ 1] for number in numbers])


def draw_beta(rng: SampleRng, alpha: float) -> Tensor:
    """Return a number of each sample from Beta(alpha, alpha), of shape (batch,).

    Up to alpha = 1 by the method of Jöhnk (1964), above by that of Ulrich (1984); both in Devroye,
    Non-uniform random variate generation, 1986, chapter IX.
    """
    if alpha > 1:
        radius = (1 - rng.rand() ** (2 / (2 * alpha - 1))).sqrt()
        return (1 + radius * torch.cos(math.tau * rng.rand())) / 2
    # Logarithms, because the powers underflow for small alpha. 1 - rand() is above 0.
    first, second = ((1 - rng.rand(TRIES)).log() / alpha for _ in range(2))
    chosen = (torch.logaddexp(first, second) <= 0).int().argmax(1, keepdim=True)
    return torch.sigmoid(first.gather(1, chosen) - second.gather(1, chosen))[:, 0]


def _find_span(rng: SampleRng, side: Tensor, size: int) -> Tensor:
    """Return which of `size` positions are within a length of side·size around a random center."""
    center, half = rng.randint(0, size), (side * size / 2).long()
    at = torch.arange(size, device=center.device)
    return (at >= (center - half)[:, None]) & (at < (center + half)[:, None])


def _check_alpha(what: str, alpha: float) -> None:
    if not alpha > 0:
        raise TaskError(f"{what}: alpha must be above 0, got {alpha}")


def _mix(values: Tensor, others: Tensor, share: Tensor) -> Tensor:
    share = share.to(values).reshape(-1, *[1] * (values.dim() - 1))
    return share * values + (1 - share) * others


def _mix_targets(what: str, targets: Tensor, partners: Tensor, share: Tensor, classes: int | None) -> Tensor:
    if not targets.is_floating_point():
        if targets.dim() != 1 or classes is None:
            raise TaskError(
                f"{what}: integer targets require the shape (batch,) and classes=, got {tuple(targets.shape)}"
                f" and classes={classes}; specify classes=, or use floating-point targets"
            )
        if targets.numel() and int(targets.max()) >= classes:
            raise TaskError(f"{what}: target {int(targets.max())} requires more than classes={classes}")
        targets = F.one_hot(targets.long(), classes).to(share.dtype)
    return _mix(targets, targets[partners], share)
