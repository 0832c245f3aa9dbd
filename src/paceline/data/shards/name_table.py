"""NameTable: the names of many files in two arrays, which processes share."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class NameTable:
    """Names of files with `/` between folders. A name is bytes, as the file system has it.

    text  all names, one after another, uint8
    ends  the position in `text` after each name, uint64 of shape (names,)
    """

    def __init__(self, text: Array, ends: Array):
        self.text, self.ends = text, ends

    @classmethod
    def build(cls, names: Iterable[bytes]) -> "NameTable":
        """Return the table of these names."""
        names = list(names)
        ends = np.cumsum([len(name) for name in names], dtype=np.uint64)
        return cls(np.frombuffer(b"".join(names), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        begin = int(self.ends[index - 1]) if index else 0
        return self.text[begin : int(self.ends[index])].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self)))

    def decode(self, index: int) -> str:
        """Return a name as text, which `os.fsencode` turns into the name again."""
        return os.fsdecode(self[index])

    def find_with_suffix(self, suffixes: Sequence[str]) -> Array:
        """Return the indices of the names with one of these suffixes in any case, such as `.jpg`."""
        begins = np.concatenate([np.zeros(1, np.uint64), self.ends[:-1]])
        lengths = self.ends - begins
        found = np.zeros(len(self), dtype=bool)
        for suffix in {suffix.lower().encode() for suffix in suffixes}:
            matches = lengths > len(suffix)
            for distance, letter in enumerate(reversed(suffix), 1):
                at = np.flatnonzero(matches)
                letters = self.text[(self.ends[at] - np.uint64(distance)).astype(np.int64)]
                is_capital = (letters >= ord("A")) & (letters <= ord("Z"))
                matches[at] = np.where(is_capital, letters + 32, letters) == letter
            found |= matches
        return np.flatnonzero(found)

    def find_first_at_least(self, name: bytes, low: int = 0) -> int:
        """Return the first index from `low` on whose name is `name` or after it. The names must be sorted."""
        high = len(self)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self[middle] < name else (low, middle)
        return low
