"""Files of weights in safetensors format: one file, or several files that an index lists."""

import json
import os
import weakref
from pathlib import Path

from paceline.errors import TaskError

HEADER_SIZE_BYTES = 8  # of the number at the begin of a file
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_weight_files(path: Path) -> list[tuple[Path, set[str] | None]]:
    """Return each file with the names of the tensors to read from it; None: all.

    path: a safetensors file, an index, or a folder with either. Raises TaskError.
    """
    if path.is_dir():
        candidates = [file for file in (path / INDEX, path / SINGLE) if file.is_file()]
        if not candidates:
            raise TaskError(
                f"the folder {path} has neither {INDEX} nor {SINGLE}; name a safetensors file in pretrained()"
            )
        path = candidates[0]
    if path.suffix != ".json":
        return [(path, None)]
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        by_file: dict[str, set[str]] = {}
        for key, file in weight_map.items():
            by_file.setdefault(file, set()).add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TaskError(
            f"cannot read the index of pretrained weights {path}: {error}; "
            "it needs a weight_map of names to files"
        ) from error
    if outside := [
        file
        for file in by_file
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file
    ]:
        raise TaskError(
            f"the index {path} names the file {outside[0]!r}; the files must be in the folder of the index"
        )
    if missing := sorted(file for file in by_file if not (path.parent / file).exists()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise TaskError(
            f"{path.parent} lacks {missing[0]}{more} of the {len(by_file)} files that {path.name} lists; "
            "download the weights again"
        )
    return [(path.parent / file, keys) for file, keys in sorted(by_file.items())]


class TensorBytes:
    """The bytes of the tensors of a safetensors file, which are read without mapping the file.

    A mapped page counts as memory of the process that reads it, and is mapped one by one.

    path: a file that safetensors has opened, so that its header is right.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        size = int.from_bytes(os.pread(self._descriptor, HEADER_SIZE_BYTES, 0), "little")
        self._header = json.loads(os.pread(self._descriptor, size, HEADER_SIZE_BYTES))
        self._begin = HEADER_SIZE_BYTES + size

    def dtype(self, name: str) -> str:
        """Return the name of a dtype in the format, such as BF16."""
        return str(self._header[name]["dtype"])

    def read_into(self, memory: memoryview, name: str, offset: int) -> None:
        """Fill `memory` with bytes of a tensor, from `offset` on. Raises TaskError."""
        begin = self._begin + int(self._header[name]["data_offsets"][0]) + offset
        filled = 0
        while filled < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[filled:]], begin + filled)
            except OSError as error:
                raise TaskError(
                    f"cannot read the pretrained weights {self.path}: {error.strerror}"
                ) from error
            if not count:
                raise TaskError(f"{self.path} ends within {name}; download the weights again")
            filled += count
