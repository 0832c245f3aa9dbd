"""Faults that are small, rare or gradual are found; noise and warm-up of the same size are not."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.events import Saved
from paceline.inspect.facts import RunFacts, Sibling, StepPoint
from paceline.spec import Save, Spec
from run_facts import (
    make_beats,
    make_evaluations,
    make_facts,
    make_profiles,
    make_steps,
    make_windows,
    outcome_of,
    sentences,
)

PHASES = {"data": 0.01, "forward": 0.02, "backward": 0.02}


def test_waits_that_come_now_and_then_are_found_beside_other_programs() -> None:
    """A rank had no core for a tenth of the time. That explains a tenth of its waiting at most."""
    waits = [0.4 if k % 25 == 0 else 0.001 for k in range(300)]
    steps = make_steps(300, step_s=0.02, data_s=waits)
    seconds = sum(point.step_s for point in steps)
    per_step = {"data": seconds / 600, "forward": seconds / 600}
    for lost, count in ((0.1, 1), (0.6, 0)):
        beats = make_beats(per_step, per_step, steps=300, core_wait_s=lost * seconds)
        assert len(sentences("slow-input", make_facts(steps=steps, beats=beats))) == count, lost


def test_stalls_are_left_out_only_while_they_are_few() -> None:
    free = make_beats(PHASES, PHASES, core_wait_s=0.0)
    for stalls, count in ((4, 0), (20, 1)):
        waits = [2.0 if k % (1000 // stalls) == 100 % (1000 // stalls) else 0.001 for k in range(1000)]
        facts = make_facts(steps=make_steps(1000, step_s=0.02, data_s=waits), beats=free)
        assert len(sentences("slow-input", facts)) == count, stalls


def test_a_first_epoch_that_fills_a_cache_is_no_fault() -> None:
    free = make_beats(PHASES, PHASES, core_wait_s=0.0)
    slow, fast = [0.04] * 100, [0.001] * 150
    early = make_facts(steps=make_steps(250, step_s=0.02, data_s=slow + fast), beats=free)
    assert sentences("slow-input", early) == []
    late = make_facts(steps=make_steps(250, step_s=0.02, data_s=fast + slow), beats=free)
    assert len(sentences("slow-input", late)) == 1


@pytest.mark.parametrize(("ratio", "wait_s", "steps", "count"), [
    (1.3, 0.0, 100, 1),
    (1.3, 0.0, 40, 0),  # too few steps for so little
    (1.3, 1.0, 100, 0),  # the slow rank had no core for 10 ms of a step
    (1.1, 0.0, 100, 0),
    (1.6, 0.0, 30, 1),
])  # fmt: skip
def test_a_rank_that_is_a_little_slower(ratio: float, wait_s: float, steps: int, count: int) -> None:
    even = {"forward": 0.04, "backward": 0.02}
    beats = make_beats(even, even | {"forward": 0.04 * ratio}, steps=steps, core_wait_s=0.0)
    beats = (replace(beats[0], core_wait_s=wait_s), replace(beats[1], core_wait_s=wait_s))
    found = sentences("straggler", make_facts(beats=beats))
    assert len(found) == count
    assert all(sentence.startswith("rank 1 ") for sentence in found)


def make_saves_beside(steps: tuple[StepPoint, ...], every: int, seconds: float) -> tuple[Saved, ...]:
    """Return checkpoints that are written in the background after every so many steps."""
    return tuple(
        Saved(
            time=point.time + seconds, step=point.step, path="", bytes=10**8, seconds=seconds, blocked_s=0.01
        )
        for point in steps[every - 1 :: every]
    )


@pytest.mark.parametrize(("slower", "count"), [(1.0, 0), (1.2, 0), (2.0, 1)])
def test_checkpoints_that_slow_steps_down(slower: float, count: int) -> None:
    """A checkpoint is written during 5 of 10 steps, which take `slower` times as long meanwhile."""
    took = [0.05 * (slower if 0 <= k % 10 < 5 and k >= 10 else 1.0) for k in range(100)]
    ends = [1000.0 + sum(took[: k + 1]) for k in range(100)]
    steps = tuple(
        replace_times(point, end, step_s)
        for point, end, step_s in zip(make_steps(100), ends, took, strict=True)
    )
    saves = make_saves_beside(steps, 10, 0.05 * 5 * slower - 0.01)
    facts = make_facts(steps=steps, saved=saves, length=200, spec=Spec(save=Save(every=10)))
    found = sentences("checkpoint", facts)
    assert len(found) == count
    assert all("slowed its steps" in sentence for sentence in found)


@pytest.mark.parametrize(("seconds", "count"), [(1.4, 1), (0.4, 0)])
def test_checkpoints_that_are_always_being_written(seconds: float, count: int) -> None:
    """One begins every 2 s: there are no other steps to compare with."""
    steps = make_steps(40, step_s=0.5)
    saves = make_saves_beside(steps, 4, seconds)
    facts = make_facts(steps=steps, saved=saves, length=80, spec=Spec(save=Save(every=4)))
    assert len(sentences("checkpoint", facts)) == count
    assert sentences("checkpoint", replace(facts, spec=Spec())) == []


def replace_times(point: StepPoint, time: float, step_s: float) -> StepPoint:
    return point._replace(time=time, step_s=step_s)


def gradual(change: float, noise: float, count: int = 400, seed: int = 1) -> list[float]:
    """Return a loss that falls in the first steps, and then changes steadily by a share of its beginning."""
    draw = random.Random(seed)
    return [1 + change * k / count + 0.2 * math.exp(-k / 10) + draw.gauss(0, noise) for k in range(count)]


@pytest.mark.parametrize(("change", "noise", "count"), [
    (1.0, 0.05, 1),
    (1.0, 0.2, 1),
    (-0.5, 0.05, 0),
    (0.1, 0.05, 0),  # less than a tenth above the beginning
    (0.5, 1.0, 0),  # less than the noise
])  # fmt: skip
def test_a_loss_that_rises(change: float, noise: float, count: int) -> None:
    facts = make_facts(steps=make_steps(400, losses=gradual(change, noise)))
    found = [sentence for sentence in sentences("plateau", facts) if "rose" in sentence]
    assert len(found) == count


def test_a_loss_that_rises_while_evaluations_improve_is_no_fault() -> None:
    """A loss with a term that grows, or samples that become harder."""
    steps = make_steps(400, losses=gradual(1.0, 0.05))
    better = make_evaluations(0.1, every=40, losses=[1 / (k + 1) for k in range(10)])
    worse = make_evaluations(0.1, every=40, losses=[1 + k / 10 for k in range(10)])
    assert sentences("plateau", make_facts(steps=steps, evaluated=better)) == []
    assert len(sentences("plateau", make_facts(steps=steps, evaluated=worse))) == 1


def test_a_learning_rate_that_is_too_large_and_never_comes_back() -> None:
    """The losses stay high and differ by orders of magnitude."""
    for seed in range(5):
        draw = random.Random(seed)
        losses = [1.2, *(draw.lognormvariate(9, 1.0) for _ in range(299))]
        [sentence] = sentences("loss-spike", make_facts(steps=make_steps(300, losses=losses)))
        assert "in the first 10 steps and never came back" in sentence
        overshoot = [1.2, *(4 * math.exp(-k / 30) + draw.gauss(0.5, 0.1) for k in range(299))]
        assert sentences("loss-spike", make_facts(steps=make_steps(300, losses=overshoot))) == []
        short = [1.2, *(30.0 * draw.random() + 10 for _ in range(20))]
        short += [0.5 + 0.1 * draw.random() for _ in range(5000)]
        assert sentences("loss-spike", make_facts(steps=make_steps(5021, losses=short))) == []


def test_a_spike_late_in_a_training_is_small_beside_the_first_losses() -> None:
    for height, count in ((0.5, 1), (0.1, 0)):
        draw = random.Random(1)
        losses = [2.5 * math.exp(-k / 60) + 0.05 + draw.gauss(0, 0.005) for k in range(500)]
        losses[400:404] = [height] * 4
        assert len(sentences("loss-spike", make_facts(steps=make_steps(500, losses=losses)))) == count, height


def test_ranks_that_waited_a_little_for_cores() -> None:
    """Unequal stages show in one profile; ranks that are slower than one rank do not gain without waits."""
    beats = make_beats({"forward": 0.05}, {"forward": 0.05}, core_wait_s=0.4)  # 8 % of the time
    for slowest_s, busy_s, count in ((0.024, 0.0167, 1), (0.0227, 0.0182, 1), (0.0127, 0.0102, 0)):
        profiles = make_profiles(1, slowest_s=slowest_s, busy_s=busy_s)
        assert len(sentences("pipeline", make_facts("pp=2", profiled=profiles, beats=beats))) == count
    waits = make_beats({"forward": 0.05}, {"forward": 0.05}, core_wait_s=0.85)
    for single, count in ((1850.0, 1), (1480.0, 0), (1250.0, 0)):
        one = Sibling("b", "single", 1, 1, single)
        facts = make_facts(threads=1, siblings=(one,), beats=waits)
        outcome = outcome_of("scaling", facts)
        assert (len(outcome) if isinstance(outcome, list) else 0) == count, single


def test_the_end_of_a_recorded_process_does_not_hide_its_leak(tmp_path: Path) -> None:
    """The process frees its memory and needs some seconds to end."""
    leak, end = [200.0 + 10 * k for k in range(50)], [200.0] * 8
    loads = [200.0 + 40 * k for k in range(15)] + [250.0] * 50  # a folder of weights, then trains
    for memory, count in ((leak + end, 1), (loads, 0)):
        windows = make_windows(tmp_path, {"rank0 memory [MiB]": memory}, begin=None, end=None)
        recording = RunFacts(path=Path("samples.csv"), is_recording=True, windows=windows)
        assert len(sentences("memory-growth", recording)) == count
