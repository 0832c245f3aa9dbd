"""Rates of a device: matrix products by number type and shape, memory bandwidth, attention."""

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
from paceline.bench.timer import WALL, Budget, Clock, cuda_event_clock, measure
from paceline.units import format_bytes

KEYS = ("operation", "dtype", "shape", "kernel")
MiB = 2**20
MATMULS = ("matmul", "matmul 2:4")
MIN_REPETITIONS = 3  # and about as many for warm-up
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the products and of attention.

    layer: the products of a transformer layer with `tokens` tokens and width `width` (Kaplan et al., Scaling
    laws, 2020, table 1).
    rows: products of `rows` × `wide` by `wide` × `wide`, from memory-bound to compute-bound.
    attention: (batch, heads, positions, width).
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
        """Return all shapes, sorted by FLOP."""
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


def sizes_for(device: torch.device) -> Sizes:
    return CPU if device.type == "cpu" else GPU


def clock_for(device: torch.device) -> Clock:
    return cuda_event_clock() if device.type == "cuda" else WALL


def measure_matmuls(device: torch.device, budget_s: float, sizes: Sizes) -> Iterator[Row | str]:
    """Yield a row for each product, and strings that report what was left out and why."""
    supported, missing = [], defaultdict[str, list[str]](list)
    for kind in KINDS:
        why = kind.missing(device)
        if why is None:
            supported.append(kind)
        else:
            missing[why].append(str(kind))
    yield from (f"{', '.join(kinds)}: {why}" for why, kinds in missing.items())
    for kind in supported:
        left_out: dict[str, list[str]] = {}
        yield from _measure_kind(kind, device, budget_s / len(supported), sizes, left_out)
        for why, shapes in left_out.items():
            listed = ", ".join(shapes) if len(shapes) < 5 else f"{shapes[0]} and {len(shapes) - 1} more"
            yield f"{kind} of {listed}: {why}"


def _measure_kind(
    kind: MatmulKind, device: torch.device, budget_s: float, sizes: Sizes, left_out: dict[str, list[str]]
) -> Iterator[Row]:
    """Yield a row per shape, from small to large, while the next is expected to fit into the budget.

    left_out: receives the other shapes, by reason.
    """
    shapes = sizes.shapes()
    each_s = budget_s / len(shapes)
    deadline = time.perf_counter() + 2 * budget_s
    best = 0.0
    for shape in shapes:
        flop = 2 * math.prod(shape)
        why = None
        if (best and flop / best * (2 * MIN_REPETITIONS + 1) > 4 * each_s) or time.perf_counter() > deadline:
            why = "too slow for the time budget"
        elif kind.moved_bytes(shape) > _free_bytes(device) // 4:
            why = "too large for the memory"
        else:
            try:
                with tf32(kind.dtype == "tf32"), torch.no_grad():
                    timing = measure(
                        kind.make(shape, device),
                        Budget(each_s * 0.7, each_s * 0.2, min_count=MIN_REPETITIONS, max_count=2000),
                        clock_for(device),
                    )
            except RuntimeError as error:  # the device, or torch, does not support this product
                why = first_line(error)
        if why is not None:
            left_out.setdefault(why, []).append(format_shape(shape))
            continue
        best = max(best, flop / timing.min_s)
        figures = {"flop": flop, "bytes": kind.moved_bytes(shape), "flops": flop / timing.median_s}
        yield _row(kind.operation, kind.dtype, shape) | figures | timing.fields()


def add_peak_share(rows: Iterator[Any], device: torch.device) -> Iterator[Row | str]:
    """Add to each row its share of the published peak, if a peak is published."""
    dense, sparse = _published_peaks(device)
    for row in rows:
        if isinstance(row, str):
            yield row
            continue
        peak = (sparse if row["operation"] == "matmul 2:4" else dense).get(str(row["dtype"]))
        yield {**row, "peak_share": row["flops"] / peak} if peak else row


def _published_peaks(device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Return the published peaks of dense products and of 2:4 sparse products by type, in FLOP/s."""
    if device.type != "cuda":
        return {}, {}
    from paceline.cluster.published import find_published_name, sheets

    name = find_published_name(torch.cuda.get_device_name(device))
    if name is None:
        return {}, {}
    published = sheets()[name].device()
    dense, sparse = (
        {str(dtype): peak.value for dtype, peak in peaks.items()}
        for peaks in (published.peaks_flops, published.sparse_flops)
    )
    return dense, sparse


def summarize(rows: Sequence[Row], layer: Sequence[str]) -> list[Row]:
    """Return, for each type of product, the best rate and the typical rate.

    layer: shapes of the products of a transformer layer; their joint rate is the typical rate.
    """
    by_type: dict[tuple[Any, Any], list[Any]] = {}
    for row in rows:
        if row["operation"] in MATMULS:
            by_type.setdefault((row["operation"], row["dtype"]), []).append(row)
    return [_summarize_type(rows_of_type, layer) for rows_of_type in by_type.values()]


def _summarize_type(rows: Sequence[Any], layer: Sequence[str]) -> Row:
    best = max(rows, key=lambda row: row["flops"])
    in_layer = [row for row in rows if row["shape"] in layer]
    summary = {name: best.get(name) for name in ("operation", "dtype", "shape", "flops", "peak_share")}
    if {row["shape"] for row in in_layer} != set(layer):
        return summary | {"typical_flops": None}
    return summary | {
        "typical_flops": sum(row["flop"] for row in in_layer) / sum(row["median_s"] for row in in_layer)
    }


def measure_memory(device: torch.device, budget_s: float) -> Iterator[Row | str]:
    """Measure STREAM's copy and triad on arrays that are too large for a cache.

    Source: McCalpin, Memory bandwidth and machine balance, 1995.
    """
    wanted, size = _array_bytes(device, budget_s)
    if size < wanted:
        yield (
            f"memory: arrays of {format_bytes(size)}, partly in a cache; "
            f"no time or space for {format_bytes(wanted)} each"
        )
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    runs: dict[str, tuple[Run, int]] = {
        "copy": (lambda: a.copy_(b), 2),
        "triad": (lambda: torch.add(b, c, alpha=3.0, out=a), 3),
    }
    for name, (run, arrays) in runs.items():
        budget = Budget(budget_s * 0.4, budget_s * 0.05, min_count=MIN_REPETITIONS)
        timing = measure(run, budget, clock_for(device))
        yield (
            _row(name, "fp32", (size // 4,))
            | {"bytes": arrays * size, "Bps": arrays * size / timing.median_s}
            | timing.fields()
        )


def _array_bytes(device: torch.device, budget_s: float) -> tuple[int, int]:
    """Return the wanted and the affordable bytes of one of three arrays.

    Together they should be four times the last-level cache. Memory and time (at 0.5 GB/s) limit them.
    """
    cache = (
        torch.cuda.get_device_properties(device).L2_cache_size
        if device.type == "cuda"
        else _last_cache_bytes()
    )
    wanted = max(2**28, 4 * cache // 3) // MiB * MiB
    return wanted, max(MiB, int(min(wanted, _free_bytes(device) // 12, budget_s * 5e8)) // MiB * MiB)


def _last_cache_bytes() -> int:
    """Return the bytes of a CPU's last-level cache, or 0 if the system does not report it."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = path.read_text().strip()
        largest = max(
            largest,
            int(number[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(number[-1], 1)
            if number[:-1].isdigit()
            else 0,
        )
    return largest


def measure_attention(device: torch.device, budget_s: float, sizes: Sizes) -> Iterator[Row | str]:
    """Measure causal scaled_dot_product_attention, forward and backward, with each available kernel.

    FLOP as FlashAttention's authors count them: 4·b·h·s²·d forward, half of it with a causal mask, and 2.5
    times as many backward (Dao, FlashAttention-2, 2023, section 4.1).
    """
    deadline = time.perf_counter() + 2 * budget_s
    wanted = [
        (dtype, shape, kernel)
        for dtype in ATTENTION_DTYPES
        for shape in sizes.attention
        for kernel in KERNELS
    ]
    for dtype, shape, kernel in wanted:
        if kernel == "math" and shape is not sizes.attention[0]:
            continue  # it stores positions × positions
        if time.perf_counter() > deadline:
            yield (
                f"{dtype} attention {format_shape(shape)} and later rows are left out: "
                "the time budget is used up; other programs may be running"
            )
            return
        try:
            with sdpa_kernel(KERNELS[kernel]):
                for row in _measure_attention_shape(dtype, shape, device, budget_s / len(wanted) / 2):
                    yield row | {"kernel": kernel}
        except RuntimeError as error:
            if device.type == "cuda":  # on other devices these kernels are not expected
                yield f"{dtype} attention {format_shape(shape)}, {kernel}: {first_line(error)}"


def _measure_attention_shape(
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
        budget = Budget(budget_s * 0.7, budget_s * 0.2, min_count=MIN_REPETITIONS)
        timing = measure(run, budget, clock_for(device))
        yield _row(name, dtype, shape) | {"flop": count, "flops": count / timing.median_s} | timing.fields()


ATTENTION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _row(operation: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"operation": operation, "dtype": dtype, "shape": format_shape(shape)}


def format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
