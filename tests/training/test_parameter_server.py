"""Training with parameter servers: exactness, staleness, division of weights, resuming."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import drawing
import models
from harness import ranks, relative_difference, to_whole_array, train_on_ranks
from paceline import Spec, Task, train
from paceline.errors import PlanError
from paceline.events import Ended, Evaluated, Event, Started, Step
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save, Schedule
from paceline.tasks.digits import Digits
from paceline.training.checkpoint.stored import load_weights
from paceline.training.init.named_tensors import named_tensors
from paceline.training.parameter_server.partition import ParameterSlice, assign_slices

pytestmark = pytest.mark.processes

ADAMW = Optimizer(name="adamw", lr=1e-2, weight_decay=0.1)
SGD = Optimizer(name="sgd", lr=0.05, momentum=0.9)
CLIPPED = SGD.model_copy(update={"clip": 0.3})
NEVER = Save(minutes=1e9)


def make_spec(optimizer: Optimizer = ADAMW, **fields: Any) -> Spec:
    return Spec(
        **(
            {"steps": 6, "batch": 12, "seed": 3, "precision": "fp64", "optimizer": optimizer, "save": NEVER}
            | fields
        )
    )


def train_on_this_rank(
    task: Task, spec: Spec, plan: str, run: Path | None, stop_at: int | None, slow: int | None
) -> tuple[list[Event], Any]:
    """Train on this rank; rank `slow` sleeps in each step. Return its events and weights."""
    import torch.distributed as dist

    calls = iter(range(10**9))
    built: list[nn.Module] = []
    model = type(task).model

    def keep() -> nn.Module:
        built.append(model(task))
        return built[-1]

    def stop() -> bool:
        if dist.get_rank() == slow:
            time.sleep(0.1)
        return stop_at is not None and next(calls) >= stop_at - 1

    object.__setattr__(task, "model", keep)
    events = list(
        train(spec, parse(plan), task=task, run=RunFolder(run) if run is not None else None, stop=stop)
    )
    return events, {name: to_whole_array(tensor).copy() for name, tensor in named_tensors(built[-1]).items()}


def train_with_servers(
    size: int,
    task: Task,
    spec: Spec,
    plan: str,
    run: Path | None = None,
    stop_at: int | None = None,
    slow: int | None = None,
) -> tuple[list[Event], Any]:
    """Return the events and weights of the first server.

    The weights are whole if there is one server, or if `run` is given and a checkpoint is read.
    """
    if run is not None:
        run.mkdir(exist_ok=True)
    events, weights = ranks(size)(train_on_this_rank, task, spec, plan, run, stop_at, slow)[0]
    if run is not None:
        weights = {
            name: tensor.numpy()
            for name, tensor in load_weights(RunFolder(run).checkpoint(events[-1].step)).items()
        }
    return events, weights


def steps(events: list[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


@pytest.mark.parametrize(
    "task",
    [
        models.Points,
        *[
            pytest.param(task, marks=pytest.mark.slow)
            for task in (
                models.Text,
                models.Idle,
                models.OwnOptimizer,
                models.Images,
                models.Scalar,
                models.Weighed,
                models.Routed,
                drawing.Vae,
            )
        ],
    ],
)
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(ADAMW, id="adamw"), pytest.param(CLIPPED, id="sgd-clip", marks=pytest.mark.slow)],
)
def test_without_staleness_it_matches_one_process(
    task: type[Task], optimizer: Optimizer, tmp_path: Path
) -> None:
    spec = make_spec(optimizer, schedule=Schedule(name="cosine", warmup=16), batch=16)
    expected = train_on_ranks(1, task(), spec, "single")
    for size, plan in (
        (3, "servers=1,microbatches=2"),
        (4, "servers=2"),
        (4, "servers=1"),
    ):  # 16 samples over 3 workers
        events, weights = train_with_servers(
            size, task(), spec, f"parameter-server,staleness=0,{plan}", tmp_path / f"{size}-{plan}"
        )
        assert relative_difference([step.loss for step in steps(events)], expected.losses) < 1e-12
        assert relative_difference([step.grad_norm for step in steps(events)], expected.grad_norms) < 1e-12
        assert (
            max(relative_difference(weights[name], expected.weights[name]) for name in expected.weights)
            < 1e-12
        )


@pytest.mark.slow
def test_stale_gradients_differ() -> None:
    """A control of the comparison above: with staleness, losses differ."""
    spec = make_spec(steps=12)
    events, _ = train_with_servers(3, models.Images(), spec, "parameter-server,staleness=3", slow=2)
    expected = train_on_ranks(1, models.Images(), spec, "single")
    assert relative_difference([step.loss for step in steps(events)], expected.losses) > 1e-6


@pytest.mark.parametrize("staleness", [*[pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)], 3])
def test_staleness_is_bounded(staleness: int) -> None:
    """One worker is slow; the other gets as far ahead as the staleness allows."""
    events, _ = train_with_servers(
        3, models.Images(), make_spec(steps=12), f"parameter-server,staleness={staleness}", slow=2
    )
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert ended.lead == staleness


@pytest.mark.slow
def test_several_servers_match_one_server(tmp_path: Path) -> None:
    """Bit for bit, including large parameters split by row."""
    for optimizer in (ADAMW, SGD):
        results = []
        for size, servers in ((3, 1), (5, 3)):
            plan = f"parameter-server,staleness=0,servers={servers}"
            events, weights = train_with_servers(
                size, models.Images(), make_spec(optimizer), plan, tmp_path / f"{optimizer.name}{servers}"
            )
            results.append(([step.loss for step in steps(events)], weights))
        for losses, weights in results[1:]:
            assert losses == results[0][0]
            assert all(np.array_equal(weights[name], results[0][1][name]) for name in weights)


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (3, "parameter-server,staleness=0"),
        pytest.param(4, "parameter-server,staleness=0,servers=2", marks=pytest.mark.slow),
    ],
)
def test_stop_and_resume_matches_an_undisturbed_run(size: int, plan: str, tmp_path: Path) -> None:
    spec = make_spec(steps=9)
    undisturbed = train_with_servers(size, models.NormedImages(), spec, plan, tmp_path / "undisturbed")[1]
    ended = train_with_servers(size, models.NormedImages(), spec, plan, tmp_path / "stopped", stop_at=4)[0][
        -1
    ]
    assert isinstance(ended, Ended)
    assert ended.reason == "stopped"
    events, weights = train_with_servers(size, models.NormedImages(), spec, plan, tmp_path / "stopped")
    assert isinstance(events[0], Started)
    assert (events[0].step, events[0].ranks) == (ended.step, size)
    assert all(np.array_equal(weights[name], undisturbed[name]) for name in weights)


def test_resume_under_other_plans_and_back(tmp_path: Path) -> None:
    """A training under three plans in turn equals that of one process."""
    spec = make_spec(steps=9)
    for until, (size, plan) in (
        (3, (4, "parameter-server,staleness=0,servers=2")),
        (6, (2, "zero3")),
        (9, (3, "parameter-server,staleness=0")),
    ):
        _, weights = train_with_servers(
            size, models.Images(), spec.model_copy(update={"steps": until}), plan, tmp_path / "run"
        )
    expected = train_on_ranks(1, models.Images(), spec, "single").weights
    assert max(relative_difference(weights[name], expected[name]) for name in expected) < 1e-12


def test_slices_are_balanced_by_bytes() -> None:
    params = {
        "large": torch.zeros(90, 10),
        "one": torch.zeros(10, 10),
        "two": torch.zeros(99),
        "scalar": torch.zeros(()),
    }
    assigned = assign_slices(params, 3, by_row=True)
    load = [sum(slice_.of(params[slice_.name]).numel() for slice_ in slices) for slices in assigned]
    assert sum(load) == 1100
    assert max(load) <= 1.1 * sum(load) / 3
    rows = sorted(slice_ for slices in assigned for slice_ in slices if slice_.name == "large")
    assert [rows[0].begin, *(slice_.end for slice_ in rows)] == [
        0,
        *(slice_.begin for slice_ in rows[1:]),
        90,
    ]
    assert assign_slices(params, 1, by_row=True) == [
        [
            ParameterSlice("large", 0, 90),
            ParameterSlice("one", 0, 10),
            ParameterSlice("two", 0, 99),
            ParameterSlice("scalar", 0, 1),
        ]
    ]
    assert sorted(len(slices) for slices in assign_slices(params, 2, by_row=False)) == [1, 3]
    with pytest.raises(
        PlanError, match="servers=5 requires 5 slices of the weights, got 4; use servers=4 or fewer"
    ):
        assign_slices(params, 5, by_row=False)


def test_fp16_is_refused() -> None:
    with pytest.raises(AssertionError, match="use bf16 or fp32"):
        train_with_servers(2, models.Images(), make_spec(precision="fp16"), "parameter-server")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["parameter-server", "parameter-server,staleness=0"])
def test_digits_reaches_the_accuracy_of_ddp(plan: str) -> None:
    spec = Spec(
        epochs=20,
        batch=64,
        optimizer=Optimizer(lr=2e-3),
        schedule=Schedule(name="cosine"),
        evaluate_every=10**6,
    )
    accuracy = []
    for size, plan_ in ((2, "ddp"), (3, plan)):
        events, _ = ranks(size)(train_on_this_rank, Digits(width=16), spec, plan_, None, None, None)[0]
        accuracy.append(
            next(event.metrics["accuracy"] for event in reversed(events) if isinstance(event, Evaluated))
        )
    assert accuracy[0] > 0.95
    assert accuracy[1] == pytest.approx(accuracy[0], abs=0.01)
