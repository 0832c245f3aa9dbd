"""Transforms of other libraries (torchvision, kornia, albumentations), seeded by sample."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.distributed.rng import seed_torch, seeded_rngs
from paceline.errors import TaskError
from paceline.sample_rng import SampleRng


@contextlib.contextmanager
def seeded(rng: SampleRng) -> Iterator[int]:
    """Seed torch, numpy and random from the random numbers of one sample, and restore them afterwards.

    Yields the seed, below 2**32, for libraries with generators of their own:

        def transform(self, sample, rng):
            with transforms.seeded(rng) as seed:
                self.albumentations.set_random_seed(seed)
                return self.albumentations(image=sample)["image"]

    Raises TaskError if `rng` has several samples; `by_sample` calls a function for each of them.
    """
    if len(rng) != 1:
        raise TaskError(f"seeded(rng) requires the rng of one sample, got {len(rng)}; use by_sample")
    with _seeded(int(rng.randint(0, 2**32)), torch.device("cpu")) as seed:
        yield seed


def by_sample(function: Callable[[Tensor], Tensor], values: Tensor, rng: SampleRng) -> Tensor:
    """Return `function` of each sample, stacked. The generators are seeded for each and restored afterwards.

        images = transforms.by_sample(kornia_augmentation, images, rng)

    function: gets one sample without the batch dim, such as an image of shape (channels, height, width). It
    may draw from torch (also on the device of the samples), numpy and random.
    """
    results = []
    for value, seed in zip(values, rng.randint(0, 2**32).tolist(), strict=True):
        with _seeded(seed, values.device):
            results.append(function(value))
    return torch.stack(results) if results else values


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[int]:
    devices = [device.index or 0] if device.type == "cuda" else []
    with seeded_rngs(seed), torch.random.fork_rng(devices=devices):
        seed_torch(seed, device)
        yield seed
