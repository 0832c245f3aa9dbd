"""Reduction of the metrics of several steps."""

import math

import pytest
import torch

from paceline.errors import TaskError
from paceline.training.step.step_metrics import (
    MAX_STEPS_PER_REDUCTION,
    REDUCE_EVERY_S,
    ControlFlags,
    LocalStepStats,
    StepMetrics,
    reduce_metrics_async,
)

CPU = torch.device("cpu")


def local(loss: float, items: float, norm: float | None, expected: float | None = None) -> LocalStepStats:
    return LocalStepStats(torch.tensor(loss), items, [] if norm is None else torch.tensor(norm), expected)


def test_each_step_has_separate_metrics() -> None:
    reduced = reduce_metrics_async(
        [local(6.0, 2.0, 3.0), local(8.0, 4.0, None)], ControlFlags(save=True), 1.0, 1, CPU
    ).result()
    assert reduced.steps == [StepMetrics(3.0, 3.0), StepMetrics(2.0, 0.0)]
    assert reduced.flags == ControlFlags(stop=False, save=True)


def test_norms_are_the_same_as_in_separate_reductions() -> None:
    norms = [list(torch.randn(5, generator=torch.Generator().manual_seed(at)).abs()) for at in range(7)]
    steps = [LocalStepStats(torch.tensor(1.0), 1.0, norm, None) for norm in norms]
    together = reduce_metrics_async(steps, ControlFlags(), 1.0, 1, CPU).result().steps
    assert together == [
        reduce_metrics_async([step], ControlFlags(), 1.0, 1, CPU).result().steps[0] for step in steps
    ]
    assert [metrics.grad_norm for metrics in together] == pytest.approx(
        [math.hypot(*map(float, norm)) for norm in norms], rel=1e-15
    )


@pytest.mark.parametrize(
    ("step_s", "together"),
    [(10 * REDUCE_EVERY_S, 1), (REDUCE_EVERY_S / 4.5, 4), (1e-9, MAX_STEPS_PER_REDUCTION)],
)
def test_quick_steps_share_a_reduction(step_s: float, together: int) -> None:
    assert (
        reduce_metrics_async([local(1.0, 1.0, 1.0)] * 3, ControlFlags(), 3 * step_s, 1, CPU)
        .result()
        .steps_per_reduction
        == together
    )


def test_unexpected_number_of_items_is_refused() -> None:
    pending = reduce_metrics_async([local(1.0, 3.0, 1.0, expected=4.0)], ControlFlags(), 1.0, 1, CPU)
    with pytest.raises(TaskError, match=r"3 items .* expected 4 .* define weights"):
        pending.result()


def test_loss_without_items_is_nan() -> None:
    assert math.isnan(
        reduce_metrics_async([local(0.0, 0.0, 1.0)], ControlFlags(), 1.0, 1, CPU).result().steps[0].loss
    )
