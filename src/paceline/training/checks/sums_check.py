"""Check of the first sums of a training: whether those of the parts of a batch add up to that of the batch.

If they do not, for example because `batch_sums` returned means, the auxiliary loss would depend on the plan.
Parts of the output of the model are compared with the whole output. This may mislead if another dim of a
tensor than the first counts the samples. So if they do not add up, the model runs on parts of the batch, as
in an evaluation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from paceline.batch import cast_floats
from paceline.data.samples import Batch
from paceline.distributed.rng import seeded_rngs
from paceline.errors import TaskError
from paceline.evaluation_mode import evaluation_mode
from paceline.parallel.loss.batch_sums import Sums, read_sums
from paceline.sample_rng import SampleNumbers, find_numbers, number_samples
from paceline.training.checks.batch_parts import (
    ORDERS,
    build_slicers,
    find_cuts,
    gather_detached,
    is_any_rank,
    preserved_rng,
)
from paceline.training.step.step import TrainingStep

NumberedBatch = tuple[Batch, torch.Tensor]  # a batch, and the numbers of its samples
RTOL = {torch.float64: 1e-5, torch.float32: 1e-3}
COARSE_RTOL = 3e-2  # for other dtypes


class FirstSumsCheck:
    """Checks the first sums of a training.

    Call it with the first output and its batch. Call `finish` after the first update, on all ranks.
    samples: of a micro-batch on this rank.
    """

    def __init__(self, step: TrainingStep, samples: int):
        self.step, self.samples = step, samples
        self.wrong: str | None = None  # name of a sum that does not add up
        self.is_unknown = False  # whether the parts of the output are of no use
        self.batch: NumberedBatch | None = None
        self.numbers: SampleNumbers | None = None

    def __call__(self, output: object, batch: Batch) -> None:
        self.numbers = find_numbers(batch)
        self.batch = (batch, torch.as_tensor(self.numbers.numbers))
        if self.samples > 1:
            with torch.no_grad(), preserved_rng(self.step.device):
                self._judge_output(gather_detached(output), self.batch)

    def finish(self) -> None:
        """Raise TaskError on all ranks if sums do not add up. A collective."""
        runs_model = self.step.pipeline is None and is_any_rank(
            self.wrong is not None or self.is_unknown, self.step.device
        )
        if runs_model and self.batch is not None:
            self.wrong = self._judge_model(self.batch)
        self.batch = None
        if is_any_rank(self.wrong is not None, self.step.device):
            name = f" of {self.wrong!r}" if self.wrong is not None else ""
            raise TaskError(
                f"batch_sums() does not add up: the sum{name} over a batch is not that over the parts of the "
                f"batch, so that plan {self.step.plan} trains differently than one process; return sums over "
                "the samples, not means, and compute means in auxiliary_loss(), or use a plan that does not "
                "divide the batch (dp=1 and one micro-batch)"
            )

    def _judge_output(self, output: Any, batch: NumberedBatch) -> None:
        """Compare parts of the output, and their sums, with the whole."""
        try:
            self.wrong = self._try_orders(
                cast_floats(output, torch.float64), cast_floats(batch, torch.float64)
            )
        except Exception:  # these are no parts, or the task cannot compute in float64
            self.is_unknown = True

    def _try_orders(self, output: Any, batch: NumberedBatch) -> str | None:
        """Return the name of a sum that does not add up for any order of samples; None if there is none."""
        whole, wrong = self._compute(output, batch), None
        for order in ORDERS:
            found = []
            for cut in find_cuts(self.samples):
                slicers = build_slicers(self.samples, cut, order)
                parts = [self._compute(slicer(output), slicer(batch)) for slicer in slicers]
                found.append(_find_wrong(whole, parts))
            if not any(found):
                return None
            wrong = wrong or next(filter(None, found))
        return wrong

    def _judge_model(self, batch: NumberedBatch) -> str | None:
        """Compare the sums of the model's output for parts of the batch with those for the whole batch.

        Returns the name of a sum that does not add up. The model runs as in an evaluation: without dropout.
        """
        if self.samples < 2:
            return None
        slicers = build_slicers(self.samples, self.samples // 2, ORDERS[0])
        with evaluation_mode(self.step.model), torch.no_grad(), preserved_rng(self.step.device):
            whole, *parts = [
                self._compute(None, part) for part in (batch, *(slicer(batch) for slicer in slicers))
            ]
        if not whole:  # the model has its auxiliary outputs in training only
            return self.wrong
        return _find_wrong(whole, parts)

    def _compute(self, output: Any, batch: NumberedBatch) -> Sums:
        """Return the sums of a batch with this output; None: with that of the model."""
        assert self.numbers is not None
        numbers = [dataclasses.replace(self.numbers, numbers=batch[1])]
        with seeded_rngs(0), number_samples([batch[0]], numbers):
            if output is None:
                output = gather_detached(self.step.output(batch[0]))
            return read_sums(self.step.task, output, batch[0])


def _find_wrong(whole: Sums, parts: Sequence[Sums]) -> str | None:
    """Return the name of a sum of the whole that is not the sum of those of its parts; None if all are."""
    for name, expected in whole.items():
        if any(part.keys() != whole.keys() or part[name].shape != expected.shape for part in parts):
            return name
        total = torch.stack([part[name].double() for part in parts]).sum(0)
        scale = max(float(expected.abs().max()), float(total.abs().max())) if expected.numel() else 0.0
        rtol = RTOL.get(expected.dtype, COARSE_RTOL if expected.is_floating_point() else 0.0)
        if expected.numel() and float((total - expected.double()).abs().max()) > rtol * scale:
            return name
    return None
