"""How far tensors lie apart, by what factor, and which degree of a plan that factor is."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.plan.plan import ResolvedPlan

RTOL = 1e-10  # what float64 leaves of a difference in rounding is 1e-15; Adam makes up to 1e-12 of it
# The same where a model computes in less: by the narrowest type through which its gradients pass.
TOLERANCES = {"float64": RTOL, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
# How far gradients lie apart by rounding alone, of the largest element of the tensor: what is planted to see what becomes of it.
ROUNDING = {"float64": 1e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}
# More is never taken for rounding in gradients, loss and norm; a parameter whose gradient is all rounding has no digits to compare.
MOST_GROWN = {"float64": 1e-4, "float32": 5e-2, "float16": 0.5, "bfloat16": 0.5}
MARGIN = 30.0  # between what planted rounding comes to and what is taken for rounding
FLOOR = 1e-2  # of the largest element of all tensors of a kind: smaller tensors are held against this
SAME_FACTOR = 1e-6
ORDER = ("parameter", "gradient", "loss", "norm", "buffer")  # of one step, which is told first


@dataclass(frozen=True)
class Difference:
    """Where a plan and one process are apart."""

    step: int  # 0: before the first one
    what: str  # of ORDER
    name: str  # of the tensor; "" for loss and norm
    position: int  # of the tensor in the model
    relative: float  # inf where there is nothing to compare
    factor: float | None = None  # the median of found / expected
    uniform: bool = False  # whether most elements differ by that factor
    structure: str | None = None  # instead of a factor: "has no gradient, but with one process it has"

    @property
    def place(self) -> tuple[int, bool, int, int]:
        """By which differences are sorted: a gradient that is missing explains those that are wrong."""
        after_update = self.what == "buffer" or (self.what == "parameter" and self.step > 0)
        kind = len(ORDER) if after_update and self.what == "parameter" else ORDER.index(self.what)
        return self.step, self.structure is None, kind, self.position

    @property
    def may_be_rounding(self) -> bool:
        """Whether the optimizer may have made it of rounding. Gradients and loss of the first step come before that."""
        return self.structure is None and (
            self.step > 1 or (self.step == 1 and self.what in ("parameter", "buffer"))
        )


def apart(found: Tensor, expected: Tensor, largest: float) -> float:
    """The largest difference, relative to the largest element of `expected`, or to FLOOR × `largest` of all tensors of its kind
    where that is more: a tensor that is 0 but for rounding has no digits that could agree."""
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    found, expected = found.double(), expected.double()
    difference = (
        torch.where(found == expected, 0.0, found - expected).abs().max().item()
    )  # -inf of a mask is -inf
    finite = expected[expected.isfinite()].abs()
    scale = max(finite.max().item() if len(finite) else 0.0, FLOOR * largest)
    return difference / scale if math.isfinite(difference) and scale else math.inf


def apart_numbers(found: float, expected: float) -> float:
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected and math.isfinite(found) else math.inf


def ratio(found: Tensor, expected: Tensor) -> tuple[float | None, bool]:
    """The median of found / expected over the elements that are not small, and whether most of them are that."""
    found, expected = found.double().flatten(), expected.double().flatten()
    counted = expected.abs() > 1e-3 * expected.abs().max()
    if not counted.any():
        return None, False
    ratios = found[counted] / expected[counted]
    middle = ratios.median()
    if not middle.isfinite():
        return None, False
    return middle.item(), bool(
        (ratios - middle).abs().median() <= SAME_FACTOR * max(1e-3, abs(middle.item()))
    )


def axis_of(factor: float | None, plan: ResolvedPlan, ranks: int, of_norm: bool = False) -> str | None:
    """The degrees of `plan` that a factor equals or is the inverse of: "dp", "1 / tp", "dp or tp".

    `of_norm`: also the roots of them, as squares that are counted once a rank make it."""
    degrees = {key: getattr(plan, key) or 1 for key in ("dp", "tp", "pp", "cp", "replicate", "microbatches")}
    if plan.replicate > 1:
        degrees["shards"] = plan.dp // plan.replicate
    degrees["ranks"] = ranks
    forms = {"{}": 1.0, "1 / {}": -1.0, **({"√{}": 0.5, "1 / √{}": -0.5} if of_norm else {})}
    for form, power in forms.items():
        meant = [
            key
            for key, degree in degrees.items()
            if degree > 1 and factor and abs(factor / degree**power - 1) < SAME_FACTOR
        ]
        if meant:
            return " or ".join(form.format(key) for key in meant if key != "ranks" or len(meant) == 1)
    return None
