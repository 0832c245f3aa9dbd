"""Rules about time and ranks find their faults, and not healthy runs that are close to them."""

import math
from dataclasses import replace

import pytest

from paceline.events import Ended
from paceline.inspect.facts import Sibling
from paceline.inspect.finding import Missing, NotApplicable
from paceline.plan.cost_model.cost import Cost, CostPart, MemoryCost, TimeCost
from paceline.report.breakdown import RunBreakdown
from paceline.report.profile import PredictionReport
from paceline.spec import Loading, Save, Spec
from run_facts import (
    CORES,
    make_beats,
    make_evaluations,
    make_facts,
    make_profiles,
    make_saves,
    make_steps,
    outcome_of,
    sentences,
)


def test_slow_input_names_the_workers_that_suffice() -> None:
    """40 ms of reading beside 10 ms of computing: five workers, 4.4 with the spare, read ahead."""
    faulty = make_facts(steps=make_steps(step_s=0.05, data_s=0.04))
    [evidence] = outcome_of("slow-input", faulty)
    assert evidence.values["workers_needed"] == 5
    assert evidence.share == pytest.approx(0.8)
    assert evidence.fix == "paceline train runs/a/spec.toml --workers 5"
    # With 2 workers, each batch takes 2 steps of 50 ms; the steps could take 30 ms.
    waits = make_facts(
        steps=make_steps(step_s=0.05, data_s=0.02), spec=Spec(data=Loading(workers=2)), facts=CORES
    )
    assert outcome_of("slow-input", waits)[0].values["workers_needed"] == math.ceil(1.1 * 0.1 / 0.03)


def test_input_is_not_slow_in_healthy_runs() -> None:
    assert sentences("slow-input", make_facts(steps=make_steps(step_s=0.05, data_s=0.005))) == []
    # Collating in Python: half of a step of 3 ms.
    assert sentences("slow-input", make_facts(steps=make_steps(1000, step_s=0.003, data_s=0.0015))) == []
    # Two stalls of a file system in 200 steps.
    stalls = [0.001] * 200
    stalls[50] = stalls[120] = 20.0
    assert sentences("slow-input", make_facts(steps=make_steps(step_s=0.05, data_s=stalls))) == []
    # The first steps wait until workers have started.
    first = [1.0] * 5 + [0.001] * 195
    assert sentences("slow-input", make_facts(steps=make_steps(step_s=0.05, data_s=first))) == []


def test_input_of_a_training_that_waits_for_cores() -> None:
    """In every third step, another program has the core while the batch is read."""
    waits = [0.05 if k % 3 == 0 else 0.001 for k in range(200)]
    busy = make_beats({"data": 0.02, "forward": 0.03}, {"data": 0.02, "forward": 0.03}, core_wait_s=1.0)
    free = make_beats({"data": 0.02, "forward": 0.03}, {"data": 0.02, "forward": 0.03}, core_wait_s=0.01)
    steps = make_steps(step_s=0.03, data_s=waits)
    assert sentences("slow-input", make_facts(steps=steps, beats=busy)) == []
    assert len(sentences("slow-input", make_facts(steps=steps, beats=free))) == 1
    assert sentences("slow-input", make_facts(steps=steps)) == []  # of an older version: unknown
    always = make_steps(step_s=0.05, data_s=0.03)
    assert len(sentences("slow-input", make_facts(steps=always, beats=busy))) == 1
    # Workers lose their cores, too: the training waits for 60 % of the time, and had no core for 18 or 40 %.
    workers = Spec(data=Loading(workers=2))
    for wait_s, count in ((0.9, 1), (2.0, 0)):
        beats = make_beats(
            {"data": 0.03, "forward": 0.02}, {"data": 0.03, "forward": 0.02}, core_wait_s=wait_s
        )
        assert len(sentences("slow-input", make_facts(steps=always, beats=beats, spec=workers))) == count


def test_ranks_of_one_machine_that_wait_for_cores_are_no_stragglers() -> None:
    """Rank 1 had no core for 40 ms of each step; on a machine of its own, it would be a straggler."""
    even, late = make_beats({"forward": 0.02, "backward": 0.08}, {"forward": 0.06, "backward": 0.04})
    late = replace(late, core_wait_s=4.0)
    assert sentences("straggler", make_facts(beats=(even, late))) == []
    assert len(sentences("straggler", make_facts(beats=(even, replace(late, host="node2"))))) == 1
    # Of two equal ranks, the other waited more.
    equal = (replace(even, core_wait_s=0.5), replace(even, rank=1, core_wait_s=3.0))
    assert sentences("straggler", make_facts(beats=equal)) == []
    # Both had no core for as long, so that this does not explain the difference.
    assert len(sentences("straggler", make_facts(beats=(replace(even, core_wait_s=4.0), late)))) == 1


def test_slow_input_needs_steps() -> None:
    assert outcome_of("slow-input", make_facts(steps=make_steps(12, data_s=0.04))) == Missing(
        "it needs 10 steps after the first, got 7"
    )
    # Of few steps, a single pause is a large share; their median is not.
    pause = [0.001] * 10 + [1.0, 1.0] + [0.001] * 6
    assert sentences("slow-input", make_facts(steps=make_steps(18, data_s=pause))) == []
    assert len(sentences("slow-input", make_facts(steps=make_steps(18, data_s=0.04)))) == 1
    assert isinstance(outcome_of("slow-input", make_facts(steps=make_steps(40, 0.002, 0.001))), Missing)


def test_waits_of_workers_that_come_in_bursts_are_found() -> None:
    bursts = [0.4 if k % 8 == 0 else 0.0 for k in range(200)]
    facts = make_facts(steps=make_steps(step_s=0.02, data_s=bursts), spec=Spec(data=Loading(workers=8)))
    assert len(sentences("slow-input", facts)) == 1


def test_evaluations() -> None:
    often = make_facts(evaluated=make_evaluations(0.5, every=5))
    [evidence] = outcome_of("evaluation", often)
    assert "every 5 steps" in evidence.sentence
    # 0.5 s are 5 % of the time with 190 steps of 50 ms in between; then rounded up.
    assert evidence.fix.endswith("--set spec.evaluate_every=200")
    rare = make_facts(evaluated=make_evaluations(0.1, every=20))
    assert sentences("evaluation", rare) == []
    # By default, each epoch is evaluated: here an epoch has 5 steps of 50 ms, and an evaluation takes 4.
    epochs = make_evaluations(0.2, every=5)
    assert sentences("evaluation", make_facts(evaluated=epochs)) == []
    chosen = make_facts(evaluated=epochs, spec=Spec(evaluate_every=5))
    assert len(sentences("evaluation", chosen)) == 1
    # Each evaluation is better and saves a checkpoint.
    better = make_facts(evaluated=make_evaluations(0.5, every=5), saved=make_saves(5.0, every=5))
    assert len(sentences("evaluation", better)) == 1
    # Each epoch is evaluated by default, in as much time as a forward pass of a third of a step.
    spec, third = Spec(), make_evaluations(0.45, every=20)
    assert sentences("evaluation", make_facts(evaluated=make_evaluations(0.55, every=20), spec=spec)) == []
    assert len(sentences("evaluation", make_facts(evaluated=make_evaluations(0.9, every=20), spec=spec))) == 1
    assert len(sentences("evaluation", make_facts(evaluated=third, spec=Spec(evaluate_every=20)))) == 1
    # After every second step, 20 % are too much; after every tenth step, they may be wanted.
    for every, expected in ((2, 1), (10, 0)):
        facts = make_facts(evaluated=make_evaluations(0.013 * every, every), spec=Spec(evaluate_every=every))
        assert len(sentences("evaluation", facts)) == expected
    # Two long evaluations: the last is always wanted.
    assert isinstance(outcome_of("evaluation", make_facts(evaluated=make_evaluations(9.0, 100))), Missing)


def test_checkpoints() -> None:
    slow = make_facts(saved=make_saves(0.5), spec=Spec(save=Save(every=20)))
    [evidence] = outcome_of("checkpoint", slow)
    assert evidence.fix == "paceline train runs/a/spec.toml --save-every 500"
    assert sentences("checkpoint", make_facts(saved=make_saves(0.1), spec=Spec(save=Save(every=20)))) == []
    # Better metrics save at each evaluation of a short run of a small model.
    small = make_facts(steps=make_steps(step_s=0.005), saved=make_saves(0.1))
    assert sentences("checkpoint", small) == []
    assert sentences("checkpoint", make_facts(saved=make_saves(0.3))) == []
    [evidence] = outcome_of("checkpoint", make_facts(saved=make_saves(1.0)))
    assert "spec.evaluate_every" in evidence.fix


def test_a_straggler_is_found_by_its_own_time_and_not_by_its_steps() -> None:
    """All ranks take 0.1 s a step, because the all-reduce in the backward pass waits."""
    slow = make_beats(
        {"data": 0.001, "forward": 0.02, "backward": 0.079},
        {"data": 0.001, "forward": 0.06, "backward": 0.039},
    )
    [evidence] = outcome_of("straggler", make_facts(beats=slow))
    assert evidence.sentence.startswith("rank 1 on node1 is busy for 61.0 ms a step, mostly in computing")
    assert evidence.share == pytest.approx(0.4)
    reads = make_beats({"data": 0.05, "forward": 0.02}, {"data": 0.001, "forward": 0.02})
    [evidence] = outcome_of("straggler", make_facts(beats=reads))
    assert "rank 0 on node1 is busy" in evidence.sentence
    assert "input" in evidence.sentence


def test_healthy_ranks_are_no_stragglers() -> None:
    even = make_beats(
        {"data": 0.001, "forward": 0.02, "backward": 0.05},
        {"data": 0.002, "forward": 0.026, "backward": 0.04},
    )
    assert sentences("straggler", make_facts(beats=even)) == []
    # Twice as slow, but by a millisecond.
    tiny = make_beats({"forward": 0.001, "backward": 0.002}, {"forward": 0.0025, "backward": 0.001})
    assert sentences("straggler", make_facts(beats=tiny)) == []
    few = make_beats({"forward": 0.02}, {"forward": 0.06}, steps=10)
    assert isinstance(outcome_of("straggler", make_facts(beats=few)), Missing)
    # Under zero3, the forward pass gathers weights and so waits for other ranks.
    waits = make_beats({"forward": 0.08, "backward": 0.02}, {"forward": 0.02, "backward": 0.08})
    assert isinstance(outcome_of("straggler", make_facts("zero3", beats=waits)), Missing)
    assert sentences("straggler", make_facts("zero3", beats=waits, profiled=make_profiles())) == []
    assert isinstance(outcome_of("straggler", make_facts("single", 1)), NotApplicable)


def test_a_straggler_by_profiles() -> None:
    slow = make_profiles(slowest_s=0.09, busy_s=0.06)
    [evidence] = outcome_of("straggler", make_facts(profiled=slow))
    assert evidence.values["others_s"] == pytest.approx(0.03)
    changing = [replace(profile, slowest=k % 2) for k, profile in enumerate(slow)]
    assert sentences("straggler", make_facts(profiled=tuple(changing))) == []
    assert isinstance(outcome_of("straggler", make_facts(profiled=slow[:2])), Missing)


def test_a_straggler_by_a_single_profile() -> None:
    """A short run has one profiled step, in which the machine may have paused."""
    clear = make_profiles(1, slowest_s=0.08, busy_s=0.05)  # the other rank: 0.02 s
    beats = make_beats({"forward": 0.07}, {"forward": 0.07})
    [evidence] = outcome_of(
        "straggler", make_facts("zero3", profiled=clear, beats=beats, steps=make_steps(100, 0.1))
    )
    assert evidence.sentence.startswith("rank 1")
    for values in (
        {"profiled": clear, "steps": make_steps(100, 0.05)},  # most steps take less than the rank was busy
        {"profiled": make_profiles(1, slowest_s=0.08, busy_s=0.06), "steps": make_steps(100, 0.1)},
    ):
        assert isinstance(outcome_of("straggler", make_facts("zero3", beats=beats, **values)), Missing)
    missing = outcome_of("straggler", make_facts("zero3", beats=beats))
    assert isinstance(missing, Missing), "the forward pass of zero3 waits for other ranks"
    assert "profiles" in missing.reason
    assert outcome_of("straggler", make_facts("zero1", beats=beats)) == []


def test_communication() -> None:
    profiles = make_profiles(communication=0.06)
    [evidence] = outcome_of("communication", make_facts("zero3", profiled=profiles))
    assert evidence.fix.startswith("zero2 sends a third less")
    assert sentences("communication", make_facts(profiled=make_profiles(communication=0.03))) == []
    # Half of the waiting is for a straggler.
    straggler = make_profiles(communication=0.06, slowest_s=0.09, busy_s=0.06)
    assert sentences("communication", make_facts(profiled=straggler)) == []
    # Ranks that share cores wait for each other.
    crowded = make_facts(profiled=profiles, threads=4)
    assert isinstance(outcome_of("communication", crowded), Missing)
    # Other programs use the cores: each rank waits 2.5 s of 10 s for one, which explains 50 of 60 %.
    for wait_s, expected in ((2.5, Missing), (1.0, list), (0.1, list)):
        beats = make_beats({"forward": 0.1}, {"forward": 0.1}, core_wait_s=wait_s)
        assert isinstance(outcome_of("communication", make_facts(profiled=profiles, beats=beats)), expected)
    ended = Ended(step=200, reason="done", communication=0.5)
    assert len(sentences("communication", make_facts(ended=ended))) == 1
    # A single profile of an early step, that took 4 times as long as most steps.
    early, quick = make_profiles(1, communication=0.06), make_steps(step_s=0.025)
    assert isinstance(outcome_of("communication", make_facts(profiled=early, steps=quick)), Missing)
    assert len(sentences("communication", make_facts(profiled=early, steps=make_steps(step_s=0.09)))) == 1
    # It is a share of the time without input: 50 % of 50 of 90 ms.
    waits = make_steps(step_s=0.05, data_s=[0.04] * 200)
    assert sentences("communication", make_facts(ended=ended, steps=waits)) == []


def predict(measured_s: float, predicted_s: float, error: float = 0.1) -> PredictionReport:
    """Return a profile of a step of 0.1 s with this time of computing, next to its prediction."""
    started = make_facts().started
    assert started is not None
    measured = RunBreakdown(
        started=started,
        first=0.0,
        steps=100,
        step_s=0.1,
        seconds={"compute": measured_s, "other": 0.1 - measured_s},
        memory={},
        peak_rank=0,
        profiles=4,
        profiling_share=0.0,
        straggler=None,
        straggler_busy_s=0.0,
        mean_busy_s=0.0,
    )
    parts = (CostPart("products", predicted_s, error),)
    time = TimeCost(parts, flops=1e9, hardware_flops=1e9, tokens=0.0, samples=64.0, peak_flops=1e11)
    return PredictionReport(measured, Cost(time, MemoryCost((), 0, 1e9), 32), cluster="this machine")


def test_the_planner_names_the_plan_that_helps() -> None:
    """Without a prediction, a rule of thumb does; see the negative control."""
    facts = make_facts("zero3", profiled=make_profiles(communication=0.06))
    [evidence] = outcome_of("communication", facts)
    assert evidence.fix.startswith("zero2 sends a third less")
    for best, words in (
        (
            ("zero1", 0.01),
            "--plan zero1, whose steps are predicted to take 10.0 ms on this machine, and those",
        ),
        (("zero1", 0.0395), "no other plan is predicted to be clearly faster"),
    ):
        prediction = replace(predict(0.04, 0.04), best=best)
        [evidence] = outcome_of("communication", replace(facts, prediction=prediction))
        assert words in evidence.fix


def test_computing_far_below_the_roofline() -> None:
    [evidence] = outcome_of("roofline", make_facts(prediction=predict(0.08, 0.01)))
    assert evidence.sentence == (
        "computing takes 80.0 ms a step, 8.0 times the 10.0 ms that this machine needs, at 10.0% of its peak"
    )
    assert evidence.share == pytest.approx(0.7)
    assert sentences("roofline", make_facts(prediction=predict(0.08, 0.05))) == []
    assert sentences("roofline", make_facts(prediction=predict(0.08, 0.03, error=0.9))) == []
    assert sentences("roofline", make_facts(prediction=predict(0.01, 0.001))) == []  # a small part of a step
    refused = PredictionReport(predict(0.08, 0.01).measured, None, "it has several updates")
    reason = Missing("the run cannot be predicted: it has several updates")
    assert outcome_of("roofline", make_facts(prediction=refused)) == reason
    assert isinstance(outcome_of("roofline", make_facts()), Missing)


def test_pipelines() -> None:
    facts = make_facts("pp=2", profiled=make_profiles(slowest_s=0.09, busy_s=0.05, bubble=0.04))
    [evidence] = outcome_of("pipeline", facts)
    assert evidence.sentence.startswith("the stages of the pipeline are unequal: rank 1 (stage 1)")
    assert (
        sentences("pipeline", make_facts("pp=2", profiled=make_profiles(slowest_s=0.06, busy_s=0.05))) == []
    )
    # A rank that lost its core in the profiled step; and one for which the others wait in each step.
    beats = make_beats({"forward": 0.05}, {"forward": 0.05}, core_wait_s=1.0)
    for bubble, expected in ((0.03, 0), (0.05, 1)):
        profiles = make_profiles(slowest_s=0.075, busy_s=0.05, bubble=bubble)
        assert len(sentences("pipeline", make_facts("pp=2", profiled=profiles, beats=beats))) == expected
    few = make_facts("pp=4,microbatches=2", 4, profiled=make_profiles())
    [evidence] = outcome_of("pipeline", few)
    assert evidence.fix.endswith("--plan pp=4,microbatches=16")
    assert isinstance(outcome_of("pipeline", make_facts()), NotApplicable)


def test_scaling() -> None:
    """200 steps of 50 ms with batch 64: 1,280 samples/s on 4 cores."""
    one = Sibling("b", "single", 1, 2, 1200.0)
    [evidence] = outcome_of("scaling", make_facts(ranks=4, threads=2, siblings=(one,)))
    assert (
        "4 ranks train 1.07 times as fast as 1 rank of b (single) with 4 times the cores" in evidence.sentence
    )
    good = Sibling("b", "single", 1, 2, 400.0)
    assert sentences("scaling", make_facts(ranks=4, threads=2, siblings=(good,))) == []
    # As many cores: one rank with 4 threads.
    same = Sibling("b", "single", 1, 4, 1200.0)
    assert isinstance(outcome_of("scaling", make_facts(ranks=4, threads=1, siblings=(same,))), Missing)
    # More threads than cores are no more cores: 4 ranks on the 2 cores of one machine.
    few = {"cores": 2.0, "local_ranks": 4.0}
    assert isinstance(
        outcome_of("scaling", make_facts(ranks=4, threads=2, siblings=(one,), facts=few)), Missing
    )
    # Other programs had the cores: the time of this run says nothing about more ranks.
    crowded = make_beats(*[{"forward": 0.05}] * 4, core_wait_s=1.0)
    outcome = outcome_of("scaling", make_facts(ranks=4, threads=2, siblings=(one,), beats=crowded))
    assert isinstance(outcome, Missing)
    assert "waited for a core" in outcome.reason
    # These waits explain a third of the time, and the ranks are four times too slow.
    some = make_beats(*[{"forward": 0.05}] * 4, core_wait_s=0.4)
    assert len(sentences("scaling", make_facts(ranks=4, threads=2, siblings=(one,), beats=some))) == 1
