"""Request: which collectives to measure, and how."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.bench.collectives.operations import OPERATIONS
from paceline.errors import BenchError
from paceline.spec import Value, suggest
from paceline.units import parse_bytes

DTYPES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}  # bytes
DEFAULT_FACTOR = 4  # between successive sizes
KEYS = ("operation", "backend", "axis", "ranks", "dtype", "place", "bytes")  # that identify a row


class CollectiveRequest(Value):
    """Which collectives to measure, and how."""

    operations: tuple[str, ...] = tuple(OPERATIONS)
    backends: tuple[str, ...]
    sizes_bytes: tuple[Annotated[int, Field(gt=0)], ...]
    dtypes: tuple[str, ...] = ("fp32",)
    places: tuple[str, ...] = ("out", "in")
    axes: tuple[str, ...] = ()
    plan: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"  # of the tensors of gloo and mpi; nccl has them on the GPU
    algorithms: tuple[str, ...] = ()  # of nccl, such as "Ring/LL"; empty: nccl chooses
    seconds: Annotated[float, Field(gt=0)] = 0.2  # per row, without its warm-up
    timeout_s: Annotated[float, Field(gt=0)] = 300.0  # per call


def parse_names(text: str, known: "tuple[str, ...]", what: str) -> tuple[str, ...]:
    """Return the names in a list: `"a,b"` -> `("a", "b")`. Raises BenchError if a name is not in `known`."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        if name not in known:
            raise BenchError(f"unknown {what} {name}{suggest(name, known)}")
    if not names:
        raise BenchError(f"no {what} in {text!r}; choose from {', '.join(known)}")
    return names


def parse_rank_counts(text: str) -> tuple[int, ...]:
    """Return numbers of ranks, sorted: `"8,2"` -> `(2, 8)`. Raises BenchError."""
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise BenchError(f"--ranks must be numbers such as 2 or 2,4,8, got {text!r}") from None
    if counts[0] < 2:
        raise BenchError(f"collectives require at least 2 ranks, got {counts[0]}; use --ranks 2 or more")
    return tuple(counts)


# Names by which NCCL_ALGO and NCCL_PROTO know them (NCCL 2.27).
ALGORITHMS = {
    name.lower(): name
    for name in ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
}
PROTOCOLS = {name.lower(): name for name in ("LL", "LL128", "Simple")}


def parse_algorithms(text: str) -> tuple[str, ...]:
    """Return algorithms of nccl: `"ring,tree/ll"` -> `("Ring", "Tree/LL")`. Raises BenchError."""
    chosen = []
    for word in text.split(","):
        algorithm, slash, protocol = word.strip().lower().partition("/")
        for name, known, what in (
            (algorithm, ALGORITHMS, "algorithm"),
            *([(protocol, PROTOCOLS, "protocol")] if slash else []),
        ):
            if name not in known:
                choices = ", ".join(known.values())
                raise BenchError(f"--nccl {text}: unknown {what} {name!r}; choose from {choices}")
        chosen.append(ALGORITHMS[algorithm] + (f"/{PROTOCOLS[protocol]}" if slash else ""))
    return tuple(dict.fromkeys(chosen))


def algorithm_environ(algorithm: str) -> dict[str, str]:
    """Return the environment variables that select an algorithm of nccl."""
    name, slash, protocol = algorithm.partition("/")
    return {"NCCL_ALGO": name} | ({"NCCL_PROTO": protocol} if slash else {})


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes of a range or a list, sorted. Raises BenchError.

    `"1KiB:64MiB"`: each size is 4 times the previous. `"1KiB:64MiB:2"`: 2 times. `"1KiB,1MiB"`: a list.
    """
    hint = "write a range as 1KiB:64MiB or 1KiB:64MiB:2, or sizes as 1KiB,1MiB"
    try:
        if ":" not in text:
            sizes = [parse_bytes(word) for word in text.split(",")]
        else:
            first, last, *rest = text.split(":")
            factor = int(rest[0]) if len(rest) == 1 else DEFAULT_FACTOR
            if len(rest) > 1 or factor < 2:
                raise ValueError(f"the factor must be at least 2, got {':'.join(rest)}")
            begin, end = parse_bytes(first), parse_bytes(last)
            sizes = _range(begin, end, factor) if begin else [begin]
    except ValueError as error:
        raise BenchError(f"--sizes {text}: {error}; {hint}") from None
    if not sizes or min(sizes) <= 0:
        problem = (
            "a size must be at least 1 byte, got 0" if sizes else "the first size is larger than the last"
        )
        raise BenchError(f"--sizes {text}: {problem}; {hint}")
    return tuple(sorted({*sizes}))


def _range(size: int, last: int, factor: int) -> list[int]:
    sizes = []
    while size <= last:
        sizes.append(size)
        size *= factor
    return sizes
