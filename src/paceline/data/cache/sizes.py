"""The size of a dataset: bytes, samples and files at its source, and in a cache."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.cache.encoding import encode
from paceline.data.cache.raw import find_raw
from paceline.data.folder import Folder, FolderFiles
from paceline.data.mixture import Mixture
from paceline.data.shards.shard_files import ShardFiles
from paceline.data.shards.shards import Shards
from paceline.data.tokens import TokenDocuments, Tokens

NUM_PROBED = 32  # files or samples whose size is read, to estimate that of all


@dataclass(frozen=True)
class SourceSize:
    """Where the samples of a dataset are, and how large they are.

    folder      in which its files are
    bytes       of its samples
    samples     their number
    files       number of files that contain them
    is_loose    whether each sample is a file, which is opened to read it
    packed      number of files that its files contain
    """

    folder: Path
    bytes: int
    samples: int
    files: int
    is_loose: bool
    packed: int = 0


def find_source_sizes(dataset: Any) -> Iterator[SourceSize]:
    """Yield the files of a dataset of `paceline.data`; nothing for other datasets."""
    if isinstance(dataset, Mixture):
        for source in dataset.sources:
            yield from find_source_sizes(source)
    elif isinstance(dataset, (Tokens, TokenDocuments)):
        path = dataset.file.path
        yield SourceSize(
            path if path.is_dir() else path.parent, dataset.file.tokens.nbytes, len(dataset), 1, False
        )
    elif isinstance(dataset, (Folder, Shards)):
        files = dataset.files
        if isinstance(files, ShardFiles):
            index = files.index
            used = index.sizes[dataset.file_numbers] if isinstance(dataset, Folder) else index.sizes
            size, count = int(used.sum()), len(index.shards) + 1
            yield SourceSize(files.folder, size, len(dataset), count, False, len(files.names))
        elif isinstance(files, FolderFiles):
            names = files.names
            sizes = [_file_bytes(files.folder / names.decode(at)) for at in _spread(len(names))]
            yield SourceSize(files.folder, round(np.mean(sizes) * len(names)), len(dataset), len(names), True)


def _spread(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, NUM_PROBED)).astype(np.int64)).tolist()


def _file_bytes(path: Path) -> int:
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def estimate_cached_bytes(dataset: Any, is_decoded: bool) -> int:
    """Return the bytes of all samples in a cache, from some of them. Raises DataError.

    is_decoded: whether the samples are stored as `[i]` returns them, also if the dataset has raw bytes.
    """
    raw = None if is_decoded else find_raw(dataset)
    places = _spread(len(dataset))
    sizes = [len(raw.read_raw(at)) if raw is not None else len(encode(dataset[at])) for at in places]
    return round(np.mean(sizes) * len(dataset))
