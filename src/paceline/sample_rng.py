"""SampleRng: random numbers that belong to the samples of a batch, not to the rank that computes them.

A number is a pure function of the seed, the name of the stream, the number of the sample, the call and the
position. So it is equal under every plan and after a resume, and costs no state and no communication.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.batch import count_samples, find_tensors
from paceline.errors import TaskError

Batch = Any
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
MAX_PER_CALL = 2**32  # numbers of a sample in one call


class SampleRng:
    """Random numbers for the samples of a batch: row i of each tensor belongs to sample i.

    Methods of a task with a parameter `rng` receive one for their batch:

        def loss(self, output, batch, rng):
            mean, log_var = output
            z = mean + (log_var / 2).exp() * rng.randn_like(mean)

    The numbers of a sample depend on the seed of the spec, the epoch and the sample. They are equal bit for
    bit for any ranks, micro-batches and plans, and after a resume. In an evaluation they are the same each
    time. Each method starts its own stream; `stream(name)` is the same in all of them.

    numbers   of the samples, counted over all epochs; shape (batch,)
    seed      any integer
    device    of the tensors
    dtype     of floating-point numbers: float32 or float64. Both have the same values, up to rounding

    The generator is a splitmix64 of a counter, applied twice with two keys (Steele, Lea and Flood, Fast
    splittable pseudorandom number generators, 2014). Normal numbers come from the transform of Box and
    Muller. It is not meant for cryptography.
    """

    def __init__(
        self,
        numbers: Sequence[int] | Tensor,
        seed: int = 0,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        name: str = "",
    ):
        self._numbers, self._seed, self._device, self._dtype = numbers, seed, torch.device(device), dtype
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
        keys = [int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")]
        rows = torch.as_tensor(numbers, dtype=torch.int64, device=self._device)
        self._keys = [_mix_(rows * _signed(GOLDEN) + _signed(key))[:, None] for key in keys]
        self._calls = 0

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._keys[0])

    @property
    def numbers(self) -> Tensor:
        """The numbers of the samples, counted over all epochs, int64 of shape (batch,) on the CPU."""
        return torch.as_tensor(self._numbers, dtype=torch.int64, device="cpu")

    def stream(self, name: str) -> "SampleRng":
        """Return the stream `name` from its start: the same numbers in each method that asks for it.

        def inputs(self, batch, rng): return batch[0] + rng.stream("noise").randn_like(batch[0])
        def loss(self, output, batch, rng): noise = rng.stream("noise").randn_like(batch[0]) ...
        """
        return SampleRng(
            self._numbers, self._seed, device=self._device, dtype=self._dtype, name=f"stream/{name}"
        )

    def rand(self, *shape: int) -> Tensor:
        """Return numbers from the uniform distribution over [0, 1), shape (batch, *shape)."""
        sizes = _check_shape("rand", shape)
        return self._uniform(sizes)

    def randn(self, *shape: int) -> Tensor:
        """Return numbers from the standard normal distribution, shape (batch, *shape)."""
        return self._normal(_check_shape("randn", shape), self._dtype)

    def randn_like(self, tensor: Tensor) -> Tensor:
        """Return numbers from the standard normal distribution, in shape and dtype of `tensor`.

        Its first dim must be the samples of the batch. Raises TaskError.
        """
        if not tensor.dim() or len(tensor) != len(self):
            raise TaskError(
                f"rng.randn_like: the first dim must be the {len(self)} samples of the batch, got shape"
                f" {tuple(tensor.shape)}; use rng.randn(*shape) with the shape of one sample"
            )
        dtype = tensor.dtype if tensor.is_floating_point() else self._dtype
        return self._normal(tuple(tensor.shape[1:]), dtype).to(dtype)

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers from `low` to `high` - 1, int64 of shape (batch, *shape)."""
        sizes = _check_shape("randint", shape)
        if not (isinstance(low, int) and isinstance(high, int)):
            raise TaskError(f"rng.randint: low and high must be integers, got {low!r} and {high!r}")
        if high <= low:
            raise TaskError(f"rng.randint: no integer from low={low} to below high={high}; swap them")
        words = self._words(math.prod(sizes)) & (2**63 - 1)
        return _shaped(words.remainder_(high - low).add_(low), sizes)

    def bernoulli(self, p: float | Tensor, *shape: int) -> Tensor:
        """Return True with probability `p`, bool of shape (batch, *shape).

        p: a number, or a tensor that broadcasts to the result.
        """
        sizes = _check_shape("bernoulli", shape)
        if not isinstance(p, Tensor) and not 0 <= p <= 1:
            raise TaskError(f"rng.bernoulli: p must be a probability from 0 to 1, got {p!r}")
        return self._uniform(sizes) < p

    def permutation(self, n: int) -> Tensor:
        """Return a permutation of 0 to n - 1 for each sample, int64 of shape (batch, n)."""
        (size,) = _check_shape("permutation", (n,))
        return self._words(size).argsort(dim=1, stable=True)

    def _uniform(self, sizes: tuple[int, ...]) -> Tensor:
        high, low = self._halves(math.prod(sizes))
        words = torch.cat([high, low], 1)
        if self._dtype == torch.float64:
            return _shaped(words.to(torch.float64).mul_(2.0**-32), sizes)
        # float32 has 24 bits: rounding to the nearest would return 1.
        return _shaped((words >> 8).to(self._dtype).mul_(2.0**-24), sizes)

    def _normal(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        dtype = dtype if dtype == torch.float64 else torch.float32
        high, low = self._halves(math.prod(sizes))
        radius = high.to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = low.to(dtype).mul_(math.tau * 2.0**-32)
        return _shaped(torch.cat([radius * angle.cos(), radius * angle.sin()], 1), sizes)

    def _halves(self, count: int) -> tuple[Tensor, Tensor]:
        """Return two integers below 2**32 for each two of `count` numbers."""
        words = self._words(-(-count // 2))
        return (words >> 32) & (2**32 - 1), words & (2**32 - 1)

    def _words(self, count: int) -> Tensor:
        """Return 64 random bits, int64 of shape (batch, count), and advance to the next call."""
        first = self._calls * MAX_PER_CALL
        self._calls += 1
        counters = torch.arange(first, first + count, device=self._device) * _signed(GOLDEN)
        words = _mix_(self._keys[0] + counters)
        words ^= self._keys[1]
        return _mix_(words)


def _signed(number: int) -> int:
    """Return the number with the same 64 bits in the range of int64."""
    return (number + 2**63) % 2**64 - 2**63


def _mix_(z: Tensor) -> Tensor:
    """Apply the output function of splitmix64 in place. torch shifts int64 with its sign, so it is masked."""
    z ^= (z >> 30) & (2**34 - 1)
    z *= _signed(FIRST)
    z ^= (z >> 27) & (2**37 - 1)
    z *= _signed(SECOND)
    z ^= (z >> 31) & (2**33 - 1)
    return z


def _shaped(numbers: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the first numbers of each row in the shape (batch, *sizes)."""
    return numbers[:, : math.prod(sizes)].reshape(len(numbers), *sizes)


def _check_shape(method: str, shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the sizes of one sample, also if they are given as one tuple. Raises TaskError."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or math.prod(sizes) >= MAX_PER_CALL:
        raise TaskError(
            f"rng.{method}: expected the sizes of one sample as integers, such as 3, 32, 32, got {sizes!r}"
        )
    return sizes


@dataclass(frozen=True)
class SampleNumbers:
    """The numbers of the samples of a batch, and what else their random numbers depend on.

    numbers  over all epochs, int64 of shape (batch,) on the CPU
    seed     of the split
    dtype    of floating-point numbers
    """

    numbers: Sequence[int] | Tensor
    seed: int
    dtype: torch.dtype


# The batches that the engine computes on, by their identity.
_numbered: ContextVar[dict[int, tuple[Batch, SampleNumbers]] | None] = ContextVar("numbered", default=None)


@contextlib.contextmanager
def number_samples(batches: Sequence[Batch], numbers: Sequence[SampleNumbers]) -> Iterator[None]:
    """Let methods of the task draw for the samples of these batches in this context."""
    token = _numbered.set(
        {id(batch): (batch, of_batch) for batch, of_batch in zip(batches, numbers, strict=True)}
    )
    try:
        yield
    finally:
        _numbered.reset(token)


def find_numbers(batch: Batch) -> SampleNumbers:
    """Return the numbers of the samples of a batch.

    A batch outside of a training, as in the analysis of a model, has the samples 0, 1, 2, …. Raises TaskError
    for another batch than that of the training.
    """
    numbered = _numbered.get()
    if numbered is None:
        floats = [tensor.dtype for tensor in find_tensors(batch)]
        dtype = torch.float64 if torch.float64 in floats else torch.float32
        return SampleNumbers(range(count_samples(batch)), 0, dtype)
    if id(batch) not in numbered:
        raise TaskError(
            "a method of the task that draws by sample was called with another batch than its own; pass it"
            " the rng of the caller, as in super().loss(output, batch, rng)"
        )
    return numbered[id(batch)][1]


def open_stream(batch: Batch, name: str) -> SampleRng:
    """Return the stream `name` of the samples of a batch, on the device of the batch."""
    found = find_numbers(batch)
    device = next((tensor.device for tensor in find_tensors(batch)), "cpu")
    return SampleRng(found.numbers, found.seed, device=device, dtype=found.dtype, name=name)
