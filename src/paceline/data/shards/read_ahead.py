"""Asks the system to read parts of files before they are read."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.cluster.limits import free_memory_bytes

BLOCK_BYTES = 2**20
MEMORY_SHARE = 0.25  # of the free memory, which files may have to be read in blocks


class ReadAhead:
    """Chooses what to ask for before the parts of a batch are read.

    If all files fit into memory, whole blocks are read when a part that begins in them is needed: an epoch
    needs all of them, and a disk reads a block in little more time than a small part. Each block is asked for
    once. Of larger files only the parts are asked for, so that the disk reads several at the same time.

    sizes: of the files.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]):
        self._fits = int(sizes.sum()) <= MEMORY_SHARE * free_memory_bytes()
        blocks = -(-sizes // BLOCK_BYTES)
        self._first_blocks = np.cumsum(blocks) - blocks
        self._is_missing = np.ones(int(blocks.sum()) if self._fits else 0, dtype=bool)
        self._missing = len(self._is_missing)

    def choose(
        self, files: npt.NDArray[Any], offsets: npt.NDArray[Any], sizes: npt.NDArray[Any]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (file, offset, bytes) of what to ask for, before parts of files are read."""
        if not self._fits:
            yield from zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        elif self._missing:
            begins = self._first_blocks[files] + offsets.astype(np.int64) // BLOCK_BYTES
            for block in np.unique(begins[self._is_missing[begins]]).tolist():
                self._is_missing[block] = False
                self._missing -= 1
                file = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
                yield file, (block - int(self._first_blocks[file])) * BLOCK_BYTES, BLOCK_BYTES


def ask(file: int, offset: int, size: int) -> None:
    """Let the system read a part of an open file in the background, where it can."""
    with contextlib.suppress(OSError, AttributeError):  # it is only advice, which some systems do not take
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
