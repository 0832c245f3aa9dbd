"""Random streams as pure functions of their purpose, so that an exact resume needs no stored state."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *purpose: object) -> int:
    """Return a 63-bit seed for one purpose: `derive_seed(7, "dropout", step, rank)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch on the CPU and on `device`. (`torch.manual_seed` seeds every back end, in 90 µs.)"""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def seed_cpu_rngs(seed: int) -> None:
    """Seed torch on the CPU, numpy and random."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded_rngs(seed: int) -> Iterator[None]:
    """Seed torch on the CPU, numpy and random in this context, and restore their states after it."""
    random_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_cpu_rngs(seed)
        try:
            yield
        finally:
            random.setstate(random_state)
            np.random.set_state(numpy_state)


_random_state, _numpy_state = random.getstate, np.random.get_state  # `watch_rng_state` does not see these


def rng_states() -> tuple[object, ...]:
    """Return the states of the three streams, for comparison (60 µs)."""
    numpy_state: Any = _numpy_state()
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        _random_state(),
        numpy_state[1].tobytes(),
        numpy_state[2:],
    )


FIXED_SEED = derive_seed(0, "no sample draws from this")  # for `has_rng_moved`


def has_rng_moved() -> bool:
    """Return whether anything drew or seeded since `seed_cpu_rngs(FIXED_SEED)` (3 µs).

    Advances the streams: seed them again afterwards.
    """
    return _draw_from_each() != _first_draws()


def _draw_from_each() -> tuple[object, ...]:
    return torch.default_generator.get_state().numpy().tobytes(), random.random(), np.random.random_sample()


@cache
def _first_draws() -> tuple[object, ...]:
    with seeded_rngs(FIXED_SEED):
        return _draw_from_each()


# Code that depends on the streams without drawing from them uses these names, to seed a private generator
# or to restore a stream after a draw.
# torch.initial_seed(), get_rng_state() and fork_rng() look up torch's generator in torch.random.
_STATE_SOURCES: tuple[tuple[Any, str], ...] = (
    (torch.random, "default_generator"),
    (random, "getstate"),
    (np.random, "get_state"),
)


@contextlib.contextmanager
def watch_rng_state() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether code in this context has read the seed or state of a stream."""
    uses: list[None] = []
    originals = [getattr(module, name) for module, name in _STATE_SOURCES]
    for (module, name), original in zip(_STATE_SOURCES, originals, strict=True):
        setattr(module, name, _RecordingProxy(original, uses))
    try:
        yield lambda: bool(uses)
    finally:
        for (module, name), original in zip(_STATE_SOURCES, originals, strict=True):
            setattr(module, name, original)


class _RecordingProxy:
    """A proxy that records each use of an object."""

    def __init__(self, original: Any, uses: list[None]):
        self._original, self._uses = original, uses

    def __getattr__(self, name: str) -> Any:
        self._uses.append(None)
        return getattr(self._original, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._uses.append(None)
        return self._original(*arguments, **options)
