"""α–β: what a call costs at the least, and how much more each byte costs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.bench.collectives.operations import OPERATIONS
from paceline.bench.result import Row, Value
from paceline.cluster.facts import Fact, Link

LIKE = ("operation", "backend", "axis", "ranks", "dtype", "place")  # what the rows of one fit have in common


@dataclass(frozen=True)
class Fit:
    """time = alpha_s + factor · S / beta_Bps, with S and factor as in busbw: beta is the busbw that large calls come near to.

    Least squares of the *relative* differences, Σ ((α + factor·S/β - t) / t)², so that a call of microseconds counts as much as one of
    seconds. Errors are one standard deviation, from the differences that remain; None where there are but two sizes, and for an α that
    would come out below 0, and is 0.
    misfit: root of the mean square of the relative differences: how far such a line is from the truth.
    """

    alpha_s: float
    alpha_error_s: float | None
    beta_Bps: float | None  # None: the time does not grow with the size
    beta_error_Bps: float | None
    misfit: float
    sizes: int


def least(terms: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[int]]:
    """What makes the sums of the terms, (measurements, unknowns), come nearest to 1, none of it below 0; and the unknowns that are not
    0 for that."""
    scale = np.linalg.norm(terms, axis=0)
    unknown = [at for at in range(terms.shape[1]) if scale[at] > 0]
    found = np.zeros(terms.shape[1])
    while unknown:
        part = (
            np.linalg.lstsq(terms[:, unknown] / scale[unknown], np.ones(len(terms)), rcond=None)[0]
            / scale[unknown]
        )
        if (part >= 0).all():
            found[unknown] = part
            break
        unknown = [at for at, value in zip(unknown, part, strict=True) if value >= 0]
    return found, unknown


def fit(carried_bytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """carried_bytes: factor · S of each call."""
    x, t = np.asarray(carried_bytes, float), np.asarray(seconds, float)
    terms = np.stack([1 / t, x / t], axis=1)  # of α and 1/β
    scale = np.linalg.norm(terms, axis=0)
    found, unknown = least(terms)
    misfits = terms @ found - 1
    errors = _errors(terms, misfits, unknown, scale)
    alpha, slope = float(found[0]), float(found[1])
    return Fit(
        alpha_s=alpha,
        alpha_error_s=errors[0],
        beta_Bps=1 / slope if slope > 0 else None,
        beta_error_Bps=errors[1] / slope**2 if slope > 0 and errors[1] is not None else None,
        misfit=float(np.sqrt(np.mean(misfits**2))),
        sizes=len(t),
    )


def _errors(
    terms: "np.ndarray", misfits: "np.ndarray", unknown: list[int], scale: "np.ndarray"
) -> list[float | None]:
    free = len(misfits) - len(unknown)
    if free <= 0:
        return [None, None]
    scaled = terms[:, unknown] / scale[unknown]
    variances = np.diag(np.linalg.pinv(scaled.T @ scaled)) * (misfits @ misfits) / free
    errors: list[float | None] = [None, None]
    for at, variance in zip(unknown, variances, strict=True):
        errors[at] = math.sqrt(variance) / float(scale[at])
    return errors


def fits(rows: Iterable[Row]) -> tuple[dict[str, Value], ...]:
    """One for each operation, back end, axis, type and place that was measured at two sizes or more."""
    found = []
    for like, group in _alike(rows):
        sizes = {row["bytes"]: row for row in group}
        if len(sizes) < 2:
            continue
        operation = OPERATIONS[str(like["operation"])]
        factor = operation.factor(_int(like["ranks"]))
        one = fit(
            [factor * _int(size) for size in sizes], [_float(row["median_s"]) for row in sizes.values()]
        )
        found.append({**like, "spans": group[0].get("spans"), **asdict(one)})
    return tuple(found)


def _alike(rows: Iterable[Row]) -> list[tuple[dict[str, Value], list[Row]]]:
    def key(row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(name)) for name in LIKE)

    order: dict[tuple[str, ...], int] = {}
    rows = [row for row in rows if row.get("bytes")]
    for row in rows:
        order.setdefault(key(row), len(order))
    groups = [[*group] for _, group in groupby(sorted(rows, key=lambda row: order[key(row)]), key)]
    return [({name: group[0].get(name) for name in LIKE}, group) for group in groups]


def links(summary: Iterable[Row]) -> tuple[Link, ...]:
    """What a Cluster says of its links, from the fits of a result: of all types and places of a collective the quickest at large sizes.

    An axis whose groups lie on several nodes with several ranks each is neither inside of nodes nor across them, and left out.
    """
    best: dict[tuple[Value, ...], Row] = {}
    for row in summary:
        if row.get("spans") not in ("node", "across") or not row.get("beta_Bps"):
            continue
        key = tuple(row[name] for name in ("spans", "backend", "operation", "ranks"))
        if key not in best or _float(row["beta_Bps"]) > _float(best[key]["beta_Bps"]):
            best[key] = row
    return tuple(_link(row) for row in best.values())


def _link(row: Row) -> Link:
    note = f"bench collectives, {row['dtype']}, {row['place']} of place, {row['sizes']} sizes, misfit {_float(row['misfit']):.0%}"
    name = "send" if row["operation"] == "send-recv" else row["operation"]
    return Link.model_validate(
        {
            "axis": row["spans"],
            "backend": row["backend"],
            "collective": name,
            "ranks": row["ranks"],
            "alpha_s": _fact(row, "alpha_s", "alpha_error_s", note),
            "beta_Bps": _fact(row, "beta_Bps", "beta_error_Bps", note),
        }
    )


def _fact(row: Row, name: str, error: str, note: str) -> Fact:
    value, wrong = _float(row[name]), row.get(error)
    spread = _float(wrong) / value if wrong is not None and value else None
    return Fact(value=value, source="measured", spread=spread, note=note)


def _float(value: Value) -> float:
    assert isinstance(value, (int, float))
    return float(value)


def _int(value: Value) -> int:
    assert isinstance(value, int)
    return value
