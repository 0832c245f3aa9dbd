"""Relative differences of tensors, the factor between them, and the degree of a plan that equals it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.plan.plan import ResolvedPlan

# Rounding in float64 leaves a difference of 1e-15, and Adam amplifies it to 1e-12 at most.
RTOL = 1e-10
# The tolerance by the narrowest dtype through which the gradients of a model pass.
TOLERANCES = {"float64": RTOL, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
# How far gradients differ by rounding alone, relative to the largest element of the tensor. Noise of this
# size is added to the gradients to measure how a training amplifies it, and rounding of the dtype itself to
# the weights before the first step, to measure how ill-conditioned the model is.
ROUNDING = {"float64": 1e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}
# The maximum tolerance of gradients, loss and norm after amplification. Parameters have none: if a gradient
# is all rounding, its parameter has no digits to compare.
MAX_AMPLIFIED = {"float64": 1e-4, "float32": 5e-2, "float16": 0.5, "bfloat16": 0.5}
# The same for gradients, loss and norm of the first step, which only an ill-conditioned model amplifies.
MAX_AMPLIFIED_FIRST = {"float64": 1e-6, "float32": 5e-4, "float16": 2e-2, "bfloat16": 5e-2}
MARGIN = 30.0  # factor between the measured amplification and the tolerance
FLOOR = 1e-2  # minimum scale of a tensor, relative to the largest element of all tensors of its kind
SAME_FACTOR = 1e-6
ORDER = ("parameter", "gradient", "loss", "norm", "buffer")  # in which differences of a step are reported


@dataclass(frozen=True)
class Difference:
    """A difference between a plan and one process."""

    step: int  # 0: before the first step
    what: str  # of ORDER
    name: str  # of the tensor; "" for loss and norm
    position: int  # of the tensor in the model
    relative: float  # inf if there is nothing to compare
    factor: float | None = None  # the median of actual / expected
    uniform: bool = False  # whether most elements differ by that factor
    structure: str | None = None  # instead of a factor: "has no gradient, but with one process it has"

    @property
    def sort_key(self) -> tuple[int, bool, int, int]:
        """The order of differences: a missing gradient explains wrong gradients, so it is first."""
        after_update = self.what == "buffer" or (self.what == "parameter" and self.step > 0)
        kind = len(ORDER) if after_update and self.what == "parameter" else ORDER.index(self.what)
        return self.step, self.structure is None, kind, self.position

    @property
    def may_be_rounding(self) -> bool:
        """Whether the optimizer, or an ill-conditioned model, may have amplified rounding.

        An optimizer cannot have done so in gradients and loss of the first step."""
        if self.structure is not None or self.step == 0:
            return False
        if self.step > 1 or self.what in ("parameter", "buffer"):
            return True
        return self.relative <= max(MAX_AMPLIFIED_FIRST.values())


def tensor_difference(actual: Tensor, expected: Tensor, largest: float) -> float:
    """Return the largest difference relative to the largest element of `expected`.

    The scale is at least FLOOR × `largest`, the largest element of all tensors of the kind: a tensor that is
    0 except for rounding has no digits to compare."""
    if not expected.numel() or torch.equal(actual, expected):
        return 0.0
    actual, expected = actual.double(), expected.double()
    # Equal elements count as 0, also -inf of a mask.
    difference = torch.where(actual == expected, 0.0, actual - expected).abs().max().item()
    finite = expected[expected.isfinite()].abs()
    scale = max(finite.max().item() if len(finite) else 0.0, FLOOR * largest)
    return difference / scale if math.isfinite(difference) and scale else math.inf


def scalar_difference(actual: float, expected: float) -> float:
    """Return the relative difference of two numbers; inf if it is undefined."""
    if actual == expected:
        return 0.0
    return abs(actual - expected) / abs(expected) if expected and math.isfinite(actual) else math.inf


def estimate_factor(actual: Tensor, expected: Tensor) -> tuple[float | None, bool]:
    """Return the median of actual / expected over all but small elements, and whether most elements agree.

    The median is None if it is undefined."""
    actual, expected = actual.double().flatten(), expected.double().flatten()
    counted = expected.abs() > 1e-3 * expected.abs().max()
    if not counted.any():
        return None, False
    ratios = actual[counted] / expected[counted]
    median = ratios.median()
    if not median.isfinite():
        return None, False
    spread = (ratios - median).abs().median()
    return median.item(), bool(spread <= SAME_FACTOR * max(1e-3, abs(median.item())))


def find_axis(factor: float | None, plan: ResolvedPlan, ranks: int, of_norm: bool = False) -> str | None:
    """Return the degrees of `plan` that a factor equals or is the inverse of: "dp", "1 / tp", "dp or tp".

    of_norm: also try their square roots, which result from squares that every rank counts."""
    degrees = {key: getattr(plan, key) or 1 for key in ("dp", "tp", "pp", "cp", "replicate", "microbatches")}
    if plan.replicate > 1:
        degrees["shards"] = plan.dp // plan.replicate
    degrees["ranks"] = ranks
    forms = {"{}": 1.0, "1 / {}": -1.0, **({"√{}": 0.5, "1 / √{}": -0.5} if of_norm else {})}
    for form, power in forms.items():
        matches = [
            key
            for key, degree in degrees.items()
            if degree > 1 and factor and abs(factor / degree**power - 1) < SAME_FACTOR
        ]
        if matches:
            return " or ".join(form.format(key) for key in matches if key != "ranks" or len(matches) == 1)
    return None
