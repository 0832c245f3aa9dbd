"""Datasets that can be cached as the bytes of their files, before they are decoded."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any, Protocol, TypeGuard

from paceline.data.mixture import Mixture


class RawDataset(Protocol):
    """A dataset whose samples are a function of some bytes: `[i]` is `decode_raw(i, read_raw(i))`.

    fingerprint  identifies the bytes of all samples; None: not known, so jobs do not share them
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def read_raw(self, index: int) -> bytes: ...
    def decode_raw(self, index: int, content: bytes) -> Any: ...
    def fingerprint(self) -> str | None: ...


def is_raw(dataset: Any) -> TypeGuard[RawDataset]:
    """Return whether a dataset has the methods of RawDataset."""
    return all(hasattr(dataset, name) for name in ("read_raw", "decode_raw", "fingerprint"))


def find_raw(dataset: Any) -> RawDataset | None:
    """Return the dataset, or a mixture, as one of bytes; None if it can only be cached decoded."""
    if is_raw(dataset):
        return dataset
    if isinstance(dataset, Mixture) and all(is_raw(source) for source in dataset.sources):
        return _RawMixture(dataset)
    return None


class _RawMixture:
    """A mixture of datasets of bytes."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture
        self._sources: list[Any] = list(mixture.sources)
        self._begins = [0, *accumulate(mixture.lengths)]

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, index: int) -> Any:
        return self.mixture[index]

    def _locate(self, index: int) -> tuple[Any, int]:
        source = bisect_right(self._begins, index) - 1
        return self._sources[source], index - self._begins[source]

    def read_raw(self, index: int) -> bytes:
        source, at = self._locate(index)
        content: bytes = source.read_raw(at)
        return content

    def decode_raw(self, index: int, content: bytes) -> Any:
        source, at = self._locate(index)
        return source.decode_raw(at, content)

    def fingerprint(self) -> str | None:
        found = [source.fingerprint() for source in self._sources]
        return None if None in found else repr(found)
