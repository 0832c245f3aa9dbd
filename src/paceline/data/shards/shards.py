"""Shards: samples in ordinary tar files, by index."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.shards.shard_files import ShardFiles
from paceline.data.shards.shard_index import split_sample_name
from paceline.errors import DataError


class Shards:
    """Samples in tar shards that `paceline pack`, WebDataset or `tar` wrote, as a map-style dataset.

        class Pictures(paceline.Task):
            folder: str
            def dataset(self, split):
                return Shards(f"{self.folder}/{split}", decode=lambda sample: (
                    decode_image(sample["jpg"]), int(sample["cls"])))

    A sample is a dict of the files that have the same name up to the first point, by the rest of their names
    in lower case, as bytes: {"__key__": "n01/17", "jpg": …, "cls": …}. These are the names of WebDataset.
    Each sample is read by one `pread` and compared with its CRC-32.

    path: a folder with tar files, or several tar files. Paceline writes an index of shards that have none:
    as `shards.index` next to them, or in a cache folder of this user if the folder cannot be written.
    decode: makes what `[i]` returns of this dict.

    Raises DataError for shards that cannot be read, or differ from the index of `paceline pack`.
    """

    def __init__(
        self, path: str | Path | Sequence[str | Path], decode: Callable[[dict[str, Any]], Any] | None = None
    ):
        self.files, self.decode = ShardFiles(path), decode
        if not len(self):
            raise DataError(f"the shards in {self.files.folder} have no files such as NAME.jpg")

    def __len__(self) -> int:
        return len(self.files.index.samples)

    def __getitem__(self, index: int) -> Any:
        files = self.files
        first, end = self._find_files(index)
        return self._assemble(first, files.read_range(first, end))

    def read_many(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, as `[i]` does. The system reads their first files at the same time."""
        at = np.asarray(indices, dtype=np.int64)
        if np.all((at >= 0) & (at < len(self))):
            self.files.ask_ahead(self.files.index.samples[at])
        return [self[index] for index in indices]

    def _find_files(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.files.index.sample_files(index)

    def _assemble(self, first: int, contents: Sequence[bytes]) -> Any:
        files = self.files
        sample: dict[str, Any] = {}
        for file, content in enumerate(contents, first):
            split = split_sample_name(files.names[file])
            if split is None:
                continue
            if split[1] in sample:
                raise DataError(
                    f"{files.names.decode(file)} occurs twice in a shard of {files.folder}; rename one"
                )
            sample.setdefault("__key__", split[0].decode(errors="surrogateescape"))
            sample[split[1]] = content
        if self.decode is None:
            return sample
        try:
            return self.decode(sample)
        except KeyError as error:
            if not error.args or not isinstance(error.args[0], str) or error.args[0] in sample:
                raise
            shard = files.folder / files.index.shards[files.index.find_shard(first)].name
            parts = ", ".join(part for part in sample if part != "__key__")
            raise DataError(
                f"the sample {sample['__key__']} in {shard} has no file {error.args[0]!r}, only {parts}"
            ) from error

    def read_raw(self, index: int) -> bytes:
        """Return the contents of the files of a sample, one after another."""
        return b"".join(self.files.read_range(*self._find_files(index)))

    def decode_raw(self, index: int, content: bytes) -> Any:
        """Return the sample of these contents."""
        first, end = self._find_files(index)
        ends = np.cumsum(self.files.index.sizes[first:end]).tolist()
        return self._assemble(first, [content[i:j] for i, j in pairwise([0, *ends])])

    def fingerprint(self) -> str:
        """Return what identifies the bytes of all samples."""
        return self.files.fingerprint()
