"""Read a checkpoint of torch's distributed checkpoint without running code that its files name.

torch 2.13 reads `.metadata` with pickle, and entries of bytes with `torch.load(weights_only=False)`: both
call what the file names. Here the pickle may name only the classes that torch writes into it, and gets
stand-ins for them. Their contents are checked, and torch's objects are built from them. Entries of bytes are
refused: Paceline's checkpoints hold only tensors.
"""

import contextlib
import io
import math
import pickle
import warnings
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from paceline.errors import CheckpointError
from paceline.files import open_regular

DCP = "torch.distributed.checkpoint."
CLASSES = {
    (DCP + "metadata", "Metadata"),
    (DCP + "metadata", "TensorStorageMetadata"),
    (DCP + "metadata", "BytesStorageMetadata"),
    (DCP + "metadata", "TensorProperties"),
    (DCP + "metadata", "ChunkStorageMetadata"),
    (DCP + "metadata", "MetadataIndex"),
    (DCP + "metadata", "StorageMeta"),
    (DCP + "metadata", "_MEM_FORMAT_ENCODING"),
    (DCP + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# What pickle raises for a file that is no pickle. (OverflowError and IndexError are subclasses of these.)
MISREAD = (
    *(
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        BufferError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
    ),
    *(SystemError, TypeError, ValueError),
)


class _StandIn:
    """Stands for an instance of a class that the file names.

    It keeps the state in the file, and calls nothing.
    """

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        # New classes for each file, since a pickle can set attributes of the classes that it names.
        self._classes = {name: type(name[1], (_StandIn,), {}) for name in CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in self._classes:
            return self._classes[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint contains")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it names an object outside of the file")


def read_metadata(path: Path, files: Container[str], limit_bytes: int) -> Metadata:
    """Return the metadata of a checkpoint: its tensors, and where their parts are in its files.

    path: its folder. `files`: names of its files. `limit_bytes`: the size of all files, which the tensors
    cannot exceed. Raises CheckpointError if the metadata cannot be read, or names anything but tensors.
    """
    try:
        with open_regular(path / ".metadata") as file:
            root = _MetadataUnpickler(io.BytesIO(file.read())).load()
        entries, places = _fields(root, "state_dict_metadata", "storage_data")
        tensors = {_typed(name, str): _tensor(name, entry) for name, entry in _typed(entries, dict).items()}
        storage = dict(_place(index, place, files) for index, place in _typed(places, dict).items())
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: .metadata cannot be read ({error.strerror})") from error
    except MISREAD as error:
        raise CheckpointError(
            f"{path} is damaged: .metadata cannot be read ({str(error) or type(error).__name__})"
        ) from error
    if (
        sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors.values())
        > limit_bytes
    ):
        raise CheckpointError(
            f"{path} is damaged: .metadata names tensors that are larger than its files, which have "
            f"{limit_bytes} bytes"
        )
    return Metadata(state_dict_metadata=dict(tensors), planner_data={}, storage_data=storage)


def _typed(value: Any, kind: type) -> Any:
    """Return `value`. Raises ValueError if it is not of this type."""
    if type(value) is not kind:
        raise ValueError(f"expected a {kind.__name__}, got a {type(value).__name__}")
    return value


def _fields(record: Any, *names: str) -> list[Any]:
    if not isinstance(record, _StandIn) or not isinstance(record.state, dict):
        raise ValueError(f"expected an object with {' and '.join(names)}, got a {type(record).__name__}")
    return [record.state[name] for name in names]


def _shape(value: Any) -> torch.Size:
    if type(value) is not tuple or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"expected a shape, got a {type(value).__name__}")
    return torch.Size(value)


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    if type(entry).__name__ != "TensorStorageMetadata":
        raise ValueError(f"{name!r} is no tensor, and a checkpoint holds only tensors")
    properties, size, chunks = _fields(entry, "properties", "size", "chunks")
    dtype = _typed(_typed(getattr(properties, "state", None), tuple)[0], torch.dtype)
    parts = [
        ChunkStorageMetadata(*map(_shape, _fields(chunk, "offsets", "sizes")))
        for chunk in _typed(chunks, list)
    ]
    whole = _shape(size)
    for part in parts:
        ends = [offset + extent for offset, extent in zip(part.offsets, part.sizes, strict=True)]
        if any(end > extent for end, extent in zip(ends, whole, strict=True)):
            raise ValueError(f"{name!r} has a part outside of its shape {tuple(whole)}")
    if sum(math.prod(part.sizes) for part in parts) != math.prod(whole):
        raise ValueError(f"the parts of {name!r} do not add up to its shape {tuple(whole)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), whole, parts)


def _place(index: Any, place: Any, files: Container[str]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset = _fields(index, "fqn", "offset")
    file, begin, length = _fields(place, "relative_path", "offset", "length")
    if _typed(file, str) not in files:
        raise ValueError(f"{name!r} is in {file!r}, which is not a file of the checkpoint")
    if _typed(begin, int) < 0 or _typed(length, int) < 0:
        raise ValueError(f"{name!r} is before the beginning of {file!r}")
    return MetadataIndex(_typed(name, str), _shape(offset)), _StorageInfo(file, begin, length)


class _MetadataReader(FileSystemReader):
    """torch's reader, with metadata that are read already."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(
            f"{read_item.dest_index.fqn!r} is no tensor, and a checkpoint holds only tensors"
        )


def read_tensors(
    path: Path,
    metadata: Metadata,
    wanted: dict[str, Any],
    group: torch.distributed.ProcessGroup | None = None,
    is_single: bool = False,
) -> None:
    """Fill the tensors of `wanted` from a checkpoint with these metadata.

    group: the ranks that read; None: all. `is_single`: this process reads without the others. Raises
    CheckpointError if the files are damaged.
    """
    with _read_errors(path), warnings.catch_warnings():
        # One process on purpose.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(
            wanted,
            storage_reader=_MetadataReader(path, metadata),
            planner=_TensorsOnly(),
            process_group=group,
            no_dist=is_single,
        )


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Turn torch's CheckpointException into a CheckpointError."""
    try:
        yield
    except CheckpointException as error:  # rank -> (exception, traceback)
        first = next(iter(error.failures.values()))[0]
        why = f"{type(first).__name__}: {str(first).strip()}".splitlines()[0]
        raise CheckpointError(f"checkpoint {path} cannot be read: {why}") from error
