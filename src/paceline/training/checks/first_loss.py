"""Checks of the first loss of a training: what it consists of, and whether it mixes the samples of a batch.

A plan that divides the batch computes the loss of each part separately. That is the loss of the whole batch
only if the losses of the parts add up. So the loss of a part of the output is compared with that part of the
loss.

This may be inconclusive, because the model computes the loss, or because the losses do not add up. Then the
model runs on parts of the batch as in an evaluation, and the losses of these parts are compared.
"""

import contextlib
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.batch import cast_floats, find_leaves
from paceline.data.samples import Batch
from paceline.distributed.rng import seeded_rngs
from paceline.errors import TaskError
from paceline.evaluation_mode import evaluation_mode
from paceline.parallel.loss.forward import call_loss_by_item, read_weights
from paceline.plan.plan import ResolvedPlan
from paceline.sample_rng import SampleNumbers, find_numbers, number_samples
from paceline.training.checks.batch_parts import (
    ORDERS,
    Slicer,
    build_slicers,
    find_cuts,
    gather_detached,
    has_samples,
    is_any_rank,
    map_parts,
    preserved_rng,
)
from paceline.training.checks.sums_check import FirstSumsCheck
from paceline.training.step.step import TrainingStep

Verdict = Literal["adds up", "mixes", "unknown"]
NumberedBatch = tuple[Batch, Tensor]  # a batch, and the numbers of its samples
RTOL = 1e-5  # of losses that are computed in float64
RTOL_BY_DTYPE = {torch.float64: 1e-5, torch.float32: 1e-4}  # of losses in the precision of the training
RTOL_BY_PRECISION = {"fp64": 1e-5, "fp32": 1e-3}  # of losses of the whole model
RTOL_COARSE = 3e-2  # of other data types
# The model's losses of two parts overrule those of the output only if they agree much better than those did.
CLEARLY = 0.1
ROUNDING = 1e-6


def check_loss(values: Tensor) -> None:
    """Raise TaskError if `values` cannot be a loss."""
    if not isinstance(values, Tensor):
        raise TaskError(f"loss() must return a tensor, got {type(values).__name__}")
    if not values.is_floating_point():
        raise TaskError(
            f"loss() must return a real floating-point tensor, got {str(values.dtype).removeprefix('torch.')}"
        )
    if not values.requires_grad:
        raise TaskError(
            "loss() returned a tensor that does not require grad, so that nothing would be trained; compute "
            "it from the output of the model, without detach(), item() or torch.no_grad()"
        )


def check_items(values: Tensor, samples: int, method: str, what: str) -> None:
    """Raise TaskError if the number of values is not a multiple of the number of samples.

    One number is accepted.
    """
    if values.dim() and (values.numel() == 0 or values.numel() % samples):
        raise TaskError(
            f"{method} returned {values.numel()} values of {what} for a batch of {samples} samples; return "
            "one or more for each sample, and if the number of items varies, define weights(batch) of the "
            f"shape of {what}"
        )


class FirstLossCheck:
    """Checks the first loss of a training.

    Call it with the first output, its batch and its loss. Call `finish` after the first update, on all ranks,
    or on a worker of a parameter server after its first gradients.

    samples: of a micro-batch on this rank. `is_divided`: whether the plan divides the batch. `is_allowed`:
    whether a loss may mix samples all the same. `of_worker`: the plan of a parameter server, whose workers
    decide separately; None: all ranks decide together.
    """

    def __init__(
        self,
        step: TrainingStep,
        samples: int,
        is_divided: bool,
        is_allowed: bool,
        of_worker: ResolvedPlan | None = None,
    ):
        self.step, self.samples = step, samples
        self.plan, self.decides_together = of_worker or step.plan, of_worker is None
        self.compares = is_divided and not is_allowed
        self.batch: NumberedBatch | None = None
        self.numbers: SampleNumbers | None = None
        self.verdict: Verdict = "adds up"
        self.error: TaskError | None = None
        self.is_certain = False  # that tensors were divided by samples
        self.deviation = 0.0  # of the parts from the whole, relative
        self.means = ""  # of whole and parts, for the message
        self.sums = FirstSumsCheck(step, samples) if self.compares and step.auxiliary is not None else None

    def __call__(self, output: object, batch: Batch, values: Tensor) -> None:
        self.step.on_first_loss = None
        check_loss(values)
        if read_weights(self.step.task, batch) is None:
            try:
                check_items(values, self.samples, "loss()", "the loss")
            except TaskError as error:
                if not values.numel():
                    raise
                # Raised in `finish`: the number may be right on other ranks, which would wait for this one.
                self.error = error
        if not self.compares or self.error is not None:
            return
        if self.sums is not None:
            self.sums(output, batch)
        self.numbers = find_numbers(batch)
        self.batch = (batch, torch.as_tensor(self.numbers.numbers))
        with torch.no_grad(), preserved_rng(self.step.device):
            self.verdict = self._judge_output(output, self.batch)

    def _judge_output(self, output: object, batch: NumberedBatch) -> Verdict:
        """Compare the loss of parts of the output with that of the whole output."""
        output = gather_detached(output)
        samples = self.samples
        if samples == 1:  # it has no parts, so it is doubled
            output, batch = map_parts(
                (output, batch), lambda item: torch.cat([item, item]) if has_samples(item, 1, 0) else item
            )
            samples = 2
        verdict: Verdict
        try:
            verdict = self._judge_parts(
                cast_floats(output, torch.float64), cast_floats(batch, torch.float64), samples, RTOL
            )
        except Exception:  # a task that cannot compute in float64
            verdict = "unknown"
        if verdict == "unknown":
            try:
                verdict = self._judge_parts(output, batch, samples, None)
            except Exception:  # the real call of loss() reports what is wrong
                return "unknown"
        outputs = [
            leaf for leaf in find_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        rows = [leaf for leaf in find_leaves((output, batch)) if isinstance(leaf, Tensor) and leaf.dim()]
        self.is_certain = verdict == "mixes" and all(len(leaf) == samples for leaf in rows)
        if verdict == "adds up" and not all(
            has_samples(leaf, samples, 0) or has_samples(leaf, samples, 1) for leaf in outputs
        ):
            return "unknown"  # the model may have mixed the samples before
        return verdict

    def _judge_parts(self, output: Any, batch: Any, samples: int, rtol: float | None) -> Verdict:
        """Try all orders of samples.

        rtol: for losses computed without autocast; None: as in the training.
        """
        exact = rtol is not None
        whole = self._compute_loss(output, batch, 0, exact)
        if not _is_near(whole, self._compute_loss(output, batch, 1, exact), rtol):
            return "unknown"  # the loss draws random numbers
        verdict: Verdict = "unknown"
        for order in ORDERS:
            verdicts = [
                self._judge_cut(whole, output, batch, cut, samples, order, rtol) for cut in find_cuts(samples)
            ]
            if "mixes" not in verdicts and "adds up" in verdicts:
                return "adds up"
            if "mixes" in verdicts:
                verdict = "mixes"
        return verdict

    def _judge_cut(
        self, whole: "_Loss", output: Any, batch: Any, cut: int, samples: int, order: str, rtol: float | None
    ) -> Verdict:
        slicers = build_slicers(samples, cut, order)
        try:
            parts = [
                self._compute_loss(slicer(output), slicer(batch), 0, rtol is not None) for slicer in slicers
            ]
        except Exception:  # the samples are not in this order, so that these are no parts
            return "unknown"
        return self._compare(whole, parts, slicers, (cut, samples - cut), samples, rtol)

    def _number_samples(self, batch: NumberedBatch) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the task draws for the samples of this batch or part of a batch."""
        assert self.numbers is not None
        return number_samples([batch[0]], [dataclasses.replace(self.numbers, numbers=batch[1])])

    def _compute_loss(self, output: Any, batch: NumberedBatch, seed: int, exact: bool) -> "_Loss":
        task = self.step.task
        autocast = torch.autocast(self.step.device.type, enabled=False) if exact else contextlib.nullcontext()
        with seeded_rngs(seed), autocast:
            output, batch = map_parts(
                (output, batch), lambda item: item.clone() if isinstance(item, Tensor) else item
            )
            with self._number_samples(batch):
                return _Loss(
                    gather_detached(call_loss_by_item(task, output, batch[0])), task.weights(batch[0])
                )

    def _compare(
        self,
        whole: "_Loss",
        parts: "list[_Loss]",
        slicers: list[Slicer],
        sizes: tuple[int, int],
        samples: int,
        rtol: float | None,
    ) -> Verdict:
        """Compare the loss of a batch with the losses of two parts of these sizes."""
        if not whole.is_finite:
            return "unknown"
        total, count = whole.total(samples)
        totals = [part.total(size) for part, size in zip(parts, sizes, strict=True)]
        parts_total, parts_count = sum(part for part, _ in totals), sum(items for _, items in totals)
        deviation = max(
            _relative_difference(total, parts_total, whole.scale),
            _relative_difference(count, parts_count, count),
        )
        if whole.values.dim():
            slices = [
                (slicer(whole.values), part.values) for slicer, part in zip(slicers, parts, strict=True)
            ]
            if all(expected.shape == actual.shape for expected, actual in slices):
                deviation = max(
                    deviation, *(_max_relative_difference(expected, actual) for expected, actual in slices)
                )
        if deviation <= (rtol if rtol is not None else RTOL_BY_DTYPE.get(whole.values.dtype, RTOL_COARSE)):
            return "adds up"
        self.deviation = deviation
        self.means = (
            f"{total / count:.6g} for the whole and {parts_total / parts_count:.6g} for its parts"
            if count and parts_count
            else ""
        )
        return "mixes"

    def finish(self) -> None:
        """Raise TaskError on all ranks if the loss is not by sample, or mixes samples. A collective."""
        if self._is_any(self.error is not None):
            raise self.error or TaskError(
                "loss() returned values on another rank whose number is not a multiple of its samples; if "
                "the number of items varies, define weights(batch) of the shape of the loss"
            )
        if not self.compares:
            return
        verdict, means = self.verdict, self.means
        runs_model = self._is_any(verdict != "adds up" and not self.is_certain)
        if runs_model and self.step.pipeline is None and self.batch is not None:
            # Parts of an output may mislead if another tensor has as many rows; parts of the batch do not.
            rtol = (
                RTOL_BY_PRECISION.get(self.step.precision, RTOL_COARSE)
                if verdict != "mixes"
                else max(CLEARLY * self.deviation, ROUNDING)
            )
            model_verdict = self._judge_model(self.batch, rtol)
            if model_verdict != "unknown" and not self.is_certain:
                verdict, means = model_verdict, self.means
        self.batch = None
        if self._is_any(verdict == "mixes"):
            means = f" ({means})" if means and verdict == "mixes" else ""
            raise TaskError(
                "loss() mixes the samples of a batch: its mean over a batch is not that over the parts of "
                f"the batch{means}, so that plan {self.plan} trains differently than one process; return the "
                "loss of each sample, define weights(batch) if the number of items varies, define "
                "global_loss(output, batch) instead, which sees the whole batch, use a plan that does "
                "not divide the batch (dp=1 and one micro-batch), or accept the loss of each part with "
                "--allow-local-loss"
            )
        if self.sums is not None:
            self.sums.finish()

    def _is_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank that decides together with this one."""
        return is_any_rank(flag, self.step.device) if self.decides_together else flag

    def _judge_model(self, batch: NumberedBatch, rtol: float) -> Verdict:
        """Compare the model's loss on parts of the batch with that on the whole batch.

        The model runs as in an evaluation: without dropout, and BatchNorm does not mix samples.
        """
        if self.samples < 2:
            return "unknown"
        cut = self.samples // 2
        slicers = build_slicers(self.samples, cut, ORDERS[0])
        with evaluation_mode(self.step.model), torch.no_grad(), preserved_rng(self.step.device):
            whole, repeated = self._evaluate_loss(batch, 0), self._evaluate_loss(batch, 1)
            parts = [self._evaluate_loss(slicer(batch), 0) for slicer in slicers]
        losses = [part for part in parts if part is not None]
        if (
            whole is None
            or repeated is None
            or len(losses) < len(parts)
            or not _is_near(whole, repeated, max(rtol, RTOL))
        ):
            return "unknown"
        return self._compare(whole, losses, slicers, (cut, self.samples - cut), self.samples, rtol)

    def _evaluate_loss(self, batch: NumberedBatch, seed: int) -> "_Loss | None":
        with seeded_rngs(seed), self._number_samples(batch):
            output = self.step.output(batch[0])
        try:
            return self._compute_loss(gather_detached(output), batch, seed, exact=False)
        except Exception:  # a loss that can only be computed in training
            return None


@dataclasses.dataclass
class _Loss:
    """What loss() and weights() returned."""

    values: Tensor
    weights: Tensor | None

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return bool(self.values.isfinite().all())

    @property
    def scale(self) -> float:
        """Sum of the absolute values; 0 for one number."""
        return float(self.values.abs().sum()) if self.values.dim() else 0.0

    def total(self, samples: int) -> tuple[float, float]:
        """Return loss × items, and items."""
        if self.weights is None:
            count = float(self.values.numel()) if self.values.dim() else float(samples)
            return float(self.values.double().sum()) * (count if not self.values.dim() else 1.0), count
        if not self.values.dim():
            return float(self.values) * float(self.weights.sum()), float(self.weights.sum())
        return float((self.values.double() * self.weights).sum()), float(self.weights.double().sum())


def _relative_difference(a: float, b: float, scale: float) -> float:
    largest = max(abs(a), abs(b), scale)
    return abs(a - b) / largest if largest else 0.0


def _max_relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of elements, relative to the largest element."""
    largest = max((float(tensor.abs().max()) for tensor in (a, b) if tensor.numel()), default=0.0)
    return float((a - b).abs().max()) / largest if largest else 0.0


def _is_near(a: _Loss, b: _Loss, rtol: float | None) -> bool:
    bound = rtol if rtol is not None else RTOL_BY_DTYPE.get(a.values.dtype, RTOL_COARSE)
    return (
        a.values.shape == b.values.shape
        and _max_relative_difference(a.values.nan_to_num(), b.values.nan_to_num()) <= bound
    )
