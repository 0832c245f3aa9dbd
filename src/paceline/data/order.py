"""The order of samples: pure functions of (seed, number), which any rank computes for any number.

They take no memory that grows with the number of samples, and no release of a library can change them.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from paceline.distributed.rng import derive_seed

Numbers = npt.NDArray[Any]  # of samples
ROUNDS = 8  # of the Feistel network
BLOCKS_PER_WINDOW = 64  # runs of neighboring samples that a window has
DEFAULT_WINDOW = 16384
FULL = "full"  # the description of an order without settings


class Order(Protocol):
    """Which sample of a dataset has which number in a training. The numbers count over all epochs."""

    @property
    def epoch_samples(self) -> int:
        """The number of samples of an epoch."""

    def indices(self, numbers: Numbers) -> Numbers:
        """Return the indices of the samples with these numbers, int64 of shape (n,)."""

    def describe(self, samples: int) -> str:
        """Return what the order of the first samples depends on, besides the seed."""


@dataclass(frozen=True)
class SampleOrder:
    """The order of one dataset, in which each epoch has each sample once.

    full    each epoch is a permutation of all samples
    window  the blocks of the dataset are permuted, and then the samples within windows of many blocks. So
            reads stay near each other: a block has window / 64 samples that are neighbors in the dataset
    none    the order of the dataset, in each epoch

    samples  of the dataset
    window   samples of a window
    """

    samples: int
    seed: int
    shuffle: Literal["full", "window", "none"] = "full"
    window: int = DEFAULT_WINDOW

    @property
    def epoch_samples(self) -> int:
        return self.samples

    def indices(self, numbers: Numbers) -> Numbers:
        """Return the indices of the samples with these numbers, int64 of shape (n,)."""
        if self.shuffle == "none":
            return numbers.astype(np.int64) % self.samples
        if self.shuffle == "full":
            return shuffle(numbers, self.samples, self.seed)
        return shuffle_windows(numbers, self.samples, self.seed, self.window)

    def describe(self, samples: int) -> str:
        """Return what the order depends on, besides the seed."""
        return f"{self.shuffle} {self.window}" if self.shuffle == "window" else self.shuffle


def shuffle(numbers: Numbers, samples: int, seed: int) -> Numbers:
    """Return the indices of the samples with these numbers, int64 of shape (n,), if an epoch has `samples`.

    Each epoch has a different permutation: a Feistel network over a·b ≥ samples, applied again to each value
    until it is below `samples` (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). It takes no
    memory, and any number can be computed independently.
    """
    epochs, positions = np.divmod(numbers.astype(np.int64), samples)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        key = _as_keys(derive_seed(seed, "order", epoch))
        indices[in_epoch] = _permute(positions[in_epoch], samples, key)
    return indices


def shuffle_windows(numbers: Numbers, samples: int, seed: int, window: int) -> Numbers:
    """Return the indices of the samples with these numbers, as `shuffle`, in an order with near reads.

    An epoch is a permutation of the blocks of the dataset. Windows of this sequence are permuted again, each
    by a key of its own. The last block may be shorter; it has a place of its own, so that all other blocks
    have equal lengths and each step has a closed form.
    """
    block = max(1, window // BLOCKS_PER_WINDOW)
    blocks, rest = divmod(samples, block)
    epochs, positions = np.divmod(numbers.astype(np.int64), samples)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        key = derive_seed(seed, "windows", epoch)
        at = _permute_within_windows(positions[in_epoch], samples, window, key)
        begin = derive_seed(seed, "last block", epoch) % (blocks + 1) * block  # where the last block is
        is_last = (at >= begin) & (at < begin + rest)
        slot, offset = np.divmod(at - rest * (at >= begin + rest), block)
        if blocks:
            slot[~is_last] = _permute(slot[~is_last], blocks, _as_keys(derive_seed(seed, "blocks", epoch)))
        indices[in_epoch] = np.where(is_last, blocks * block + at - begin, slot * block + offset)
    return indices


def _permute_within_windows(positions: Numbers, samples: int, window: int, key: int) -> Numbers:
    """Return the positions after a permutation of each window."""
    windows, offsets = np.divmod(positions, window)
    keys = _mix(windows.astype(np.uint64), _as_keys(key))
    out: Numbers = np.empty_like(positions)
    is_last = windows == samples // window  # shorter than the others
    for of_window, size in ((~is_last, window), (is_last, samples % window)):
        if of_window.any():
            out[of_window] = _permute(offsets[of_window], size, keys[of_window])
    return windows * window + out


def _as_keys(key: int) -> Numbers:
    return np.array([key], dtype=np.uint64)  # an array, because only arrays overflow without a warning


def _permute(positions: Numbers, samples: int, keys: Numbers) -> Numbers:
    """Return the positions in the permutation of `samples` samples that a key selects, int64.

    keys: uint64, one for each position or one for all.
    """
    root = max(1, math.isqrt(samples - 1) + 1)
    a, b = np.uint64(root), np.uint64(-(-samples // root))
    out: Numbers = positions.astype(np.uint64)
    keys = np.broadcast_to(keys, out.shape)
    walking = np.ones(len(positions), dtype=bool)
    while walking.any():
        left: Numbers = out[walking] // b
        right: Numbers = out[walking] % b
        key = keys[walking]
        for turn in range(0, ROUNDS, 2):
            left = (left + _mix(right, key + np.uint64(turn)) % a) % a
            right = (right + _mix(left, key + np.uint64(turn + 1)) % b) % b
        out[walking] = left * b + right
        walking[walking] = out[walking] >= samples
    return out.astype(np.int64)


def _mix(values: Numbers, keys: Numbers) -> Numbers:
    """Return splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""
    z = values + keys * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
