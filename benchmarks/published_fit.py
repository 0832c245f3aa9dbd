"""The few constants that are fitted to measurements: their physical ranges, and the fit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from paceline.plan.cost_model.constants import CONSTANTS, Constants
from published_rows import Row, predict_row

STORED = Path(__file__).with_name("published_constants.json")
# name: (value before any fit, its standard deviation as a share); plan/cost_model/constants.py defines them.
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
PRIOR_WEIGHT = 0.004  # mean error that a deviation of one standard deviation adds to the loss
NUDGE = 1.05
STEPS = (0.1, 0.03, 0.01, 0.003)


def build_constants(values: Mapping[str, float]) -> Constants:
    """Return the shipped constants with these values in place of theirs."""
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


class Sensitivity(NamedTuple):
    """Errors of the rows of a file, and their derivatives by the constants, all in logarithms."""

    errors: np.ndarray  # log(predicted / measured), by row
    slopes: np.ndarray  # rows × constants


def compute_sensitivity(rows: Sequence[Row]) -> Sensitivity:
    measured = [row for row in rows if row.step_s]

    def log_errors(values: Mapping[str, float]) -> np.ndarray:
        built = build_constants(values)
        return np.array(
            [log(predict_row(row, built).time.step_s / row.step_s) for row in measured if row.step_s]
        )

    before = log_errors(BEFORE)
    slopes = [(log_errors(BEFORE | {name: BEFORE[name] * NUDGE}) - before) / log(NUDGE) for name in FITTED]
    return Sensitivity(before, np.stack(slopes, axis=1))


def fit(files: Sequence[Sensitivity]) -> dict[str, float]:
    """Return the constants with the lowest mean absolute error, where each file has the same weight.

    The search changes one coordinate at a time in decreasing steps. Times are nearly powers of the constants,
    so the slopes at the start suffice.
    """
    deviations = np.array([deviation for _, deviation in FITTED.values()])

    def loss(shift: np.ndarray) -> float:
        errors = [float(np.abs(file.errors + file.slopes @ shift).mean()) for file in files]
        return fmean(errors) + PRIOR_WEIGHT * float(((shift / deviations) ** 2).sum())

    shift = np.zeros(len(FITTED))
    best = loss(shift)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for index in range(len(FITTED)):
                for direction in (step, -step):
                    candidate = shift.copy()
                    candidate[index] += direction
                    if (value := loss(candidate)) < best - 1e-6:
                        shift, best, improved = candidate, value, True
    return {name: round(BEFORE[name] * exp(change), 3) for name, change in zip(FITTED, shift, strict=True)}


def load_fits() -> dict[str, dict[str, float]]:
    """Return the stored fits by the file that was excluded; the empty name excludes none."""
    return json.loads(STORED.read_text()) if STORED.exists() else {"": BEFORE}


def store(files: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, float]]:
    """Fit to all files, and to all files but each; store and return the fits."""
    sensitivities = {
        name: compute_sensitivity(rows) for name, rows in files.items() if any(row.step_s for row in rows)
    }
    fits = {"": fit(list(sensitivities.values()))}
    for excluded in sensitivities:
        fits[excluded] = fit([item for name, item in sensitivities.items() if name != excluded])
    STORED.write_text(json.dumps(fits, indent=1) + "\n")
    return fits
