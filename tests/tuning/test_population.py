"""Population-based training and the median rule."""

import dataclasses
import random
import statistics

import pytest

from command import (
    TASK,
    checkpoint_weights,
    events_of_kind,
    set_sample_delay,
    succeed,
    unequal_tensors,
    write_task,
)
from paceline.events import Ended, Evaluated, EventWriter, Started, Step
from paceline.run import create
from paceline.spec import build
from paceline.tuning.definition import Search, StudyDefinition
from paceline.tuning.journal import Exploited, read_state
from paceline.tuning.objectives import StudyObjective
from paceline.tuning.parameter import parse_parameter
from paceline.tuning.schedulers.median_rule import EvaluationCurve, is_hopeless
from paceline.tuning.schedulers.population import perturb
from paceline.tuning.space import build_space

LENGTH = ("--batch", "16", "--steps", "6", "--device", "cpu", "--set", "validation=20", "--set", "samples=40")


def test_values_that_change_the_model_stay():
    parameters = [
        parse_parameter("lr", "optimizer.lr", float, "log:1e-4:1e-1"),
        parse_parameter("dropout", "set.dropout", float, "float:0:0.5:0.1"),
        parse_parameter("width", "set.width", int, "int:8:64:8"),
        parse_parameter("batch", "batch", int, "16,32"),
        parse_parameter("optimizer", "optimizer.name", str, "adamw,sgd"),
    ]
    definition = StudyDefinition({}, {}, Search(), build_space(parameters))
    values = {"lr": 1e-3, "dropout": 0.4, "width": 32, "batch": 16, "optimizer": "sgd"}
    found = [perturb(definition, values, random.Random(seed)) for seed in range(200)]
    assert {tuple((name, entry[name]) for name in ("width", "batch", "optimizer")) for entry in found} == {
        (("width", 32), ("batch", 16), ("optimizer", "sgd"))
    }
    rates = [entry["lr"] for entry in found]
    assert sum(rate in (pytest.approx(8e-4), pytest.approx(1.25e-3)) for rate in rates) > 100
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert {round(entry["dropout"], 9) for entry in found} <= {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}


@pytest.mark.slow
@pytest.mark.processes
def test_worst_trial_continues_exactly_from_the_best(tmp_path):
    """After a copy, the next loss, computed before any update, is that of the original."""
    write_task(tmp_path)
    words = ("--space", "lr=log:1e-5:1e-1", "--sampler", "quasi-random", "--trials", "4", "--ranks", "2")
    words += ("--scheduler", "pbt", "--rungs", "2")
    succeed("tune", "my.py:Regression", *words, *LENGTH, "--run-dir", "s", at=tmp_path)
    state = read_state(tmp_path / "s" / "events.jsonl")
    assert [trial.state for trial in state.trials.values()] == ["complete"] * 4
    [copied] = [event for event in state.events if isinstance(event, Exploited)]
    losses = [trial.stages[0].metrics["loss"] for trial in state.trials.values()]
    assert copied.trial == losses.index(max(losses))
    assert copied.parent == losses.index(min(losses))
    child, parent = (tmp_path / "s" / "trials" / str(number) for number in (copied.trial, copied.parent))
    assert unequal_tensors(checkpoint_weights(child, 6), checkpoint_weights(parent, 6))
    of_child, of_parent = (
        {event.step: event.loss for event in events_of_kind(run, Step)} for run in (child, parent)
    )
    assert of_child[4] == of_parent[4]
    assert of_child[6] != of_parent[6]
    before = (tmp_path / "s" / "events.jsonl").read_bytes()
    succeed("tune", "s", "--resume", at=tmp_path)
    assert (tmp_path / "s" / "events.jsonl").read_bytes() == before


def curve(*losses: float) -> list[tuple[int, float]]:
    return [(10 * (at + 1), loss) for at, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (curve(5.0), True),
        (curve(3.6), False),
        (curve(5.0, 0.9), False),
        (curve(5.0, 2.0), True),
        (curve(0.5, 9.0), False),
        ([], False),
        (curve(9.0, 9.0, 9.0, 9.0), False),
    ],
    ids=["worse", "equal", "recovered", "stays worse", "was better", "no evaluation", "longer than others"],
)
def test_median_rule(own, expected):
    others = [curve(4.0, 1.0), curve(3.0, 0.8), curve(3.2, 1.2, 0.1), curve(6.0, 3.0)]
    assert statistics.median([4.0, 3.0, 3.2, 6.0]) == 3.6
    assert is_hopeless(own, others) == expected
    assert not is_hopeless(own, others[:3]), "three others are too few"


@pytest.mark.slow
@pytest.mark.processes
def test_hopeless_trial_is_stopped(tmp_path):
    write_task(tmp_path, TASK)
    slow = set_sample_delay(tmp_path / "slow", 0.01)
    words = ("--grid", "lr=0.001,0.002,0.003,0.004,1.0", "--scheduler", "median")
    length = [word if word != "6" else "12" for word in LENGTH]
    options = ("--set", "spec.evaluate_every=2", "--set", "dropout=0.0", "--run-dir", "s")
    succeed("tune", "my.py:Regression", *words, *length, *options, at=tmp_path, SLOW=str(slow))
    trials = read_state(tmp_path / "s" / "events.jsonl").trials
    assert trials[4].state == "pruned"
    assert "worse than the median" in trials[4].message
    assert [trials[number].state for number in range(4)].count("complete") == 4
    run = tmp_path / "s" / "trials" / "4"
    assert events_of_kind(run, Ended)[-1].reason == "stopped"
    assert len(events_of_kind(run, Evaluated)) < 6


def test_curves_and_rungs_count_samples_of_growing_batches(tmp_path):
    """A batch of 16 for 160 samples, then of 32: 10 steps are 160 samples, 15 steps 320."""
    request = {"task": "digits", "steps": 15, "batch": 32, "batch_schedule": "16:160"}
    run = create(tmp_path / "r", *build(request))
    writer = EventWriter(run.events)
    writer.write(dataclasses.replace(STARTED, batch=32, steps=15))
    for step, loss in ((10, 0.5), (15, 0.25)):
        writer.write(Evaluated(step=step, metrics={"loss": loss}, seconds=0.1))
    writer.close()
    curve = EvaluationCurve(run, StudyObjective("min", "loss"))
    assert curve.update()
    assert curve.points == [(160, 0.5), (320, 0.25)]
    assert curve.is_at_end
    definition = StudyDefinition(request, {}, Search(), build_space([]))
    assert definition.limit_length({}, 0.5) == {"steps": 10}
    assert definition.limit_length({}, 0.25) == {"steps": 5}
    constant = StudyDefinition({"task": "digits", "steps": 10, "batch": 32}, {}, Search(), build_space([]))
    assert constant.limit_length({}, 0.5) == {"steps": 5}


STARTED = Started(
    task="digits",
    plan="single",
    ranks=1,
    batch=16,
    step=0,
    steps=4,
    samples=40,
    parameters=1,
    device="cpu",
    precision="fp32",
    threads=1,
)
