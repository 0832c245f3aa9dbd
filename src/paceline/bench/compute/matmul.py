"""Matrix products by number type: what to call, and where a device has it."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[], object]
Shape = tuple[int, int, int]  # (m, n, k): an m × k matrix by a k × n one


@dataclass(frozen=True)
class MatmulKind:
    """`make(shape, device)` prepares a product and returns what runs it; it raises RuntimeError where the device cannot."""

    dtype: str  # as in cluster.json
    make: Callable[[Shape, torch.device], Run]
    bytes: int  # of an element
    bytes_out: int
    missing: Callable[[torch.device], str | None]  # why a device has none of it
    sparse: bool = False  # 2:4

    @property
    def operation(self) -> str:
        return "matmul 2:4" if self.sparse else "matmul"

    def __str__(self) -> str:
        return f"{self.dtype} {self.operation}"

    def moved_bytes(self, shape: Shape) -> int:
        """Bytes that must be read and written at least."""
        m, n, k = shape
        return (m * k + k * n) * self.bytes + m * n * self.bytes_out


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Not zeros, which take a device less power and so are quicker."""
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
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _sparse(dtype: torch.dtype) -> Callable[[Shape, torch.device], Run]:
    def make(shape: Shape, device: torch.device) -> Run:
        from torch.sparse import to_sparse_semi_structured

        m, n, k = shape
        pattern = torch.tensor([True, True, False, False], device=device).tile(m, -(-k // 4))[:, :k]
        with warnings.catch_warnings(action="ignore"):  # it says that it may change
            a = to_sparse_semi_structured(_random(m, k, dtype, device).masked_fill(~pattern, 0))
        b = _random(n, k, dtype, device).t()
        return lambda: torch.mm(a, b)

    return make


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 products may round their inputs to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _arch(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).gcnArchName)


def _anywhere(device: torch.device) -> None:
    return None


def _from(major: int, minor: int, amd: tuple[str, ...] = ()) -> Callable[[torch.device], str | None]:
    """Needs a GPU of this compute capability, or one of these AMD architectures."""

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"a {device.type.upper()} has none" if device.type == "cpu" else f"not on {device.type}"
        if torch.version.hip:
            return None if _arch(device).startswith(amd) else f"{_arch(device)} has none"
        found = torch.cuda.get_device_capability(device)
        return (
            None
            if found >= (major, minor)
            else f"needs compute capability {major}.{minor}, this is {found[0]}.{found[1]}"
        )

    return missing


KINDS = (
    MatmulKind("fp64", _dense(torch.float64), 8, 8, _anywhere),
    MatmulKind("fp32", _dense(torch.float32), 4, 4, _anywhere),
    MatmulKind("tf32", _dense(torch.float32), 4, 4, _from(8, 0, ("gfx94",))),
    MatmulKind("bf16", _dense(torch.bfloat16), 2, 2, _anywhere),
    MatmulKind("fp16", _dense(torch.float16), 2, 2, _anywhere),
    MatmulKind("fp8", _fp8, 1, 2, _from(8, 9, ("gfx94", "gfx95"))),
    MatmulKind("int8", _int8, 1, 4, _anywhere),
    MatmulKind("bf16", _sparse(torch.bfloat16), 2, 2, _from(8, 0), sparse=True),
    MatmulKind("fp16", _sparse(torch.float16), 2, 2, _from(8, 0), sparse=True),
    MatmulKind("int8", _sparse(torch.int8), 1, 1, _from(8, 0), sparse=True),
)
