"""Whether the time α of empty calls grows with the number of ranks as in a ring or as in a tree.

A ring of n ranks passes a message n - 1 times from rank to rank, and twice as often for an all-reduce. A tree
passes it once per level: log2 n times (Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH, 2005).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.result import Row
from paceline.units import format_seconds

PLACES = {"in": "in place", "out": "out of place"}
LEAST_COUNTS = 3  # numbers of ranks
CLEAR = 0.6  # largest ratio of the misfits of two models with which the better one is named
GOOD = 0.25  # largest misfit of a model that is named
DOUBLED = "all-reduce"  # a reduction, then a distribution
STEPS: Mapping[str, Callable[[int], float]] = {"ring": lambda n: n - 1.0, "tree": math.log2}


@dataclass(frozen=True)
class LatencyFit:
    """α = step_s · number of steps, by the model of `shape`. misfit: RMS of the relative residuals."""

    shape: str
    step_s: float
    misfit: float


def fit_latency(shape: str, counts: Sequence[int], alphas_s: Sequence[float], factor: float) -> LatencyFit:
    """Fit the time of one step to the α of several numbers of ranks, by relative residuals."""
    ratios = [factor * STEPS[shape](count) / alpha for count, alpha in zip(counts, alphas_s, strict=True)]
    step_s = sum(ratios) / sum(ratio * ratio for ratio in ratios)
    misfit = math.sqrt(sum((step_s * ratio - 1) ** 2 for ratio in ratios) / len(ratios))
    return LatencyFit(shape, step_s, misfit)


def explain_latencies(fits: Iterable[Row]) -> list[str]:
    """Return a sentence for each series of fits over enough numbers of ranks."""
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in fits:
        alpha, ranks = row["alpha_s"], row["ranks"]
        if not isinstance(alpha, float) or not isinstance(ranks, int) or alpha <= 0:
            continue
        words = (row["operation"], row["backend"], row["dtype"], PLACES[str(row["place"])])
        label = ", ".join(str(word) for word in (*words, row.get("algorithm")) if word)
        series.setdefault((label, str(row["operation"])), []).append((ranks, alpha))
    sentences = []
    for (label, operation), points in series.items():
        counts = sorted({ranks for ranks, _ in points})
        if LEAST_COUNTS <= len(counts) == len(points):
            sentences.append(_explain(label, operation, counts, [alpha for _, alpha in sorted(points)]))
    return sentences


def _explain(label: str, operation: str, counts: Sequence[int], alphas_s: Sequence[float]) -> str:
    factor = 2.0 if operation.startswith(DOUBLED) else 1.0
    fits = [fit_latency(shape, counts, alphas_s, factor) for shape in STEPS]
    best, other = sorted(fits, key=lambda fit: fit.misfit)
    misfits = f"misfit {best.misfit:.0%}; as in a {other.shape}: {other.misfit:.0%}"
    if best.misfit > min(GOOD, CLEAR * other.misfit):
        named = ", ".join(map(str, counts))
        shown = f"does not show a ring or a tree clearly (as in a {best.shape}: {misfits})"
        return f"{label}: α on {named} ranks {shown}"
    return (
        f"{label}: α grows with the ranks as in a {best.shape}, {format_seconds(best.step_s)} per step "
        f"({misfits})"
    )
