"""The gradient noise scale: the batch up to which more samples per step replace steps.

McCandlish et al., An empirical model of large-batch training, 2018: with the covariance Σ of the gradients of
single samples and the true gradient G, B_simple = tr Σ / |G|² (equation 2.9).

The paper estimates both from the norms of gradients of a small and a large batch. Under a plan that shards
gradients, no rank has a gradient of its own. So a measured step runs a second pass, in which the losses of
half of the micro-batches and ranks are multiplied by -1. Its gradient is D = Σ_u s_u g_u / U over the U
micro-batches of all data ranks: G cancels, and E|D|² = tr Σ / B. The usual pass has
E|G_B|² = |G|² + tr Σ / B. Both norms are those of whole tensors under every plan, and both passes draw the
same random numbers.

An epoch has each of N samples once, so that batches are samples without replacement: E|D|² is that of the
covariance with N - 1 in its divisor, and |G_B|² - |D|² estimates |G_N|² - tr Σ / N. That is |G|² of the
distribution from which the data set was drawn, without bias; |G_N|² of the data set is larger.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, variance

import numpy as np
from torch import Tensor

from paceline.data.samples import Batch
from paceline.distributed.rng import derive_seed
from paceline.errors import PlanError, SpecError
from paceline.events import NoiseMeasured
from paceline.parallel.loss.global_loss import preserved_buffers
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.training.step.step import TrainingStep

WINDOW = 50  # measurements that an estimate averages


def check_noise_scale(spec: Spec, plan: ResolvedPlan, step: object) -> None:
    """Raise an Error if the noise scale is requested and cannot be measured. step: what makes an update."""
    if spec.noise_scale is None:
        return
    option = f"noise_scale={spec.noise_scale}"
    if plan.is_asynchronous:
        raise PlanError(f"plan {plan} has other weights on each rank; leave {option} out")
    if plan.uneven:
        raise PlanError(f"{option} requires ranks with equal numbers of samples; choose a batch for it")
    if plan.dp * plan.microbatches < 2:
        raise PlanError(
            f"{option} compares parts of a batch, and plan {plan} has one; add microbatches=2, or data ranks"
        )
    if not isinstance(step, TrainingStep):
        raise SpecError(f"{option} requires a task with one optimizer and no updates; leave it out")
    if step.global_loss is not None or step.auxiliary is not None:
        raise SpecError(f"{option} requires a loss that is a mean over samples; leave it out")


def draw_signs(seed: int, step: int, parts: int) -> np.ndarray:
    """Return +1 or -1 for each part of a batch, as many of each; 0 for one of an odd number of parts."""
    signs = np.zeros(parts)
    order = np.random.default_rng(derive_seed(seed, "noise scale", step)).permutation(parts)
    signs[order[: parts // 2]], signs[order[parts - parts // 2 :]] = 1.0, -1.0
    return signs


class NoiseMeter:
    """Measures the noise scale in every N-th step. All ranks call `measure` and `report`.

    first: steps done before the first of this start, which is not measured: torch's engines prepare in it.
    """

    def __init__(self, spec: Spec, plan: ResolvedPlan, step: object, first: int):
        check_noise_scale(spec, plan, step)
        self.every, self.first, self.batches, self.seed = spec.noise_scale, first, spec.batches, spec.seed
        self.plan, self.update = plan, step
        self._variances: dict[int, Tensor] = {}  # by step: tr Σ
        # tr Σ and |G|² of the last measured steps
        self._measured: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def measure(self, batches: Sequence[Batch], step: int) -> None:
        """Run the second pass of a step, if it is due, and drop its gradients. `step`: steps done before."""
        if self.every is None or (step + 1) % self.every or step == self.first:
            return
        update = self.update
        assert isinstance(update, TrainingStep)
        signs = draw_signs(self.seed, step, self.plan.dp * self.plan.microbatches)
        # In the order of the samples, so that plans with as many parts measure the same.
        update.signs = signs[update.place.dp :: self.plan.dp].tolist()
        on_loss, update.on_loss = update.on_loss, None  # the pass repeats the losses of the step
        try:
            with preserved_buffers(update.model):
                update.compute_gradients(batches, step)
        finally:
            update.signs, update.on_loss = None, on_loss
        norm = update.norm.global_norm() / update.gradient_scale
        for parameter in update.params:
            parameter.grad = None
        self._variances[step + 1] = norm.square() * (
            self.batches.batch_of(step) * len(signs) / np.count_nonzero(signs)
        )

    def report(self, step: int, grad_norm: float) -> NoiseMeasured | None:
        """Return the estimate after a step, or None if it was not measured.

        grad_norm: of its whole gradient, before clipping.
        """
        found = self._variances.pop(step, None)
        if found is None:
            return None
        trace = float(found)
        squared = grad_norm**2 - trace / self.batches.batch_of(step - 1)
        if not math.isfinite(trace) or not math.isfinite(squared):
            return None
        self._measured.append((trace, squared))
        scale, error = estimate_ratio(self._measured)
        return NoiseMeasured(
            step=step, noise_scale=scale, error=error, variance=trace, squared_gradient=squared
        )


def estimate_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Return the ratio of two means, and its relative standard error.

    The ratio of means is biased less than the mean of ratios. It is None if the mean of the divisor is not
    positive: then the gradient is lost in its noise. The error requires two pairs.
    """
    above, below = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
    if below <= 0 or above <= 0:
        return None, None
    if len(pairs) < 2:
        return above / below, None
    deviations = [first / above - second / below for first, second in pairs]
    return above / below, math.sqrt(variance(deviations) / len(pairs))
