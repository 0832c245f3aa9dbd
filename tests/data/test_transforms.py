"""Transforms of images: equal to Pillow, colorsys and formulas, and independent of how a batch is divided."""

import colorsys
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from torch import Tensor, nn

from harness import differences_from_single
from models import SAMPLES, Rows, random_integers, random_normal
from paceline import SampleRng, Spec, Task, TaskError
from paceline.data import transforms
from paceline.data.transforms.mix import draw_beta, find_partners
from paceline.spec import Optimizer

NUMBERS = range(40, 52)


def draw_images(count: int = 12, height: int = 19, width: int = 24) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    small = torch.rand(count, 3, 5, 6, generator=draw)
    smooth = F.interpolate(small, (height, width), mode="bicubic").clamp(0, 1)
    noise = 0.1 * torch.rand(count, 3, height, width, generator=draw)
    return ((0.9 * smooth + noise) * 255).round().to(torch.uint8)


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def from_pillow(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def largest_difference(found: Tensor, expected: Tensor) -> int:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == torch.uint8
    return int((found.int() - expected.int()).abs().max())


RANDOM: dict[str, Callable[[Tensor, SampleRng], Any]] = {
    "random_crop": lambda images, rng: transforms.random_crop(images, rng, (9, 11), padding=2),
    "random_flip": transforms.random_flip,
    "random_resized_crop": lambda images, rng: transforms.random_resized_crop(images, rng, 8),
    "color_jitter": lambda images, rng: transforms.color_jitter(images, rng, 0.4, 0.4, 0.4, 0.1),
    "mixup": lambda images, rng: transforms.mixup(images, rng.numbers % 5, rng, classes=5),
    "cutmix": lambda images, rng: transforms.cutmix(images, rng.numbers % 5, rng, classes=5),
    "by_sample": lambda images, rng: transforms.by_sample(
        lambda image: image + torch.randn(()) + random.random() + float(np.random.rand()), images, rng
    ),
}


@pytest.mark.parametrize("name", sorted(RANDOM))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["uint8", "float32"])
def test_a_sample_does_not_depend_on_its_batch(name: str, dtype: torch.dtype) -> None:
    images = draw_images() if dtype == torch.uint8 else draw_images().float() / 255
    whole = RANDOM[name](images, SampleRng(NUMBERS, 3))
    parts = [
        RANDOM[name](images[begin:end], SampleRng(NUMBERS[begin:end], 3)) for begin, end in [(0, 2), (2, 12)]
    ]
    for expected, *found in zip(
        *([result] if isinstance(result, Tensor) else result for result in (whole, *parts)), strict=True
    ):
        assert torch.equal(torch.cat(found), expected)
    others = RANDOM[name](images, SampleRng(NUMBERS, 4))
    changed = whole if isinstance(whole, Tensor) else whole[0]
    assert not torch.equal(changed, others if isinstance(others, Tensor) else others[0])


@pytest.mark.parametrize("size", [(10, 12), (8, 31), (40, 50), 7], ids=str)
def test_resize_equals_pillow(size: Any) -> None:
    images = draw_images()
    height, width = size if isinstance(size, tuple) else (size, int(size * 24 / 19))
    expected = [
        from_pillow(to_pillow(image).resize((width, height), Image.Resampling.BILINEAR)) for image in images
    ]
    assert largest_difference(transforms.resize(images, size), torch.stack(expected)) <= 1


def test_without_antialiasing_resize_would_differ_from_pillow() -> None:
    images = draw_images()
    expected = [from_pillow(to_pillow(image).resize((6, 5), Image.Resampling.BILINEAR)) for image in images]
    plain = F.interpolate(images.float(), (5, 6), mode="bilinear").round().to(torch.uint8)
    assert largest_difference(plain, torch.stack(expected)) > 10


def test_crop_and_flip_equal_pillow() -> None:
    images = draw_images()
    flipped = transforms.random_flip(images, SampleRng(NUMBERS), p=1.0)
    for image, found in zip(images, flipped, strict=True):
        assert torch.equal(found, from_pillow(to_pillow(image).transpose(Image.Transpose.FLIP_LEFT_RIGHT)))
    assert torch.equal(transforms.random_flip(images, SampleRng(NUMBERS), p=0.0), images)
    for image, found in zip(images, transforms.center_crop(images, (9, 10)), strict=True):
        assert torch.equal(found, from_pillow(to_pillow(image).crop((7, 5, 17, 14))))


def find_crop(image: Tensor, part: Tensor) -> list[tuple[int, int]]:
    """Return the places in a padded image at which a part lies."""
    padded = F.pad(image, [2] * 4)
    height, width = part.shape[-2:]
    return [
        (top, left)
        for top in range(padded.shape[-2] - height + 1)
        for left in range(padded.shape[-1] - width + 1)
        if torch.equal(padded[:, top : top + height, left : left + width], part)
    ]


def test_random_crops_are_parts_at_all_places() -> None:
    image = draw_images(1, 8, 8)
    crops = transforms.random_crop(image.expand(600, -1, -1, -1), SampleRng(range(600)), 8, padding=2)
    places = [find_crop(image[0], crop) for crop in crops]
    assert all(len(found) == 1 for found in places)
    assert {place for [place] in places} == {(top, left) for top in range(5) for left in range(5)}


def test_random_resized_crop_equals_pillow_on_a_ramp() -> None:
    """The corners of a resized ramp show which part was taken; Pillow resizes this part to the same image."""
    height, width = 60, 80
    rows, columns = torch.arange(height) * 4.0, torch.arange(width) * 3.0
    ramp = torch.stack([rows[:, None].expand(-1, width), columns.expand(height, -1)])
    ramp = torch.cat([ramp, torch.zeros(1, height, width)])[None].expand(300, -1, -1, -1)
    found = transforms.random_resized_crop(ramp, SampleRng(range(300)), 10)
    slopes = (found[:, 0, 6, 5] - found[:, 0, 3, 5]) / 3, (found[:, 1, 5, 6] - found[:, 1, 5, 3]) / 3
    tall, wide = (slopes[0] * 10 / 4).round(), (slopes[1] * 10 / 3).round()
    area, ratio = tall * wide / (height * width), wide / tall
    assert 0.07 < float(area.min()) < 0.12
    assert 0.85 < float(area.max()) <= 1.0
    assert 0.72 < float(ratio.min()) < 0.78
    assert 1.25 < float(ratio.max()) < 1.37
    image = draw_images(1, height, width)
    top = ((found[0, 0, 5, 5] + found[0, 0, 4, 5]) / 8 - (tall[0] - 1) / 2).round()
    left = ((found[0, 1, 5, 5] + found[0, 1, 5, 4]) / 6 - (wide[0] - 1) / 2).round()
    box = tuple(int(edge) for edge in (left, top, left + wide[0], top + tall[0]))
    expected = to_pillow(image[0]).crop(box).resize((10, 10), Image.Resampling.BILINEAR)
    [part] = transforms.random_resized_crop(image, SampleRng([0]), 10)
    assert largest_difference(part, from_pillow(expected)) <= 1


def test_random_resized_crop_falls_back_to_the_middle() -> None:
    image = draw_images(1, 10, 40)
    [found] = transforms.random_resized_crop(image, SampleRng([0]), (10, 20), scale=(1, 1), ratio=(2, 2))
    assert torch.equal(found, image[0, :, :, 10:30])


def test_normalize_equals_numpy() -> None:
    images, mean, std = draw_images(), [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]
    found = transforms.normalize(images, mean, std)
    expected = (images.permute(0, 2, 3, 1).numpy() / 255 - mean) / std
    np.testing.assert_allclose(found.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)
    assert torch.equal(transforms.normalize(images.float() / 255, mean, std), found)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colors_equal_pillow(name: str, factor: float) -> None:
    enhance = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
    }[name]
    images = draw_images()
    expected = [from_pillow(enhance(to_pillow(image)).enhance(factor)) for image in images]
    found = getattr(transforms, f"adjust_{name}")(images, factor)
    assert largest_difference(found, torch.stack(expected)) <= 1


@pytest.mark.parametrize("shift", [-0.5, -0.2, 0.0, 0.1, 0.5])
def test_hue_equals_colorsys(shift: float) -> None:
    images = draw_images(2, 6, 7)
    images[:, :, 0, 0] = 77  # a gray pixel has no hue
    found = transforms.adjust_hue(images.double() / 255, shift)
    for pixel, shifted in zip(
        images.permute(0, 2, 3, 1).reshape(-1, 3), found.permute(0, 2, 3, 1).reshape(-1, 3), strict=True
    ):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel.double() / 255).tolist())
        expected = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
        np.testing.assert_allclose(shifted.numpy(), expected, atol=1e-9)


def test_jitter_draws_a_factor_for_each_image() -> None:
    images = torch.full((500, 3, 2, 2), 0.25)
    levels = transforms.color_jitter(images, SampleRng(range(500)), brightness=0.8)[:, 0, 0, 0] / 0.25
    assert 0.2 <= float(levels.min()) < 0.25
    assert 1.75 < float(levels.max()) <= 1.8001
    assert abs(float(levels.mean()) - 1) < 0.1


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 2.0, 5.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    """The empirical distribution is within the 0.1 % limit of Kolmogorov's test of the integrated density."""
    count = 20_000
    shares = np.sort(draw_beta(SampleRng(range(count), dtype=torch.float64), alpha).numpy())
    # The substitution x = sin² t removes the poles of the density at 0 and 1.
    angle = np.linspace(0, math.pi / 2, 200_001)
    density = (np.sin(angle[1:-1]) * np.cos(angle[1:-1])) ** (2 * alpha - 1)
    mass = np.concatenate([[0], np.cumsum(density), [density.sum()]]) / density.sum()
    expected = np.interp(np.arcsin(np.sqrt(shares)), angle, mass)
    distance = np.abs(expected - (np.arange(count) + 0.5) / count).max()
    assert distance < 1.95 / math.sqrt(count)


def test_mixup_and_cutmix_mix_pairs() -> None:
    images = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 3, 20, 20) / 4
    labels, rng = torch.tensor([0, 1, 2, 3]), SampleRng([10, 11, 12, 13], 1)
    mixed, targets = transforms.mixup(images, labels, rng, alpha=1.0, classes=4)
    share = targets[torch.arange(4), labels]
    partner = torch.tensor([1, 0, 3, 2])
    assert torch.equal(targets[torch.arange(4), partner], 1 - share)
    torch.testing.assert_close(
        mixed, share.reshape(4, 1, 1, 1) * images + (1 - share.reshape(4, 1, 1, 1)) * images[partner]
    )
    assert len(set(share.tolist())) == 4
    mixed, targets = transforms.cutmix(images, labels, rng, classes=4)
    for row in range(4):
        replaced = mixed[row] == images[partner[row]]
        assert torch.equal(replaced | (mixed[row] == images[row]), torch.ones_like(replaced))
        rows, columns = replaced[0].any(1), replaced[0].any(0)
        assert torch.equal(replaced[0], rows[:, None] & columns)  # a rectangle
        assert float(targets[row, partner[row]]) == pytest.approx(float(replaced.float().mean()))


def test_mixup_of_several_labels() -> None:
    targets = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    _, mixed = transforms.mixup(torch.rand(2, 3, 4, 4), targets, SampleRng([0, 1]))
    assert torch.equal(mixed[:, 1], torch.ones(2))
    assert 0 < float(mixed[0, 0]) < 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, rng: transforms.center_crop(x, 99), "size 99 × 99 is not within the images of 19 × 24"),
        (lambda x, rng: transforms.random_crop(x, rng, 22), "use a smaller size, padding or resize"),
        (lambda x, rng: transforms.resize(x, (0, 3)), "size must be at least 1"),
        (lambda x, rng: transforms.random_resized_crop(x, rng, 8, scale=(0, 1)), "scale must be a range"),
        (lambda x, rng: transforms.normalize(x, [0.5], [0.5]), "3 channels require as many numbers"),
        (lambda x, rng: transforms.adjust_hue(x[:, :1], 0.1), "colors require RGB images"),
        (lambda x, rng: transforms.color_jitter(x, rng, hue=0.7), "hue must be from 0 to 0.5, got 0.7"),
        (lambda x, rng: transforms.mixup(x, rng.numbers, rng), "specify classes="),
        (lambda x, rng: transforms.mixup(x, rng.numbers, rng, classes=3), "requires more than classes=3"),
        (lambda x, rng: transforms.mixup(x, rng.numbers, rng, alpha=0), "alpha must be above 0"),
        (lambda x, rng: transforms.cutmix(x[:3], rng.numbers[:3], SampleRng([4, 5, 6])), "of 6 and 7 only 6"),
        (lambda x, rng: transforms.seeded(rng).__enter__(), "requires the rng of one sample, got 12"),
    ],
)
def test_bad_arguments_are_one_sentence(call: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        call(draw_images(), SampleRng(NUMBERS))


def test_seeded_restores_the_generators() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first = torch.rand(1)
    with transforms.seeded(SampleRng([5])) as seed:
        inside = torch.rand(1)
    with transforms.seeded(SampleRng([5])) as same:
        assert torch.equal(torch.rand(1), inside)
    assert seed == same < 2**32
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


class Mixed(Task):
    """All transforms on the batch, and mixup of the targets."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 6), nn.Tanh(), nn.Linear(6, 4))

    def dataset(self, split: str) -> Rows:
        images = random_normal(SAMPLES, 3, 10, 10).sigmoid()
        return Rows(x=images if split == "train" else images[..., 1:9, 1:9], y=random_integers(4, SAMPLES))

    def inputs(self, batch: Any) -> Tensor:
        return transforms.normalize(batch["x"], [0.5] * 3, [0.2] * 3)

    def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
        images = transforms.random_resized_crop(batch["x"], rng, 8, scale=(0.5, 1))
        images = transforms.color_jitter(transforms.random_flip(images, rng), rng, 0.2, 0.2, 0.2, 0.1)
        images, targets = transforms.cutmix(images, batch["y"], rng, classes=4)
        images, targets = transforms.mixup(images, targets, rng)
        return {"x": images, "y": targets}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        target = batch["y"]
        return F.cross_entropy(
            output, target.to(output.dtype) if target.is_floating_point() else target, reduction="none"
        )


SPEC = Spec(steps=3, batch=12, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.1, momentum=0))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"), [(2, "ddp,microbatches=3"), (2, "zero3"), (2, "pp=2,microbatches=2"), (3, "zero2")]
)
def test_plans_train_like_one_process(size: int, plan: str) -> None:
    assert not differences_from_single(size, plan, Mixed(), SPEC)


def test_partners() -> None:
    assert find_partners("mixup", SampleRng([6, 7, 5, 4])).tolist() == [1, 0, 3, 2]
