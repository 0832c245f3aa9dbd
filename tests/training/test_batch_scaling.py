"""The learning rate and what depends on it grow with the batch, as the papers say."""

import math
import re
from typing import Any

import pytest

import models
from paceline import Spec, events, train
from paceline.errors import SpecError
from paceline.spec import Optimizer, ParamGroup, Schedule
from paceline.training.optimization.batch_scaling import scale_optimizer


def scaled(batch: int, optimizer: Optimizer, **schedule: Any) -> Optimizer:
    return scale_optimizer(Spec(batch=batch, schedule=Schedule(**schedule)), optimizer)


def test_rules() -> None:
    adamw = Optimizer(
        lr=0.01, weight_decay=0.1, groups={"a": ParamGroup(lr=0.5), "b": ParamGroup(lr_scale=2.0)}
    )
    assert scaled(256, adamw) == adamw
    linear = scaled(256, adamw, base_batch=64)
    assert (linear.lr, linear.weight_decay, linear.options) == (0.04, 0.1, adamw.options)
    assert linear.groups == {"a": ParamGroup(lr=2.0), "b": ParamGroup(lr_scale=2.0)}
    root = scaled(256, adamw, base_batch=64, lr_scale="sqrt", scale_betas=True, scale_decay=True)
    assert (root.lr, root.weight_decay) == (0.02, 0.2)
    assert root.options["betas"] == pytest.approx((0.6, 0.996))
    assert root.options["eps"] == pytest.approx(5e-9)
    # per epoch, weights shrink by the same factor: (lr × decay) × steps
    assert root.lr * root.weight_decay / 4 == pytest.approx(adamw.lr * adamw.weight_decay)
    assert scaled(256, adamw, base_batch=64, lr_scale="none").lr == 0.01
    assert scaled(8, Optimizer(name="muon", adamw_lr=0.5), base_batch=2).adamw_lr == 2.0
    assert scaled(32, adamw, base_batch=64, lr_scale="sqrt").lr == pytest.approx(0.01 / math.sqrt(2))


@pytest.mark.parametrize(
    ("optimizer", "schedule", "message"),
    [
        (
            Optimizer(),
            {"scale_betas": True},
            "the batch is 64 × schedule.base_batch, so betas would become -5.4",
        ),
        (
            Optimizer(name="sgd"),
            {"scale_betas": True},
            "schedule.scale_betas applies to optimizers with betas",
        ),
        (
            Optimizer(name="adam"),
            {"scale_decay": True},
            "schedule.scale_decay applies to decoupled weight decay",
        ),
    ],
)
def test_rules_that_do_not_apply_are_refused(optimizer: Optimizer, schedule: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        scaled(64, optimizer, base_batch=1, **schedule)


@pytest.mark.parametrize("key", ["lr_scale", "scale_betas", "scale_decay"])
def test_rules_without_a_base_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"schedule.{key}=.* requires schedule.base_batch"):
        Schedule(**{key: "sqrt" if key == "lr_scale" else True})


def start_and_rates(task: Any, **spec: Any) -> tuple[tuple[str, ...], list[float]]:
    found = list(train(Spec(batch=8, steps=2, **spec), task=task))
    return found[0].notes, [event.lr for event in found if isinstance(event, events.Step)]


def test_a_training_reports_what_it_scales() -> None:
    schedule = Schedule(base_batch=2, lr_scale="sqrt")
    notes, rates = start_and_rates(models.Points(), schedule=schedule, optimizer=Optimizer(lr=0.01))
    assert rates == [0.02, 0.02]
    assert "the batch 8 is 4 × schedule.base_batch=2: lr 0.01 × 2 = 0.02 (sqrt)" in notes


def test_all_that_is_scaled_is_reported() -> None:
    groups = {"*.bias": ParamGroup(lr=0.5, weight_decay=0.2), "*.weight": ParamGroup(lr_scale=2.0)}
    optimizer = Optimizer(name="muon", lr=0.01, adamw_lr=0.003, weight_decay=0.1, groups=groups)
    schedule = Schedule(base_batch=2, lr_scale="sqrt", scale_decay=True)
    notes, _ = start_and_rates(models.Points(), schedule=schedule, optimizer=optimizer)
    assert any(
        note.endswith(
            "base_batch=2: lr 0.01 × 2 = 0.02; adamw_lr 0.003 → 0.006; weight decay 0.1 → 0.2; lr of *.bias "
            "0.5 → 1; weight decay of *.bias 0.2 → 0.4 (sqrt)"
        )
        for note in notes
    ), notes


def test_the_optimizer_of_a_task_is_scaled() -> None:
    plain = start_and_rates(models.OwnOptimizer())[1]
    notes, linear = start_and_rates(models.OwnOptimizer(), schedule=Schedule(base_batch=2))
    assert linear == pytest.approx([4 * rate for rate in plain])
    scaling = [note for note in notes if "base_batch" in note]
    assert len(scaling) == 1
    assert scaling[0].endswith("learning rates of the task's optimizer() × 4 (linear)")
    assert not [note for note in notes if "optimizer.lr" in note]  # nobody set it


@pytest.mark.parametrize("key", ["scale_betas", "scale_decay"])
def test_values_of_the_optimizer_of_a_task_are_not_scaled(key: str) -> None:
    schedule = Schedule(base_batch=7, **{key: True})
    with pytest.raises(
        SpecError, match=f"schedule.{key} applies to the optimizer of the request, and the task"
    ):
        start_and_rates(models.OwnOptimizer(), schedule=schedule)


def test_a_scaled_training_equals_one_with_these_values() -> None:
    def losses(optimizer: Optimizer, schedule: Schedule) -> list[float]:
        spec = Spec(batch=8, steps=4, precision="fp64", optimizer=optimizer, schedule=schedule)
        return [event.loss for event in train(spec, task=models.Points()) if isinstance(event, events.Step)]

    rule = Schedule(base_batch=2, lr_scale="sqrt", scale_betas=True, scale_decay=True)
    by_rule = losses(Optimizer(lr=0.01, weight_decay=0.1), rule)
    by_hand = losses(
        Optimizer(lr=0.02, weight_decay=0.2, betas=(1 - 4 * (1 - 0.9), 1 - 4 * (1 - 0.999)), eps=5e-9),
        Schedule(),
    )
    assert by_rule == by_hand
