"""Request: which collectives to measure, and how."""

from typing import Annotated

from pydantic import Field

from paceline.bench.collectives.operations import OPERATIONS
from paceline.errors import BenchError
from paceline.spec import Value, nearest
from paceline.units import parse_bytes

DTYPES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}  # bytes
FACTOR = 4  # from size to size
KEYS = ("operation", "backend", "axis", "ranks", "dtype", "place", "bytes")  # of the rows


class CollectiveRequest(Value):
    operations: tuple[str, ...] = tuple(OPERATIONS)
    backends: tuple[str, ...]
    sizes_bytes: tuple[Annotated[int, Field(gt=0)], ...]
    dtypes: tuple[str, ...] = ("fp32",)
    places: tuple[str, ...] = ("out", "in")
    axes: tuple[str, ...] = ()
    plan: str | None = None
    seconds: Annotated[float, Field(gt=0)] = 0.2  # of a row, its warm-up apart
    timeout_s: Annotated[float, Field(gt=0)] = 300.0  # of one call


def names(text: str, known: "tuple[str, ...]", what: str) -> tuple[str, ...]:
    """`"a,b"` -> `("a", "b")`, all of them known. Raises BenchError."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in found:
        if name not in known:
            raise BenchError(f"unknown {what} {name}{nearest(name, known)}")
    if not found:
        raise BenchError(f"no {what} in {text!r}; there is {', '.join(known)}")
    return found


def sizes(text: str) -> tuple[int, ...]:
    """`"1KiB:64MiB"`, each 4 times the one before, `"1KiB:64MiB:2"`, or a list: `"1KiB,1MiB"`. Raises BenchError."""
    hint = "write a range as 1KiB:64MiB or 1KiB:64MiB:2, or sizes as 1KiB,1MiB"
    try:
        if ":" not in text:
            found = [parse_bytes(word) for word in text.split(",")]
        else:
            first, last, *rest = text.split(":")
            factor = int(rest[0]) if len(rest) == 1 else FACTOR
            if len(rest) > 1 or factor < 2:
                raise ValueError(f"a factor of at least 2, got {':'.join(rest)}")
            found = _range(parse_bytes(first), parse_bytes(last), factor)
    except ValueError as error:
        raise BenchError(f"--sizes {text}: {error}; {hint}") from None
    if not found or min(found) <= 0:
        raise BenchError(
            f"--sizes {text}: {'no size is 0' if found else 'the first size is above the last'}; {hint}"
        )
    return tuple(sorted({*found}))


def _range(size: int, last: int, factor: int) -> list[int]:
    found = []
    while 0 < size <= last:
        found.append(size)
        size *= factor
    return found
