"""How fast a device computes: matrix products by number type and shape, its memory, attention."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.bench.compute.matmul import KINDS, MatmulKind, Run, Shape, tf32
from paceline.bench.result import Row
from paceline.bench.timer import WALL, Budget, Clock, cuda_events, measure
from paceline.units import format_bytes

KEYS = ("operation", "dtype", "shape", "kernel")
MiB = 2**20
PRODUCTS = ("matmul", "matmul 2:4")
LEAST = 3  # repetitions, and about as many to warm up
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Sizes:
    """What is computed. `layer`: the products of a transformer's layer of so many tokens and so much width (Kaplan et al., Scaling laws,
    2020, table 1). `rows` by a matrix of `wide` × `wide`: from memory-bound to compute-bound. Attention: (batch, heads, positions, width).
    """

    squares: tuple[int, ...]
    tokens: int
    width: int
    rows: tuple[int, ...]
    wide: int
    attention: tuple[tuple[int, int, int, int], ...]

    @property
    def layer(self) -> tuple[Shape, ...]:
        tokens, width = self.tokens, self.width
        return (
            (tokens, 3 * width, width),
            (tokens, width, width),
            (tokens, 4 * width, width),
            (tokens, width, 4 * width),
        )

    def shapes(self) -> tuple[Shape, ...]:
        """By their FLOPs."""
        rows = tuple((m, self.wide, self.wide) for m in self.rows)
        return tuple(
            sorted({*((size, size, size) for size in self.squares), *self.layer, *rows}, key=math.prod)
        )


CPU = Sizes(
    (256, 512, 1024, 2048, 4096), 2048, 1024, (1, 4, 16, 64, 256), 4096, ((1, 8, 1024, 64), (1, 8, 4096, 64))
)
GPU = Sizes(
    (512, 1024, 2048, 4096, 8192, 16384),
    8192,
    4096,
    (1, 16, 32, 64, 128, 256, 512),
    8192,
    ((4, 16, 2048, 128), (1, 16, 16384, 128)),
)


def sizes(device: torch.device) -> Sizes:
    return CPU if device.type == "cpu" else GPU


def clock(device: torch.device) -> Clock:
    return cuda_events() if device.type == "cuda" else WALL


def products(device: torch.device, budget_s: float, of: Sizes) -> Iterator[Row | str]:
    """A row for each product; a string says what was left out, and why."""
    there, missing = [], defaultdict[str, list[str]](list)
    for kind in KINDS:
        why = kind.missing(device)
        if why is None:
            there.append(kind)
        else:
            missing[why].append(str(kind))
    yield from (f"{', '.join(kinds)}: {why}" for why, kinds in missing.items())
    for kind in there:
        left_out: dict[str, list[str]] = {}
        yield from _of_kind(kind, device, budget_s / len(there), of, left_out)
        for why, shapes in left_out.items():
            yield f"{kind} of {', '.join(shapes) if len(shapes) < 5 else f'{shapes[0]} and {len(shapes) - 1} more'}: {why}"


def _of_kind(
    kind: MatmulKind, device: torch.device, budget_s: float, of: Sizes, left_out: dict[str, list[str]]
) -> Iterator[Row]:
    """Shapes from small to large, as long as those before say that the next one fits into the time. `left_out`: by reason."""
    shapes = of.shapes()
    each_s = budget_s / len(shapes)
    deadline = time.perf_counter() + 2 * budget_s
    best = 0.0
    for shape in shapes:
        flop = 2 * math.prod(shape)
        why = None
        if (best and flop / best * (2 * LEAST + 1) > 4 * each_s) or time.perf_counter() > deadline:
            why = "they would take too long"
        elif kind.moved_bytes(shape) > _free_bytes(device) // 4:
            why = "too large for the memory"
        else:
            try:
                with tf32(kind.dtype == "tf32"), torch.no_grad():
                    found = measure(
                        kind.make(shape, device),
                        Budget(each_s * 0.7, each_s * 0.2, least=LEAST, most=2000),
                        clock(device),
                    )
            except RuntimeError as error:  # the device, or torch, has no such product
                why = first_line(error)
        if why is not None:
            left_out.setdefault(why, []).append(text(shape))
            continue
        best = max(best, flop / found.min_s)
        figures = {"flop": flop, "bytes": kind.moved_bytes(shape), "flops": flop / found.median_s}
        yield _row(kind.operation, kind.dtype, shape) | figures | found.fields()


def with_peaks(found: Iterator[Any], device: torch.device) -> Iterator[Row | str]:
    """Each row with its share of the published peak; none where there is no such peak."""
    dense, sparse = _peaks(device)
    for row in found:
        if isinstance(row, str):
            yield row
            continue
        peak = (sparse if row["operation"] == "matmul 2:4" else dense).get(str(row["dtype"]))
        yield {**row, "peak_share": row["flops"] / peak} if peak else row


def _peaks(device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Published, of dense products and of 2:4 sparse ones, in FLOP/s."""
    if device.type != "cuda":
        return {}, {}
    from paceline.cluster.published import published_as, sheets

    name = published_as(torch.cuda.get_device_name(device))
    if name is None:
        return {}, {}
    of = sheets()[name].device()
    dense, sparse = (
        {str(dtype): peak.value for dtype, peak in peaks.items()}
        for peaks in (of.peaks_flops, of.sparse_flops)
    )
    return dense, sparse


def summary(rows: Sequence[Row], layer: Sequence[str]) -> list[Row]:
    """For each type of product the best one, and how fast those of a layer are done together, which is the typical one."""
    found: dict[tuple[Any, Any], list[Any]] = {}
    for row in rows:
        if row["operation"] in PRODUCTS:
            found.setdefault((row["operation"], row["dtype"]), []).append(row)
    return [_best(of_kind, layer) for of_kind in found.values()]


def _best(rows: Sequence[Any], layer: Sequence[str]) -> Row:
    best = max(rows, key=lambda row: row["flops"])
    of_layer = [row for row in rows if row["shape"] in layer]
    told = {name: best.get(name) for name in ("operation", "dtype", "shape", "flops", "peak_share")}
    if {row["shape"] for row in of_layer} != set(layer):
        return told | {"typical_flops": None}
    return told | {
        "typical_flops": sum(row["flop"] for row in of_layer) / sum(row["median_s"] for row in of_layer)
    }


def memory(device: torch.device, budget_s: float) -> Iterator[Row | str]:
    """STREAM's copy and triad (McCalpin, Memory bandwidth and machine balance, 1995), on arrays that are too large for a cache."""
    wanted, size = _array_bytes(device, budget_s)
    if size < wanted:
        yield f"memory: arrays of {format_bytes(size)}, partly in a cache, since there is no time or room for {format_bytes(wanted)} each"
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    runs: dict[str, tuple[Run, int]] = {
        "copy": (lambda: a.copy_(b), 2),
        "triad": (lambda: torch.add(b, c, alpha=3.0, out=a), 3),
    }
    for name, (run, arrays) in runs.items():
        found = measure(run, Budget(budget_s * 0.4, budget_s * 0.05, least=LEAST), clock(device))
        yield (
            _row(name, "fp32", (size // 4,))
            | {"bytes": arrays * size, "Bps": arrays * size / found.median_s}
            | found.fields()
        )


def _array_bytes(device: torch.device, budget_s: float) -> tuple[int, int]:
    """Three arrays are to be four times the last cache; what there is room for, and time for at a few GB/s."""
    cache = (
        torch.cuda.get_device_properties(device).L2_cache_size
        if device.type == "cuda"
        else _last_cache_bytes()
    )
    wanted = max(2**28, 4 * cache // 3) // MiB * MiB
    return wanted, max(MiB, int(min(wanted, _free_bytes(device) // 12, budget_s * 5e8)) // MiB * MiB)


def _last_cache_bytes() -> int:
    """Of a CPU; 0 where the system does not say."""
    found = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = path.read_text().strip()
        found = max(
            found,
            int(number[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(number[-1], 1)
            if number[:-1].isdigit()
            else 0,
        )
    return found


def attention(device: torch.device, budget_s: float, of: Sizes) -> Iterator[Row | str]:
    """Causal scaled_dot_product_attention, forward and backward, by each kernel there is. FLOPs as FlashAttention's authors count them:
    4·b·h·s²·d forward, of which a causal mask leaves half, and 2.5 times as many backward (Dao, FlashAttention-2, 2023, section 4.1)."""
    deadline = time.perf_counter() + 2 * budget_s
    wanted = [
        (dtype, shape, kernel) for dtype in ATTENTION_DTYPES for shape in of.attention for kernel in KERNELS
    ]
    for dtype, shape, kernel in wanted:
        if kernel == "math" and shape is not of.attention[0]:
            continue  # it holds positions × positions, which nobody wants
        if time.perf_counter() > deadline:
            yield f"{dtype} attention {text(shape)} and what comes after it: no time is left, other programs may be running"
            return
        try:
            with sdpa_kernel(KERNELS[kernel]):
                for row in _attention(dtype, shape, device, budget_s / len(wanted) / 2):
                    yield row | {"kernel": kernel}
        except RuntimeError as error:
            if device.type == "cuda":  # elsewhere nobody expects them
                yield f"{dtype} attention {text(shape)}, {kernel}: {first_line(error)}"


def _attention(
    dtype: str, shape: tuple[int, int, int, int], device: torch.device, budget_s: float
) -> Iterator[dict[str, Any]]:
    batch, heads, positions, width = shape
    query, key, value = (
        torch.randn(shape, dtype=ATTENTION_DTYPES[dtype], device=device, requires_grad=True) for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    flop = 2 * batch * heads * positions**2 * width
    for name, run, count in (("attention", forward, flop), ("attention backward", backward, flop * 5 // 2)):
        found = measure(run, Budget(budget_s * 0.7, budget_s * 0.2, least=LEAST), clock(device))
        yield _row(name, dtype, shape) | {"flop": count, "flops": count / found.median_s} | found.fields()


ATTENTION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _row(operation: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"operation": operation, "dtype": dtype, "shape": text(shape)}


def text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
