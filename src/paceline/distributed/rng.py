"""Random streams as pure functions of what they are for, so that nothing of them has to be stored to resume exactly."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose: `derive(7, "dropout", step, rank)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Let torch draw from this seed, on the CPU and on `device`. (`torch.manual_seed` asks every back end there is: 90 µs.)"""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def seed_cpu_rngs(seed: int) -> None:
    """Let torch on the CPU, numpy and random draw from this seed."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded_rngs(seed: int) -> Iterator[None]:
    """Whatever draws in this context, torch on the CPU, numpy or random, draws from this seed; outside nothing changes."""
    of_random, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_cpu_rngs(seed)
        try:
            yield
        finally:
            random.setstate(of_random)
            np.random.set_state(of_numpy)


def rng_states() -> tuple[object, ...]:
    """Return the states of the three streams, to be compared (60 µs)."""
    of_numpy: Any = np.random.get_state()
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        random.getstate(),
        of_numpy[1].tobytes(),
        of_numpy[2:],
    )


FIXED_SEED = derive_seed(0, "no sample draws from this")


def has_rng_moved() -> bool:
    """Return whether anything drew or seeded since `start_streams(FIXED)`. Moves the streams on: start them anew afterwards (3 µs)."""
    return _draw_from_each() != _first_draws()


def _draw_from_each() -> tuple[object, ...]:
    return torch.default_generator.get_state().numpy().tobytes(), random.random(), np.random.random_sample()


@cache
def _first_draws() -> tuple[object, ...]:
    with seeded_rngs(FIXED_SEED):
        return _draw_from_each()


# Code that depends on the streams without moving them on passes through these names: to seed a generator of its own, or to put a
# stream back after a draw. torch.initial_seed(), get_rng_state() and fork_rng() look torch's generator up in torch.random.
_STATE_SOURCES: tuple[tuple[Any, str], ...] = (
    (torch.random, "default_generator"),
    (random, "getstate"),
    (np.random, "get_state"),
)


@contextlib.contextmanager
def watch_rng_state() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether code in this context asked for the seed or the state of a stream."""
    notes: list[None] = []
    originals = [getattr(module, name) for module, name in _STATE_SOURCES]
    for (module, name), original in zip(_STATE_SOURCES, originals, strict=True):
        setattr(module, name, _RecordingProxy(original, notes))
    try:
        yield lambda: bool(notes)
    finally:
        for (module, name), original in zip(_STATE_SOURCES, originals, strict=True):
            setattr(module, name, original)


class _RecordingProxy:
    """Stands for an object, and notes each use of it."""

    def __init__(self, original: Any, notes: list[None]):
        self._original, self._notes = original, notes

    def __getattr__(self, name: str) -> Any:
        self._notes.append(None)
        return getattr(self._original, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._notes.append(None)
        return self._original(*arguments, **options)
