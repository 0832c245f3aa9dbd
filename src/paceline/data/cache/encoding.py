"""Samples as bytes and back: nested tuples, lists and dicts of tensors, arrays, bytes, text and numbers.

The bytes contain a description in JSON and the values of tensors, so that reading them runs no code.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError

ALIGN = 16  # of the values of a tensor, in bytes
PLAIN = (bool, int, float, str, type(None))
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
}


def encode(sample: Any) -> bytes:
    """Return the bytes of a sample. Raises DataError for other types than those above."""
    values: list[bytes] = []
    text = json.dumps(_describe(sample, values), separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % ALIGN)
    return b"".join([len(text).to_bytes(4, "little"), text, *values])


def decode(content: bytes) -> Any:
    """Return the sample. Its tensors may be changed in place."""
    buffer = bytearray(content)
    begin = 4 + int.from_bytes(content[:4], "little")
    return _SampleReader(buffer, begin).read(json.loads(buffer[4:begin]))


def _describe(value: Any, values: list[bytes]) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return ["v", value]
    if kind is tuple or kind is list:
        return ["tuple" if kind is tuple else "list", [_describe(each, values) for each in value]]
    if kind is dict and all(type(key) in (str, int) for key in value):
        return ["dict", [[key, _describe(each, values)] for key, each in value.items()]]
    if kind is bytes:
        _append(value, values)
        return ["bytes", len(value)]
    if kind is Tensor and _is_plain(value):
        _append(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"", values)
        stride = None if value.is_contiguous() or not _is_dense(value) else list(value.stride())
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), stride]
    if isinstance(value, np.generic) and value.dtype.kind in "biufcmMSU":
        _append(value.tobytes(), values)
        return ["scalar", value.dtype.str]
    if kind is np.ndarray and value.dtype.kind in "biufcmMSU":
        _append(value.tobytes(), values)
        return ["array", value.dtype.str, list(value.shape)]
    raise DataError(
        f"data.cache cannot store a {kind.__module__}.{kind.__name__} of a sample; return tensors, arrays,"
        " bytes, text and numbers in tuples, lists and dicts, or use data.cache=off"
    )


def _is_plain(value: Tensor) -> bool:
    is_cpu = value.device.type == "cpu" and value.layout is torch.strided
    is_known = str(value.dtype).removeprefix("torch.") in DTYPES
    return is_cpu and is_known and not value.requires_grad and not (value.is_conj() or value.is_neg())


def _is_dense(value: Tensor) -> bool:
    """Return whether the values fill the memory without gaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _append(value: bytes, values: list[bytes]) -> None:
    values.append(value + b"\0" * (-len(value) % ALIGN))


class _SampleReader:
    """Reads the values of a sample in the order in which they were written."""

    def __init__(self, buffer: bytearray, begin: int):
        self.buffer, self.at = buffer, begin

    def read(self, node: list[Any]) -> Any:
        kind, *rest = node
        if kind == "v":
            return rest[0]
        if kind == "tuple":
            return tuple(self.read(each) for each in rest[0])
        if kind == "list":
            return [self.read(each) for each in rest[0]]
        if kind == "dict":
            return {key: self.read(each) for key, each in rest[0]}
        if kind == "bytes":
            begin = self._skip(rest[0])
            return bytes(self.buffer[begin : begin + rest[0]])
        return self._read_tensor(*rest) if kind == "tensor" else self._read_array(*rest)

    def _skip(self, size: int) -> int:
        begin = self.at
        self.at += size + -size % ALIGN
        return begin

    def _read_tensor(self, name: str, shape: list[int], stride: list[int] | None) -> Tensor:
        dtype, count = DTYPES[name], int(np.prod(shape, dtype=np.int64))
        if not count:
            return torch.empty(shape, dtype=dtype)
        begin = self._skip(count * dtype.itemsize)
        value = torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=begin).view(shape)
        return value if stride is None else torch.empty_strided(shape, stride, dtype=dtype).copy_(value)

    def _read_array(self, name: str, shape: list[int] | None = None) -> Any:
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64)) if shape is not None else 1
        begin = self._skip(count * dtype.itemsize)
        if not count or not dtype.itemsize:
            return np.empty(shape if shape is not None else (), dtype)
        value = np.frombuffer(self.buffer, dtype, count, begin)
        return value.reshape(shape) if shape is not None else value[0]
