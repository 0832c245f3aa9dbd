"""Local SGD and post-local SGD, whose update differs from that of one process."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
from harness import (
    TrainingResult,
    differences,
    ranks,
    relative_difference,
    to_whole_array,
    train_on_ranks,
    train_on_this_rank,
)
from paceline import Spec, Task, train
from paceline.events import Ended, Evaluated, Event, Started, Step
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save, Schedule
from paceline.tasks.digits import Digits
from paceline.training.checkpoint.stored import load_weights
from paceline.training.init.named_tensors import named_tensors
from paceline.training.step import local_sgd

pytestmark = pytest.mark.processes

PLAIN = Optimizer(name="sgd", lr=0.05, momentum=0.0, weight_decay=0.1)
MOMENTUM = Optimizer(name="sgd", lr=0.05, momentum=0.9)
ADAMW = Optimizer(name="adamw", lr=1e-2, clip=0.5)
TASKS = [models.Points, models.Images, models.Frozen, models.Idle, models.Shared, models.Scalar]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def make_spec(optimizer: Optimizer = ADAMW, **fields: Any) -> Spec:
    return Spec(**({"steps": 7, "batch": 8, "seed": 3, "precision": "fp64", "optimizer": optimizer} | fields))


def without_norms(found: TrainingResult) -> TrainingResult:
    """Leave out the norms, which are defined differently."""
    return replace(found, grad_norms=[])


@pytest.mark.parametrize(
    ("size", "microbatches", "task"),
    [
        *[(2, 1, task) for task in TASKS],
        (4, 2, models.Images),
        *[slow(4, 2, task) for task in TASKS if task is not models.Images],
    ],
)
def test_averaging_after_each_step_equals_ddp(size: int, microbatches: int, task: type[Task]) -> None:
    """For SGD without momentum, the mean of the steps is the step of the mean gradient."""
    spec = make_spec(PLAIN, schedule=Schedule(name="cosine", warmup=12))
    found = train_on_ranks(size, task(), spec, f"local-sgd,period=1,microbatches={microbatches}")
    expected = train_on_ranks(size, task(), spec, f"ddp,microbatches={microbatches}")
    assert not differences(without_norms(found), without_norms(expected), 1e-12)
    assert relative_difference(found.grad_norms, expected.grad_norms) > 1e-3
    assert np.greater(found.grad_norms, expected.grad_norms).all(), (
        "the gradient of a mean is no longer than their mean square"
    )


@pytest.mark.parametrize("plan", [slow("local-sgd,period=2"), "post-local-sgd,period=1,switch=3"])
@pytest.mark.parametrize("optimizer", [slow(PLAIN), MOMENTUM, ADAMW], ids=["sgd", "momentum", "adamw"])
def test_other_settings_differ_from_ddp(plan: str, optimizer: Optimizer) -> None:
    found = train_on_ranks(2, models.Images(), make_spec(optimizer), plan)
    expected = train_on_ranks(2, models.Images(), make_spec(optimizer), "ddp")
    same = optimizer != ADAMW and "period=1" in plan  # momentum is linear too
    assert bool(differences(without_norms(found), without_norms(expected), 1e-12)) != same
    assert "not the update of one process" in found.notes[0]


@pytest.mark.parametrize(
    ("microbatches", "task"),
    [
        *[(1, models.Text), (2, models.NormedImages), (2, models.Idle)],
        *[slow(1, task) for task in (models.Images, models.NormedImages, models.Idle)],
        *[slow(2, task) for task in (models.Images, models.Text)],
    ],
)
def test_equals_ddp_until_the_switch(microbatches: int, task: type[Task]) -> None:
    """All bits are equal, including BatchNorm over all ranks."""
    plan = f"post-local-sgd,period=2,switch=5,microbatches={microbatches}"
    expected = train_on_ranks(2, task(), make_spec(), f"ddp,microbatches={microbatches}")
    found = train_on_ranks(2, task(), make_spec(), plan)
    before = TrainingResult(expected.losses[:5], expected.grad_norms[:5], expected.lrs[:5], [], {}, ())
    assert not differences(
        TrainingResult(found.losses[:5], found.grad_norms[:5], found.lrs[:5], [], {}, ()), before, 0.0
    )
    assert found.losses[5] == expected.losses[5] or task is models.NormedImages  # before its update
    assert found.losses[6] != expected.losses[6]
    ended = train_on_ranks(2, task(), make_spec(steps=5, schedule=Schedule()), plan)
    assert not differences(
        ended, train_on_ranks(2, task(), make_spec(steps=5), f"ddp,microbatches={microbatches}"), 0.0
    )


def train_on_one_process(task: Task, spec: Spec, size: int, period: int) -> dict[str, np.ndarray]:
    """Compute local SGD of several ranks on one process, with torch only."""
    from paceline.data.batch_slices import RankBatchSlice
    from paceline.data.order import shuffle
    from paceline.training.init.deferred_init import fill_, record

    copies, optimizers = [], []
    for _ in range(size):
        model, weights, _recorded = record(task.model, spec.seed)
        model._apply(lambda tensor: tensor.double())
        fill_(model, weights, torch.device("cpu"))
        copies.append(model)
        optimizers.append(
            torch.optim.SGD(model.parameters(), lr=spec.optimizer.lr, momentum=spec.optimizer.momentum)
        )
    samples = task.dataset("train")
    assert samples is not None
    for step in range(spec.steps or 0):
        for rank in range(size):
            indices = shuffle(
                RankBatchSlice(spec.batch, 1, rank, size).numbers(step).ravel(), len(samples), spec.seed
            )
            batch = torch.utils.data.default_collate([samples[i] for i in indices.tolist()])
            batch = [item.double() if item.is_floating_point() else item for item in batch]
            losses = task.loss(copies[rank](batch[0]), batch)
            weights_of = task.weights(batch)
            (
                losses.mean() if weights_of is None else (losses * weights_of).sum() / weights_of.sum()
            ).backward()
            nn.utils.clip_grad_norm_(copies[rank].parameters(), spec.optimizer.clip or 1e9)
            optimizers[rank].step()
            optimizers[rank].zero_grad()
        if (step + 1) % period == 0 or step + 1 == spec.steps:
            means = [
                torch.stack(same).mean(0)
                for same in zip(*(copy.parameters() for copy in copies), strict=True)
            ]
            for copy in copies:
                for parameter, mean in zip(copy.parameters(), means, strict=True):
                    parameter.data.copy_(mean)
    return {name: tensor.detach().numpy() for name, tensor in named_tensors(copies[0]).items()}


@pytest.mark.parametrize(("task", "size"), [(models.Images, 2), (models.Weighed, 2), slow(models.Points, 4)])
def test_matches_a_plain_implementation(task: type[Task], size: int) -> None:
    """Compare with a few lines on one process: momentum and clipping per rank, item weights within a rank."""
    spec = make_spec(Optimizer(name="sgd", lr=0.05, momentum=0.9, clip=0.2), batch=16)
    expected = train_on_one_process(task(), spec, size, 3)
    found = train_on_ranks(size, task(), spec, "local-sgd,period=3").weights
    assert max(relative_difference(found[name], expected[name]) for name in expected) < 1e-12
    another = train_on_one_process(task(), spec, size, 2)
    assert max(relative_difference(found[name], another[name]) for name in another) > 1e-6


def weights_after(task: Task, spec: Spec, plan: str) -> list[dict[str, np.ndarray]]:
    """Return the weights of this rank after each step, averaged if the step ends a period."""
    seen: list[dict[str, np.ndarray]] = []
    after = local_sgd.LocalSgd.after_step

    def record(self: local_sgd.LocalSgd, step: int) -> None:
        after(self, step)
        seen.append(
            {name: tensor.detach().clone().numpy() for name, tensor in named_tensors(self.model).items()}
        )

    local_sgd.LocalSgd.after_step = record  # type: ignore[method-assign]
    try:
        train_on_this_rank(task, spec, plan)
    finally:
        local_sgd.LocalSgd.after_step = after  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("size", "plan", "averaged"),
    [(2, "local-sgd,period=3", (3, 6)), (4, "post-local-sgd,period=2,switch=3", (5, 7))],
)
def test_all_ranks_are_equal_after_averaging(size: int, plan: str, averaged: tuple[int, ...]) -> None:
    """All bits are equal, including the statistics of BatchNorm. Between averagings ranks differ."""
    first, *others = ranks(size)(weights_after, models.NormedImages(), make_spec(batch=16), plan)
    for step, weights in enumerate(first, 1):
        together = step in averaged or step <= (parse(plan).switch or 0)
        for other in others:
            same = [np.array_equal(weights[name], other[step - 1][name]) for name in weights]
            assert all(same) == together, f"after step {step}"


def on_this_rank(
    task: Task, spec: Spec, plan: str, run: Path, stop_at: int | None = None
) -> tuple[list[Event], dict[str, np.ndarray]]:
    calls = iter(range(10**9))
    trained_here: list[nn.Module] = []

    def observe(model: nn.Module, what: str, step: int) -> None:
        trained_here[:] = [model]

    def stop() -> bool:
        return stop_at is not None and next(calls) >= stop_at - 1

    events = list(train(spec, parse(plan), task=task, run=RunFolder(run), stop=stop, observe=observe))
    return events, {name: to_whole_array(tensor) for name, tensor in named_tensors(trained_here[0]).items()}


def run(size: int, task: Task, spec: Spec, plan: str, path: Path, stop_at: int | None = None) -> list[Any]:
    path.mkdir(exist_ok=True)
    return ranks(size)(on_this_rank, task, spec, plan, path, stop_at)


STOPPED = [
    slow(2, "local-sgd,period=4", 6),
    slow(2, "post-local-sgd,period=3,switch=4", 2),
    (2, "post-local-sgd,period=3,switch=4", 8),
]


@pytest.mark.parametrize(("size", "plan", "stop_at"), STOPPED)
def test_stop_and_resume_change_nothing(size: int, plan: str, stop_at: int, tmp_path: Path) -> None:
    """All bits are equal, also after a stop within a period, with evaluations and saves."""
    spec = make_spec(steps=14, save=Save(minutes=1e9), evaluate_every=100)
    through = run(size, models.NormedImages(), spec, plan, tmp_path / "through")
    often = spec.model_copy(update={"save": Save(every=2, minutes=1e9), "evaluate_every": 3})
    stopped = run(size, models.NormedImages(), often, plan, tmp_path / "stopped", stop_at)
    last = stopped[0][0][-1]
    assert isinstance(last, Ended)
    assert last.reason == "stopped"
    resumed = run(size, models.NormedImages(), often, plan, tmp_path / "stopped")
    started = resumed[0][0][0]
    assert isinstance(started, Started)
    assert started.step == last.step
    assert not any("mean" in note for note in started.notes)
    for (_, found), (_, expected) in zip(resumed, through, strict=True):
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    kept = load_weights(RunFolder(tmp_path / "stopped").checkpoint(14))
    assert all(np.array_equal(kept[name].numpy(), weights) for name, weights in through[0][1].items())


@pytest.mark.parametrize(
    ("size", "plan"),
    [(2, "zero3"), slow(1, "single"), slow(2, "ddp"), slow(4, "local-sgd,period=4")],
)
def test_other_plans_resume_from_the_mean(size: int, plan: str, tmp_path: Path) -> None:
    spec = make_spec(steps=6, save=Save(minutes=1e9))
    run(2, models.Images(), spec, "local-sgd,period=4", tmp_path / "run")
    mean = load_weights(RunFolder(tmp_path / "run").checkpoint(6))
    (events, weights), *_ = run(
        size, models.Images(), spec.model_copy(update={"steps": 7}), plan, tmp_path / "run"
    )
    assert events[0].step == 6
    assert any("from their mean" in note for note in events[0].notes)
    found = next(event.loss for event in events if isinstance(event, Step))
    copy = tmp_path / "again"
    shutil.copytree(tmp_path / "run", copy)
    shutil.rmtree(copy / "ckpt" / "step_7")
    (again, _), *_ = run(1, models.Images(), spec.model_copy(update={"steps": 7}), "single", copy)
    assert found == pytest.approx(next(event.loss for event in again if isinstance(event, Step)), rel=1e-12)
    assert all(relative_difference(weights[name], mean[name].numpy()) > 0 for name in mean) or plan == "zero3"


def test_resumes_from_a_checkpoint_of_another_plan(tmp_path: Path) -> None:
    spec = make_spec(steps=4, save=Save(minutes=1e9))
    run(2, models.Images(), spec, "zero3", tmp_path / "run")
    (events, _), *_ = run(
        2, models.Images(), spec.model_copy(update={"steps": 9}), "local-sgd,period=2", tmp_path / "run"
    )
    assert events[0].step == 4
    assert isinstance(events[-1], Ended)


def test_fp16_is_refused() -> None:
    with pytest.raises(AssertionError, match="use bf16 or fp32"):
        ranks(2)(train_on_this_rank, models.Images(), make_spec(precision="fp16"), "local-sgd")


@contextmanager
def never_averaged() -> Iterator[None]:
    """Negative control: do not average the ranks."""
    original = dist.all_reduce
    from torch.distributed.algorithms.model_averaging import utils

    average, utils.average_parameters = utils.average_parameters, lambda params, group: None
    try:
        yield
    finally:
        utils.average_parameters, dist.all_reduce = average, original


def test_missing_averaging_is_detected() -> None:
    with pytest.raises(AssertionError, match="differs from the others"):
        train_on_ranks(2, models.Images(), make_spec(PLAIN), "local-sgd,period=1", never_averaged)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["local-sgd,period=8", "post-local-sgd,period=8,switch=40"])
def test_digits_are_learnt_equally_well(plan: str) -> None:
    spec = Spec(
        epochs=10,
        batch=64,
        optimizer=Optimizer(lr=3e-3),
        schedule=Schedule(name="cosine"),
        evaluate_every=10**6,
    )
    accuracy = {}
    for name in ("ddp", plan):
        events = ranks(2)(events_of, Digits(width=16), spec, name)[0]
        accuracy[name] = next(
            event.metrics["accuracy"] for event in reversed(events) if isinstance(event, Evaluated)
        )
    assert accuracy["ddp"] > 0.95
    assert accuracy[plan] == pytest.approx(accuracy["ddp"], abs=0.01)


def events_of(task: Task, spec: Spec, plan: str) -> list[Event]:
    return list(train(spec, parse(plan), task=task))
