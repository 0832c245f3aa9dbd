"""The few constants that are fitted to measurements: what each may be by physics, and the fit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from paceline.plan.cost_model.constants import CONSTANTS, Constants
from published_rows import Row, answer

STORED = Path(__file__).with_name("published_constants.json")
# name: (value before any fit, how far it may be off, standard deviation as a share of it). plan/cost_model/constants.py says what they are.
FITTED = {
    "A100 product": (0.78, 0.06),
    "H100 product": (0.62, 0.10),
    "attention": (1.0, 0.20),
    "memory": (0.80, 0.15),
    "across": (0.75, 0.20),
    "hidden": (0.60, 0.30),
}
BEFORE = {name: value for name, (value, _) in FITTED.items()}
ATTENTION = {"A100": (0.55, 0.50), "H100": (0.35, 0.30)}  # forward and backward, before any fit
FAMILIES = {"A100": ("A100", "A800"), "H100": ("H100", "H800", "H200", "GH200")}
DRAWN = 0.004  # what being one standard deviation off costs, in mean error
NUDGE = 1.05
STEPS = (0.1, 0.03, 0.01, 0.003)


def constants(values: Mapping[str, float]) -> Constants:
    """The shipped ones with these in their places."""
    families = dict(CONSTANTS.architectures)
    for kind, names in FAMILIES.items():
        forward, backward = (share * values["attention"] for share in ATTENTION[kind])
        for name in names:
            families[name] = replace(
                families[name],
                product=values[f"{kind} product"],
                forward=forward,
                backward=backward,
                memory=values["memory"],
            )
    return replace(CONSTANTS, architectures=families, across=values["across"], hidden=values["hidden"])


class Slopes(NamedTuple):
    """Of the rows of a file: logarithms of predicted over measured, and by how much each constant changes them, in its own logarithm."""

    off: np.ndarray
    by: np.ndarray  # rows × constants


def slopes(rows: Sequence[Row]) -> Slopes:
    measured = [row for row in rows if row.step_s]

    def off(values: Mapping[str, float]) -> np.ndarray:
        on = constants(values)
        return np.array([log(answer(row, on).time.step_s / row.step_s) for row in measured if row.step_s])

    before = off(BEFORE)
    by = [(off(BEFORE | {name: BEFORE[name] * NUDGE}) - before) / log(NUDGE) for name in FITTED]
    return Slopes(before, np.stack(by, axis=1))


def fit(files: Sequence[Slopes]) -> dict[str, float]:
    """Least mean absolute error, each file counting alike, by coordinates in ever smaller steps. Times are nearly powers of the constants,
    so that slopes at the start are enough."""
    widths = np.array([by for _, by in FITTED.values()])

    def loss(moved: np.ndarray) -> float:
        errors = [float(np.abs(file.off + file.by @ moved).mean()) for file in files]
        return fmean(errors) + DRAWN * float(((moved / widths) ** 2).sum())

    moved = np.zeros(len(FITTED))
    best = loss(moved)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for index in range(len(FITTED)):
                for direction in (step, -step):
                    tried = moved.copy()
                    tried[index] += direction
                    if (found := loss(tried)) < best - 1e-6:
                        moved, best, improved = tried, found, True
    return {name: round(BEFORE[name] * exp(change), 3) for name, change in zip(FITTED, moved, strict=True)}


def stored() -> dict[str, dict[str, float]]:
    """By what was left out of the fit; `` is nothing."""
    return json.loads(STORED.read_text()) if STORED.exists() else {"": BEFORE}


def store(files: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, float]]:
    """Fit on all files, and on all but each of them, and write that down."""
    known = {name: slopes(rows) for name, rows in files.items() if any(row.step_s for row in rows)}
    found = {"": fit(list(known.values()))}
    found |= {left: fit([one for name, one in known.items() if name != left]) for left in known}
    STORED.write_text(json.dumps(found, indent=1) + "\n")
    return found
