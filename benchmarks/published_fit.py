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
from paceline.plan.cost_model.framework_profiles import NEMO, NEMO_FUSED
from published_rows import Prediction, Row, predict_row

STORED = Path(__file__).with_name("published_constants.json")
# name: (value before any fit, its standard deviation as a share); plan/cost_model/constants.py and
# framework_profiles.py define them.
FITTED = {
    "A100 product": (0.78, 0.06),
    "H100 product": (0.62, 0.10),
    "H100 fp8": (0.50, 0.20),
    "B200 product": (0.55, 0.15),
    # from 16 to 8 bits the share of the peak falls as on H100, and again from 8 to 4
    "B200 fp8": (0.45, 0.20),
    "B200 fp4": (0.37, 0.25),
    "B200 attention": (0.50, 0.25),
    "B200 node": (0.60, 0.25),
    "attention": (1.0, 0.20),
    # cuDNN 9 and FlashAttention-3 in their authors' measurements (arXiv 2407.08608, figures 5 and 6), at the
    # clocks of long trainings
    "H100 native attention": (1.5, 0.15),
    "memory": (0.80, 0.15),
    "across": (0.75, 0.20),
    "hidden": (0.60, 0.30),
    "nemo product": (1.15, 0.10),
    "nemo attention": (1.20, 0.20),
    "nemo elementwise": (0.80, 0.25),
    "nemo tensor overlap": (0.75, 0.15),
    "nemo experts": (0.80, 0.20),
    "nemo low experts": (0.75, 0.25),
    "nemo cast": (3.0, 0.30),
    "plain product": (0.95, 0.10),
    "plain experts": (0.80, 0.20),
    "bigscience product": (0.90, 0.10),
}
BEFORE = {name: value for name, (value, _) in FITTED.items()}
ATTENTION = {"A100": (0.55, 0.50), "H100": (0.35, 0.30)}  # forward and backward, before any fit
FAMILIES = {
    "A100": ("A100", "A800"),
    "H100": ("H100", "H800", "H200", "GH200"),
    "B200": ("B200", "B300", "GB200", "GB300"),
}
SYSTEMS = {"nemo": "nemo", "plain": "megatron-plain", "bigscience": "bigscience"}  # names of recipes
BLACKWELL_BACKWARD = 0.85  # speed of attention's backward pass relative to its forward pass
PRIOR_WEIGHT = 0.004  # mean error that a deviation of one standard deviation adds to the loss
NUDGE = 1.05
STEPS = (0.1, 0.03, 0.01, 0.003)
ROUNDS = 3  # times are nearly powers of the constants near the last fit, not over the whole range


def build_constants(values: Mapping[str, float]) -> Constants:
    """Return the shipped constants with these values in place of theirs."""
    families = dict(CONSTANTS.architectures)
    for kind, names in FAMILIES.items():
        if kind in ATTENTION:
            forward, backward = (share * values["attention"] for share in ATTENTION[kind])
            changes = {"memory": values["memory"], "forward": forward, "backward": backward}
            if kind == "H100":
                changes["native"] = values["H100 native attention"]
        else:
            forward = values[f"{kind} attention"]
            changes = {"forward": forward, "backward": forward * BLACKWELL_BACKWARD}
            changes |= {"product_fp4": values[f"{kind} fp4"], "node": values[f"{kind} node"]}
        if f"{kind} fp8" in values:
            changes["product_fp8"] = values[f"{kind} fp8"]
        for name in names:
            families[name] = replace(families[name], product=values[f"{kind} product"], **changes)
    return replace(CONSTANTS, architectures=families, across=values["across"], hidden=values["hidden"])


def with_fitted_recipe(row: Row, values: Mapping[str, float]) -> Row:
    """Return the row with the fitted values of its training system."""
    recipe = row.recipe
    if recipe.name in (NEMO.name, NEMO_FUSED.name):
        experts = values["nemo low experts" if recipe.is_low else "nemo experts"]
        recipe = replace(
            recipe,
            products=values["nemo product"],
            attention=values["nemo attention"],
            elementwise=values["nemo elementwise"],
            overlaps_tensor=min(1.0, values["nemo tensor overlap"]),
            grouped=recipe.grouped if recipe.fused_experts else experts,
            cast_traffic=values["nemo cast"],
        )
    elif recipe.name == "megatron-plain":
        recipe = replace(recipe, products=values["plain product"], grouped=values["plain experts"])
    elif recipe.name == "bigscience":
        recipe = replace(recipe, products=values["bigscience product"])
    return row if recipe is row.recipe else replace(row, recipe=recipe)


def predict_fitted(rows: Sequence[Row], values: Mapping[str, float]) -> list[Prediction]:
    """Return the predictions of rows with these values of the constants."""
    constants = build_constants(values)
    return [predict_row(with_fitted_recipe(row, values), constants) for row in rows]


class Sensitivity(NamedTuple):
    """Errors of the rows of a file, and their derivatives by the constants, all in logarithms."""

    errors: np.ndarray  # log(predicted / measured), by row
    slopes: np.ndarray  # rows × constants


def compute_sensitivity(rows: Sequence[Row], around: Mapping[str, float]) -> Sensitivity:
    measured = [row for row in rows if row.step_s]

    def log_errors(rows: Sequence[Row], values: Mapping[str, float]) -> np.ndarray:
        predicted = predict_fitted(rows, values)
        return np.array(
            [log(item.time.step_s / (row.step_s or 1)) for item, row in zip(predicted, rows, strict=True)]
        )

    before = log_errors(measured, around)
    slopes = np.zeros((len(measured), len(FITTED)))
    for column, name in enumerate(FITTED):
        changed = [index for index, row in enumerate(measured) if _concerns(name, row)]
        if changed:
            after = log_errors([measured[index] for index in changed], {**around, name: around[name] * NUDGE})
            slopes[changed, column] = (after - before[changed]) / log(NUDGE)
    return Sensitivity(before, slopes)


def _concerns(name: str, row: Row) -> bool:
    """Return whether a constant may change the prediction of a row."""
    kind = name.split()[0]
    if kind in FAMILIES:
        return any(family in row.device.upper() for family in FAMILIES[kind])
    return SYSTEMS[kind] in row.recipe.name if kind in SYSTEMS else True


def fit(files: Sequence[Sensitivity], around: Mapping[str, float]) -> dict[str, float]:
    """Return the constants with the lowest mean absolute error, where each file has the same weight.

    The search changes one coordinate at a time in decreasing steps, with the slopes at `around`.
    """
    deviations = np.array([deviation for _, deviation in FITTED.values()])
    moved = np.array([log(around[name] / BEFORE[name]) for name in FITTED])

    def loss(shift: np.ndarray) -> float:
        errors = [float(np.abs(file.errors + file.slopes @ shift).mean()) for file in files]
        return fmean(errors) + PRIOR_WEIGHT * float((((moved + shift) / deviations) ** 2).sum())

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
    return {name: round(around[name] * exp(change), 3) for name, change in zip(FITTED, shift, strict=True)}


def load_fits() -> dict[str, dict[str, float]]:
    """Return the stored fits by the file that was excluded; the empty name excludes none."""
    stored: dict[str, dict[str, float]] = json.loads(STORED.read_text()) if STORED.exists() else {"": {}}
    return {name: {**BEFORE, **values} for name, values in stored.items()}


def store(files: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, float]]:
    """Fit to all files, and to all files but each; store and return the fits."""
    measured = {name: rows for name, rows in files.items() if any(row.step_s for row in rows)}
    values = BEFORE
    for _ in range(ROUNDS):
        around = values
        used = {name: compute_sensitivity(rows, around) for name, rows in measured.items()}
        values = fit(list(used.values()), around)
    fits = {"": values}
    for excluded in measured:
        fits[excluded] = fit([item for name, item in used.items() if name != excluded], around)
    STORED.write_text(json.dumps(fits, indent=1) + "\n")
    return fits
