"""Tokens: windows of a memory-mapped file of tokens, and the documents in it."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.data.token_files import DOCUMENTS, DTYPES, FORMAT, META, TOKENS
from paceline.errors import DataError
from paceline.files import open_regular, reason


class TokenFile:
    """Tokens in a file that is mapped into memory: opening it takes the same time for any length.

    path: the folder that `paceline pack --tokenizer` wrote, or a file of little-endian integers.
    dtype: of such a file: uint8, uint16 or uint32.

    tokens      all of them, in the integer type of the file
    ends        the position after each document, uint64; None: the file does not say
    vocabulary  number of different tokens that the tokenizer has; None: unknown

    Raises DataError for files that cannot be read, or have another size than the folder says.
    """

    def __init__(self, path: str | Path, dtype: str | None = None):
        self.path, self.dtype = Path(path), dtype
        self.ends: npt.NDArray[np.uint64] | None = None
        self.vocabulary: int | None = None
        if self.path.is_dir():
            if dtype is not None:
                raise DataError(f"{path} is a folder, which knows its dtype; leave out dtype={dtype!r}")
            meta = _read_meta(self.path)
            self.vocabulary = int(meta["vocabulary"])
            self.tokens = _map(self.path / TOKENS, DTYPES[meta["dtype"]])
            self.ends = _map(self.path / DOCUMENTS, "<u8")
            for found, key, file in ((self.tokens, "tokens", TOKENS), (self.ends, "documents", DOCUMENTS)):
                if len(found) != meta[key]:
                    raise DataError(
                        f"{self.path / file} has {len(found):,} {key}, but {meta[key]:,} in"
                        f" {self.path / META}; copy or pack it again"
                    )
        elif dtype not in DTYPES:
            raise DataError(f"dtype of {path} must be {', '.join(DTYPES)}, got {dtype!r}; specify dtype=")
        else:
            self.tokens = _map(self.path, DTYPES[dtype])

    def __getstate__(self) -> dict[str, Any]:  # for spawned processes: not the tokens
        return {"path": self.path, "dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TokenFile.__init__(self, **state)

    def read(self, begin: int, end: int) -> Tensor:
        """Return tokens as int64."""
        return torch.from_numpy(self.tokens[begin:end].astype(np.int64))


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta: dict[str, Any] = json.loads(path.read_bytes())
        if meta["format"] != FORMAT or meta["dtype"] not in DTYPES:
            raise ValueError
        if min(int(meta[key]) for key in ("tokens", "documents", "vocabulary")) < 0:
            raise ValueError
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {reason(error)}; specify a folder that paceline pack --tokenizer wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not describe tokens, or is damaged; pack the corpus again") from error
    return meta


def _map(path: Path, dtype: str) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    try:
        with open_regular(path) as file:
            if not (length := file.seek(0, 2)):
                return np.empty(0, dtype=dtype)
            if length % size:
                raise DataError(f"{path} has {length:,} bytes, no multiple of {size}; specify another dtype")
            # a plain view: indexing a numpy.memmap takes several times as long
            return np.asarray(np.memmap(file, dtype=dtype, mode="r"))
    except OSError as error:
        raise DataError(f"cannot read the tokens {path}: {reason(error)}") from error


class Tokens:
    """Windows of tokens for next-token prediction: pairs (inputs, targets), int64 of shape (context,).

        class Language(paceline.Task):
            def dataset(self, split):
                return Tokens("tokens/", context=512, part=(0, 0.95) if split == "train" else (0.95, 1))

    The windows do not overlap; the targets are shifted by one token. They are read from a file that is mapped
    into memory, so opening it takes the same time and memory for any length.

    path: the folder that `paceline pack --tokenizer` wrote, or a file of little-endian integers.
    part: begin and end of the tokens to use, as shares of the file.
    dtype: of a file: uint8, uint16 or uint32.

    `vocabulary` is the number of tokens of the tokenizer; None: unknown. Raises DataError.
    """

    def __init__(
        self,
        path: str | Path,
        context: int,
        part: tuple[float, float] = (0.0, 1.0),
        dtype: str | None = None,
    ):
        if context < 1:
            raise DataError(f"context must be at least 1 token, got {context}")
        if not 0 <= part[0] < part[1] <= 1:
            raise DataError(f"part must be shares such as (0, 0.95), got {part}")
        self.file, self.context = TokenFile(path, dtype), context
        count = len(self.file.tokens)
        self._begin, self._end = (round(share * count) for share in part)
        if not len(self):
            raise DataError(
                f"{path} has {self._end - self._begin:,} tokens in {part}, but a sample needs context + 1 ="
                f" {context + 1}; use a smaller context"
            )

    @property
    def vocabulary(self) -> int | None:
        return self.file.vocabulary

    def __len__(self) -> int:
        return max(0, (self._end - self._begin - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = self._find(index)
        window = self.file.read(begin, begin + self.context + 1)
        return window[:-1], window[1:]

    def _find(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._begin + index * self.context

    def read_raw(self, index: int) -> bytes:
        """Return the tokens of a window in the integer type of the file."""
        begin = self._find(index)
        return self.file.tokens[begin : begin + self.context + 1].tobytes()

    def decode_raw(self, index: int, content: bytes) -> tuple[Tensor, Tensor]:
        """Return the sample with these tokens."""
        window = torch.from_numpy(np.frombuffer(content, self.file.tokens.dtype).astype(np.int64))
        return window[:-1], window[1:]

    def fingerprint(self) -> str:
        """Return what identifies the tokens of all windows."""
        path = self.file.path / TOKENS if self.file.path.is_dir() else self.file.path
        status = os.stat(path)
        stamp = (str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns)
        return repr((stamp, str(self.file.tokens.dtype), self._begin, self._end, self.context))


class TokenDocuments:
    """The documents of a folder of tokens, int64 of shape (length,), as a map-style dataset.

    path: the folder that `paceline pack --tokenizer` wrote. `lengths` has the number of tokens of each
    document. Raises DataError.
    """

    def __init__(self, path: str | Path):
        self.file = TokenFile(path)
        if self.file.ends is None:
            raise DataError(f"{path} is a file, which has no documents; specify a folder of tokens")

    @property
    def vocabulary(self) -> int | None:
        return self.file.vocabulary

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of each document, int64 of shape (documents,)."""
        assert self.file.ends is not None
        ends = self.file.ends.astype(np.int64)
        return ends - np.concatenate([np.zeros(1, np.int64), ends[:-1]])

    def __len__(self) -> int:
        assert self.file.ends is not None
        return len(self.file.ends)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ends = self.file.ends
        assert ends is not None
        return self.file.read(int(ends[index - 1]) if index else 0, int(ends[index]))
