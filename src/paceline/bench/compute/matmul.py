"""Matrix products by number type: how to run each, and which devices support it."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[], object]
Shape = tuple[int, int, int]  # (m, n, k): an m × k matrix by a k × n matrix


@dataclass(frozen=True)
class MatmulKind:
    """A matrix product of one number type.

    make: `make(shape, device)` prepares a product and returns the function that runs it. Raises RuntimeError
    if the device does not support it.
    """

    dtype: str  # as in cluster.json
    make: Callable[[Shape, torch.device], Run]
    bytes: int  # of an input element
    bytes_out: int  # of an output element
    missing: Callable[[torch.device], str | None]  # why a device does not support it, or None
    sparse: bool = False  # 2:4

    @property
    def operation(self) -> str:
        return "matmul 2:4" if self.sparse else "matmul"

    def __str__(self) -> str:
        return f"{self.dtype} {self.operation}"

    def moved_bytes(self, shape: Shape) -> int:
        """Return the bytes that a product must read and write at least."""
        m, n, k = shape
        return (m * k + k * n) * self.bytes + m * n * self.bytes_out


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a random matrix: zeros take less power, and so would be faster."""
    if not dtype.is_floating_point:
        return torch.randint(-8, 8, (rows, columns), dtype=dtype, device=device)
    return torch.randn(rows, columns, device=device).to(dtype)


def _dense(dtype: torch.dtype) -> Callable[[Shape, torch.device], Run]:
    def make(shape: Shape, device: torch.device) -> Run:
        m, n, k = shape
        a, b = _random(m, k, dtype, device), _random(k, n, dtype, device)
        out = torch.empty(m, n, dtype=dtype, device=device)
        return lambda: torch.mm(a, b, out=out)

    return make


def _int8(shape: Shape, device: torch.device) -> Run:
    m, n, k = shape
    a, b = _random(m, k, torch.int8, device), _random(n, k, torch.int8, device).t()
    return lambda: torch._int_mm(a, b)


def _fp8(shape: Shape, device: torch.device) -> Run:
    m, n, k = shape
    kind = (
        torch.float8_e4m3fnuz
        if torch.version.hip and _arch(device).startswith("gfx94")
        else torch.float8_e4m3fn
    )
    a, b = _random(m, k, kind, device), _random(n, k, kind, device).t()
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _sparse(dtype: torch.dtype) -> Callable[[Shape, torch.device], Run]:
    def make(shape: Shape, device: torch.device) -> Run:
        from torch.sparse import to_sparse_semi_structured

        m, n, k = shape
        pattern = torch.tensor([True, True, False, False], device=device).tile(m, -(-k // 4))[:, :k]
        with warnings.catch_warnings(action="ignore"):  # torch warns that the API may change
            a = to_sparse_semi_structured(_random(m, k, dtype, device).masked_fill(~pattern, 0))
        b = _random(n, k, dtype, device).t()
        return lambda: torch.mm(a, b)

    return make


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid float32 products to round their inputs to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _arch(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).gcnArchName)


def _on_any_device(device: torch.device) -> None:
    return None


def _requires(major: int, minor: int, amd: tuple[str, ...] = ()) -> Callable[[torch.device], str | None]:
    """Return the check for a GPU with this compute capability, or with an AMD architecture of `amd`."""

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"not supported on a {device.type.upper()}"
                if device.type == "cpu"
                else f"not on {device.type}"
            )
        if torch.version.hip:
            return None if _arch(device).startswith(amd) else f"not supported on {_arch(device)}"
        capability = torch.cuda.get_device_capability(device)
        if capability >= (major, minor):
            return None
        return f"requires compute capability {major}.{minor}, got {capability[0]}.{capability[1]}"

    return missing


KINDS = (
    MatmulKind("fp64", _dense(torch.float64), 8, 8, _on_any_device),
    MatmulKind("fp32", _dense(torch.float32), 4, 4, _on_any_device),
    MatmulKind("tf32", _dense(torch.float32), 4, 4, _requires(8, 0, ("gfx94",))),
    MatmulKind("bf16", _dense(torch.bfloat16), 2, 2, _on_any_device),
    MatmulKind("fp16", _dense(torch.float16), 2, 2, _on_any_device),
    MatmulKind("fp8", _fp8, 1, 2, _requires(8, 9, ("gfx94", "gfx95"))),
    MatmulKind("int8", _int8, 1, 4, _on_any_device),
    MatmulKind("bf16", _sparse(torch.bfloat16), 2, 2, _requires(8, 0), sparse=True),
    MatmulKind("fp16", _sparse(torch.float16), 2, 2, _requires(8, 0), sparse=True),
    MatmulKind("int8", _sparse(torch.int8), 1, 1, _requires(8, 0), sparse=True),
)
