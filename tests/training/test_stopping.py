"""A metric or `max_time` ends a training before its length, on all ranks at the same step, also resumed."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest

from command import checkpoint_weights, events_of_kind, succeed, unequal_tensors, write_task
from command import paceline as run_command
from harness import ranks
from paceline import Spec, SpecError, train
from paceline.events import Ended, Evaluated
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Save, Stop
from paceline.training import loop
from paceline.training.stop_policy import StopState, add_evaluation, explain_stop
from paceline.training.train import train as train_rank
from runs import NEVER, STEPS, make_spec, train_run, train_run_on_this_rank

EVERY = 2  # steps between evaluations


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def stopping_spec(task: Path, stop: Stop, save: Save | None = None) -> Spec:
    spec = make_spec(task, validation=17, norm=False, save=save)
    return spec.model_copy(update={"stop": stop, "evaluate_every": EVERY})


def last_counted(values: list[float], patience: int) -> int | None:
    """Return the index of the value at which patience ends a training whose metric should fall."""
    for end in range(patience, len(values)):
        split = end - patience + 1
        if min(values[split : end + 1]) >= min(values[:split]):
            return end
    return None


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize(
    "values", [[3, 2, 1, 1, 1, 1], [1, 2, 3, 0, 4, 4, 4], [5, 4, 3, 2, 1, 0], [2, 3, 1, 3, 1, 1]]
)
def test_patience_counts_evaluations_without_a_better_metric(values, patience):
    for direction, sign in (("min", 1.0), ("max", -1.0)):
        spec = Spec(stop=Stop(metric=f"{direction} score", patience=patience))
        state, end = StopState(f"{direction} score"), None
        for index, value in enumerate(values):
            metrics = {"score": sign * value}
            state = add_evaluation(spec, state, index, metrics)
            if explain_stop(spec, state, metrics) is not None:
                end = index
                break
        assert end == last_counted(values, patience)


def test_small_changes_and_nan_are_not_better():
    spec = Spec(stop=Stop(patience=2, min_delta=0.5))
    state = StopState("min loss")
    for step, value in enumerate([math.nan, 4.0, 3.5, 3.4, math.nan], start=1):
        state = add_evaluation(spec, state, step, {"loss": value})
    assert state == StopState("min loss", 3.4, 4, 1), "3.5 is not better than 4 by more than 0.5"


@pytest.mark.parametrize(
    ("metric", "value", "reaches"),
    [("min loss", 0.5, True), ("min loss", 0.6, False), ("max loss", 0.5, True), ("max loss", 0.4, False)],
)
def test_target_is_reached_in_the_direction_of_the_metric(metric, value, reaches):
    spec = Spec(stop=Stop(metric=metric, target=0.5))
    assert (explain_stop(spec, None, {"loss": value}) is not None) == reaches
    assert explain_stop(spec, None, {"loss": math.nan}) is None
    assert explain_stop(spec, None, {}) is None


def evaluations(events: list) -> list[tuple[int, float]]:
    return [(event.step, event.metrics["loss"]) for event in events if isinstance(event, Evaluated)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "ddp"),
        *[
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in [
                *[(1, "single"), (4, "zero3,microbatches=2"), (2, "zero1"), (2, "tp=2"), (2, "pp=2")],
                *[(2, "local-sgd,period=3"), (3, "parameter-server,staleness=0")],
            ]
        ],
    ],
)
def test_a_metric_ends_a_training_and_a_resumed_one_at_the_same_step(size, plan, task, tmp_path):
    """The target is the lowest or highest loss of the first evaluations, whichever comes later."""
    spec = stopping_spec(task, Stop(), Save(every=EVERY, minutes=NEVER, keep=100))
    undisturbed = train_run(size, spec, plan, tmp_path / "undisturbed")
    found = evaluations(undisturbed)
    assert undisturbed[-1].why == ""

    first = found[:8]
    lowest, highest = min(first, key=lambda pair: pair[1]), max(first, key=lambda pair: pair[1])
    step, target = max(lowest, highest)
    metric = "min loss" if lowest > highest else "max loss"
    ended = train_run(
        size, stopping_spec(task, Stop(metric=metric, target=target)), plan, tmp_path / "target"
    )[-1]
    assert (ended.step, ended.reason) == (step, "done")
    assert ended.why == f"validation loss {target:.6g} reached stop.target={target:g}"
    check_same_weights(tmp_path, "target", step)

    end = last_counted([-loss for _, loss in found], 3)
    assert end is not None
    step, run = found[end][0], tmp_path / "patience"
    spec = stopping_spec(task, Stop(metric="max loss", patience=3))
    assert train_run(size, spec, plan, run, step - 3)[-1].reason == "stopped"
    resumed = train_run(size, spec, plan, run)
    assert 0 < resumed[0].step < resumed[-1].step == step
    best_step, best = max(found[: end + 1], key=lambda pair: pair[1])
    assert resumed[-1].reason == "done"
    assert resumed[-1].why == (
        f"validation loss was not better in 3 evaluations; the best was {best:.6g} at step {best_step}"
    )
    check_same_weights(tmp_path, "patience", step)
    again = train_run(size, spec, plan, run)  # as after a crash before the run recorded its end
    assert [event.step for event in again] == [step, step]
    assert again[-1].why == resumed[-1].why


def check_same_weights(folder: Path, run: str, step: int) -> None:
    expected = checkpoint_weights(folder / "undisturbed", step)
    assert not unequal_tensors(checkpoint_weights(folder / run, step), expected)


def resume_without_state(*args) -> list:
    """Train with a planted fault: the count of evaluations is lost."""

    class Forgetful(loop.StopPolicy):
        def __init__(self, *values):
            super().__init__(*values[:-2], None, values[-1])

    original, loop.StopPolicy = loop.StopPolicy, Forgetful
    try:
        return train_run_on_this_rank(*args)
    finally:
        loop.StopPolicy = original


@pytest.mark.processes
def test_a_lost_count_and_more_patience_change_where_a_resumed_run_ends(task, tmp_path):
    """No change is as large as min_delta, so that the first evaluation, at step 2, remains the best."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    spec = stopping_spec(task, Stop(patience=3, min_delta=1e6))
    assert train_run(1, spec, "single", run, 5)[-1].reason == "stopped"
    shutil.copytree(run, copy)
    lost = ranks(1)(resume_without_state, spec, "single", copy, None, 0.0)[0][-1]
    assert train_run(1, spec, "single", run)[-1].step == 8
    assert lost.step > 8, "negative control: the comparison notices a lost count"
    more = stopping_spec(task, Stop(patience=5, min_delta=1e6))
    longer = train_run(1, more, "single", run)[-1]
    whole = train_run(1, more, "single", tmp_path / "whole")[-1]
    assert (longer.step, longer.reason, longer.why) == (12, "done", whole.why)
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(tmp_path / "whole"))
    other = train_run(1, stopping_spec(task, Stop(metric="max loss", patience=3)), "single", run)
    [note] = [note for note in other[0].notes if "stop.patience" in note]
    assert note.startswith("stop.patience counts evaluations from step 12 on: ")


def train_with_clock(spec: Spec, plan: str, run: Path, elapsed_s: list[float]) -> Ended:
    import os

    rank = int(os.environ["RANK"])
    *_, ended = train_rank(spec, parse(plan), run=RunFolder(run), elapsed_s=elapsed_s[rank])
    return ended


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["ddp", pytest.param("parameter-server", marks=pytest.mark.slow)])
def test_all_ranks_stop_at_the_same_step_when_max_time_is_over(plan, task, tmp_path):
    """Only the clock of rank 0 counts."""
    whole = make_spec(task, validation=17)
    spec = whole.model_copy(update={"max_time": "1h"})
    for name in ("run", "whole"):
        (tmp_path / name).mkdir()
    ends = ranks(2)(train_with_clock, spec, plan, tmp_path / "run", [3600.0, 0.0])
    assert ends[0].reason == "stopped"
    assert ends[0].why == "max_time=1h is over"
    if plan == "ddp":
        assert ends[1] == dataclasses.replace(ends[0], time=ends[1].time, communication=ends[1].communication)
    assert 0 < ends[0].step < STEPS
    assert RunFolder(tmp_path / "run").checkpoints() == [ends[0].step]
    later = ranks(2)(train_with_clock, spec, plan, tmp_path / "run", [0.0, 3600.0])
    assert [(end.step, end.reason, end.why) for end in later] == [(STEPS, "done", "")] * 2
    if plan == "ddp":
        ranks(2)(train_with_clock, whole, plan, tmp_path / "whole", [0.0, 0.0])
        assert not unequal_tensors(
            checkpoint_weights(tmp_path / "run"), checkpoint_weights(tmp_path / "whole")
        )


def test_a_training_without_evaluations_refuses_to_stop_by_a_metric(task):
    spec = make_spec(task, validation=0)
    for stop, words in ((Stop(patience=3), "stop.patience=3 "), (Stop(target=0.5), "stop.target=0.5 ")):
        with pytest.raises(SpecError, match=f"^{words}requires evaluations, but the task has no validation"):
            next(train(spec.model_copy(update={"stop": stop}), device="cpu"))


@pytest.mark.processes
def test_an_early_end_in_the_commands(task, tmp_path):
    words = ("--set", "validation=17", "--set", "spec.evaluate_every=2", "--set", "stop.min_delta=1e6")
    out = succeed(
        *("train", f"{task}:Regression", "--batch", "24", "--steps", "40", "--patience", "2", *words),
        *("--ranks", "1", "--run-dir", "run"),
        at=tmp_path,
    ).out
    why = "validation loss was not better in 2 evaluations; the best was "
    assert f"step 6  done: {why}" in out
    assert succeed("status", "run", at=tmp_path).out.startswith(f"run: done at step 6: {why}")
    assert f"done at step 6: {why}" in succeed("show", "run", at=tmp_path).out
    refused = run_command("resume", "run", at=tmp_path)
    assert (refused.status, refused.out) == (2, "")
    assert f"run is done: it was trained to step 6 ({why}" in refused.err
    assert refused.err.endswith("; train longer with --patience or --target\n")
    succeed("resume", "run", "--patience", "4", at=tmp_path)
    assert [event.step for event in events_of_kind(tmp_path / "run", Ended)] == [6, 10]
