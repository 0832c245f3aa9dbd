"""The α–β model of a collective: the time α of an empty call, and the rate β in bytes per second."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.bench.collectives.operations import ALL_OPERATIONS, REDUCTIONS
from paceline.bench.result import Row, Value
from paceline.cluster.facts import Fact, Link

# Equal in the rows of one fit; only rows of a sweep have an algorithm.
FIT_KEYS = ("operation", "backend", "axis", "ranks", "dtype", "place", "algorithm")


@dataclass(frozen=True)
class Fit:
    """time = alpha_s + factor · S / beta_Bps, with S and factor as in busbw.

    Thus beta is the busbw that large calls approach.

    The fit minimizes the squared *relative* residuals, Σ ((α + factor·S/β - t) / t)², so that a call of
    microseconds counts as much as a call of seconds. Errors are one standard deviation, estimated from the
    residuals. An error is None if there are only two sizes, and for an α that is clamped to 0.

    misfit: root mean square of the relative residuals; how far the line is from the measurements.
    """

    alpha_s: float
    alpha_error_s: float | None
    beta_Bps: float | None  # None: the time does not grow with the size
    beta_error_Bps: float | None
    misfit: float
    sizes: int


def nonnegative_least_squares(terms: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[int]]:
    """Return the coefficients ≥ 0 with which the sum of the terms is nearest to 1.

    terms: (measurements, unknowns). Also returns the indices of coefficients that are not clamped to 0.
    """
    scale = np.linalg.norm(terms, axis=0)
    free = [index for index in range(terms.shape[1]) if scale[index] > 0]
    coefficients = np.zeros(terms.shape[1])
    while free:
        part = np.linalg.lstsq(terms[:, free] / scale[free], np.ones(len(terms)), rcond=None)[0] / scale[free]
        if (part >= 0).all():
            coefficients[free] = part
            break
        free = [index for index, value in zip(free, part, strict=True) if value >= 0]
    return coefficients, free


def fit(carried_bytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit α and β to measured calls. `carried_bytes`: factor · S of each call."""
    x, t = np.asarray(carried_bytes, float), np.asarray(seconds, float)
    terms = np.stack([1 / t, x / t], axis=1)  # of α and 1/β
    scale = np.linalg.norm(terms, axis=0)
    coefficients, free = nonnegative_least_squares(terms)
    residuals = terms @ coefficients - 1
    errors = _standard_errors(terms, residuals, free, scale)
    alpha, slope = float(coefficients[0]), float(coefficients[1])
    return Fit(
        alpha_s=alpha,
        alpha_error_s=errors[0],
        beta_Bps=1 / slope if slope > 0 else None,
        beta_error_Bps=errors[1] / slope**2 if slope > 0 and errors[1] is not None else None,
        misfit=float(np.sqrt(np.mean(residuals**2))),
        sizes=len(t),
    )


def _standard_errors(
    terms: "np.ndarray", residuals: "np.ndarray", free: list[int], scale: "np.ndarray"
) -> list[float | None]:
    degrees_of_freedom = len(residuals) - len(free)
    if degrees_of_freedom <= 0:
        return [None, None]
    scaled = terms[:, free] / scale[free]
    variances = np.diag(np.linalg.pinv(scaled.T @ scaled)) * (residuals @ residuals) / degrees_of_freedom
    errors: list[float | None] = [None, None]
    for index, variance in zip(free, variances, strict=True):
        errors[index] = math.sqrt(variance) / float(scale[index])
    return errors


def fit_rows(rows: Iterable[Row]) -> tuple[dict[str, Value], ...]:
    """Return a fit for each operation, back end, axis, type and place with at least two sizes."""
    fits = []
    for common, group in _group_rows(rows):
        sizes = {row["bytes"]: row for row in group}
        if len(sizes) < 2:
            continue
        operation = ALL_OPERATIONS[str(common["operation"])]
        factor = operation.factor(_int(common["ranks"]))
        line = fit(
            [factor * _int(size) for size in sizes], [_float(row["median_s"]) for row in sizes.values()]
        )
        fits.append({**common, "spans": group[0].get("spans"), **asdict(line)})
    return tuple(fits)


def _group_rows(rows: Iterable[Row]) -> list[tuple[dict[str, Value], list[Row]]]:
    """Return the rows grouped by FIT_KEYS, in order of first appearance."""

    def key(row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(name)) for name in FIT_KEYS)

    order: dict[tuple[str, ...], int] = {}
    rows = [row for row in rows if row.get("bytes")]
    for row in rows:
        order.setdefault(key(row), len(order))
    groups = [[*group] for _, group in groupby(sorted(rows, key=lambda row: order[key(row)]), key)]
    return [({name: group[0][name] for name in FIT_KEYS if name in group[0]}, group) for group in groups]


def links_from_fits(summary: Iterable[Row]) -> tuple[Link, ...]:
    """Return the links of a Cluster: for each collective, the type and place with the largest β.

    An axis is left out if its groups span several nodes with several ranks on each: it is neither within
    nodes nor across them.
    """
    best: dict[tuple[Value, ...], Row] = {}
    for row in summary:
        if row["operation"] in REDUCTIONS or row.get("algorithm"):
            continue
        if row.get("spans") not in ("node", "across") or not row.get("beta_Bps"):
            continue
        key = tuple(row[name] for name in ("spans", "backend", "operation", "ranks"))
        if key not in best or _float(row["beta_Bps"]) > _float(best[key]["beta_Bps"]):
            best[key] = row
    return tuple(_link(row) for row in best.values())


def _link(row: Row) -> Link:
    note = (
        f"bench collectives, {row['dtype']}, {row['place']} of place, "
        f"{row['sizes']} sizes, misfit {_float(row['misfit']):.0%}"
    )
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


def _fact(row: Row, name: str, error_name: str, note: str) -> Fact:
    value, error = _float(row[name]), row.get(error_name)
    spread = _float(error) / value if error is not None and value else None
    return Fact(value=value, source="measured", spread=spread, note=note)


def _float(value: Value) -> float:
    assert isinstance(value, (int, float))
    return float(value)


def _int(value: Value) -> int:
    assert isinstance(value, int)
    return value
