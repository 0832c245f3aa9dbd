"""Folder: images in a folder for each class, as files or packed."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.data.images import SUFFIXES, decode_image
from paceline.data.shards.name_table import NameTable
from paceline.data.shards.shard_files import ShardFiles
from paceline.data.shards.shard_index import INDEX, UNFINISHED
from paceline.errors import DataError
from paceline.files import reason


class Files(Protocol):
    """Files by number, in the order of their names."""

    @property
    def names(self) -> NameTable: ...

    def read(self, file: int) -> bytes: ...


class FolderFiles:
    """The regular files below a folder, in the order of the bytes of their paths. Raises DataError."""

    def __init__(self, folder: Path):
        self.folder, self._prefix = folder, os.path.join(os.fsencode(folder), b"")
        self.names = NameTable.build(sorted(_find_files(os.fsencode(folder), b"")))

    def read(self, file: int) -> bytes:
        """Return the content of a file. Raises DataError."""
        try:
            opened = os.open(self._prefix + self.names[file], os.O_RDONLY | os.O_CLOEXEC)
            try:  # a third of the time that a Python file takes
                size = os.fstat(opened).st_size
                content = os.read(opened, size)
            finally:
                os.close(opened)
            if len(content) == size:
                return content
            return (self.folder / self.names.decode(file)).read_bytes()  # of a device, or larger than 2 GiB
        except OSError as error:
            path = self.folder / self.names.decode(file)
            raise DataError(f"cannot read {path}: {reason(error)}") from error


def _find_files(folder: bytes, prefix: bytes) -> Iterator[bytes]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from _find_files(entry.path, prefix + entry.name + b"/")
                elif entry.is_file() or entry.is_symlink():  # reading a broken link is an error with its path
                    yield prefix + entry.name
    except OSError as error:
        raise DataError(f"cannot read {os.fsdecode(folder)}: {reason(error)}") from error


class Folder:
    """Images in a folder for each class, as pairs (image, number of the class).

        class Pictures(paceline.Task):
            folder: str
            def dataset(self, split): return Folder(f"{self.folder}/{split}")

    The folder may be packed by `paceline pack`, or be inside of a folder that is: samples, order and classes
    are the same. Samples are in the order of their paths, and classes in the order of their names.

    folder: has a folder for each class, which may have folders itself.
    decode: makes the image of the content of a file. None: the content itself, as bytes.
    suffixes: of the files that are images, in any case.
    classes: the names of the classes, in the order of their numbers. Default: the folders. Specify them to
    give all splits the same numbers.

    `classes` has the names; `labels` the class of each sample, int64; `path(i)` the path of a sample.

    Raises DataError for a folder without images, an image outside of class folders, and a class that
    `classes` does not have.
    """

    def __init__(
        self,
        folder: str | Path,
        decode: Callable[[bytes], Any] | None = decode_image,
        suffixes: Sequence[str] = SUFFIXES,
        classes: Sequence[str] | None = None,
    ):
        self.folder, self.decode = Path(folder), decode
        packed = find_packed(self.folder)
        if packed is None and not self.folder.is_dir():
            raise DataError(f"no such folder: {self.folder}")
        self.files: Files = ShardFiles(packed[0]) if packed is not None else FolderFiles(self.folder)
        self._root, self._prefix = packed or (self.folder, b"")
        names = self.files.names
        is_sorted = not isinstance(self.files, ShardFiles) or self.files.index.is_packed
        if not is_sorted and any(a > b for a, b in pairwise(names)):
            raise DataError(
                f"the files in the shards of {self._root} are not sorted by name; read them by Shards, or"
                " unpack them and pack the files by paceline pack"
            )
        self._suffixes = tuple(suffixes)
        selected = names.find_with_suffix(suffixes)
        if self._prefix:
            begin, end = find_range(names, self._prefix)
            if begin == end:
                raise DataError(f"no such folder: {self.folder}, which {self._root} does not contain")
            selected = selected[(selected >= begin) & (selected < end)]
        if not len(selected):
            raise DataError(
                f"{self.folder} has {len(names):,} files but no images ({', '.join(suffixes)}); specify"
                " the folder that has a folder for each class"
            )
        # None: all files, so that nothing grows with their number
        self._selected = selected if len(selected) < len(names) else None
        self._count = len(selected)
        found = list(_find_classes(names, self.folder, selected, self._prefix))
        self.classes = list(classes) if classes is not None else sorted(name for name, _ in found)
        self._begins = [begin for _, begin in found]
        self._class_numbers = [self._number_class(name) for name, _ in found]

    def _number_class(self, name: str) -> int:
        if name in self.classes:
            return self.classes.index(name)
        raise DataError(
            f"{self.folder} has the class {name!r}, which is not in classes ({_abbreviate(self.classes)});"
            " rename the folder, or specify all classes"
        )

    def __len__(self) -> int:
        return self._count

    def _find_file(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return index if self._selected is None else int(self._selected[index])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.decode_raw(index, self.read_raw(index))

    def read_many(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """Return samples, as `[i]` does, with less work for each."""
        if not isinstance(self.files, ShardFiles):
            return [self[index] for index in indices]
        at = np.asarray(indices, dtype=np.int64)
        files = at if self._selected is None else self._selected[at]
        contents: list[Any] = self.files.read_many(files)
        if self.decode is not None:
            contents = [
                self._decode(index, content) for index, content in zip(indices, contents, strict=True)
            ]
        classes = np.searchsorted(self._begins, files, side="right") - 1
        return list(zip(contents, np.array(self._class_numbers)[classes].tolist(), strict=True))

    def decode_raw(self, index: int, content: bytes) -> tuple[Any, int]:
        """Return the sample whose file has this content. Raises DataError with its path."""
        label = self._class_numbers[bisect_right(self._begins, self._find_file(index)) - 1]
        return (content if self.decode is None else self._decode(index, content)), label

    def _decode(self, index: int, content: bytes) -> Any:
        assert self.decode is not None
        try:
            return self.decode(content)
        except DataError as error:
            raise DataError(f"{self.path(index)}: {error}") from error

    def fetch(self, index: int) -> tuple[bytes, int]:
        """Return the content of the file of a sample, and its class."""
        file = self._find_file(index)
        return self.files.read(file), self._class_numbers[bisect_right(self._begins, file) - 1]

    def read_raw(self, index: int) -> bytes:
        """Return the content of the file of a sample."""
        return self.files.read(self._find_file(index))

    def fingerprint(self) -> str | None:
        """Return what identifies the bytes of all samples; None for files, which may change."""
        if not isinstance(self.files, ShardFiles):
            return None
        return repr((self.files.fingerprint(), self._prefix, self._suffixes))

    def path(self, index: int) -> str:
        """Return the path of the file of a sample: in its folder, or as it was before it was packed."""
        return str(self._root / self.files.names.decode(self._find_file(index)))

    @property
    def file_numbers(self) -> "np.typing.NDArray[np.int64]":
        """The number of the file of each sample, int64 of shape (samples,)."""
        return np.arange(len(self)) if self._selected is None else self._selected

    @property
    def labels(self) -> "np.typing.NDArray[np.int64]":
        """The class of each sample, int64 of shape (samples,)."""
        numbers = np.searchsorted(self._begins, self.file_numbers, side="right") - 1
        return np.array(self._class_numbers, dtype=np.int64)[numbers]


def find_packed(folder: Path) -> tuple[Path, bytes] | None:
    """Return the folder of the shards that contain a folder, and the beginning of the names of its files.

    None if the folder is not packed. The names begin with `train/` if the parent of `train` was packed.
    """
    if folder.is_dir():
        return (folder, b"") if _has_shards(folder) else None
    for root in folder.parents:
        if root.is_dir():
            prefix = os.path.join(os.fsencode(folder.relative_to(root)), b"")
            return (root, prefix) if _has_shards(root) else None
    return None


def _has_shards(folder: Path) -> bool:
    """Return whether a folder has shards of samples, and not samples in class folders."""
    if (folder / INDEX).exists() or (folder / UNFINISHED).exists():
        return True
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:  # reading the files reports it
        return False
    return bool(names) and all(name.endswith(".tar") for name in names)


def find_range(names: NameTable, prefix: bytes) -> tuple[int, int]:
    """Return the first of the sorted names that begin with `prefix/`, and the name after the last."""
    begin = names.find_first_at_least(prefix)
    return begin, names.find_first_at_least(prefix[:-1] + b"0", begin)  # "0" follows "/"


def list_classes(folder: Path) -> list[str] | None:
    """Return the names of the class folders of a folder, as files or packed; None if there is no folder.

    Empty folders are no classes: a packed folder does not have them. Raises DataError.
    """
    try:
        if (packed := find_packed(folder)) is not None:
            begin, end = find_range(ShardFiles(packed[0]).names, packed[1]) if packed[1] else (0, 1)
            return Folder(folder, None).classes if begin < end else None
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and any(path.iterdir()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {folder}: {reason(error)}") from error


def _find_classes(names: NameTable, folder: Path, selected: Any, prefix: bytes) -> Iterator[tuple[str, int]]:
    """Yield each class with its first file. Only the borders between classes are searched for."""
    file, last = int(selected[0]), int(selected[-1])
    while file <= last:
        top, slash, _ = names[file][len(prefix) :].partition(b"/")
        following = names.find_first_at_least(prefix + top + b"0", file)  # "0" follows "/"
        images = selected[np.searchsorted(selected, file) : np.searchsorted(selected, following)]
        if len(images):
            if not slash:
                name = os.fsdecode(names[int(images[0])][len(prefix) :])
                raise DataError(f"the image {folder / name} is in no class folder; move it into one")
            yield os.fsdecode(top), file
        file = max(following, file + 1) if slash else file + 1


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
