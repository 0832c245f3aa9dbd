"""Rules about the loss and the request find their faults, and not healthy runs close to them."""

import math
import random
from dataclasses import replace

import pytest

from paceline.events import Failed
from paceline.inspect.finding import Missing, NotApplicable
from paceline.spec import Loading, Optimizer, Schedule, Spec
from run_facts import (
    CORES,
    make_evaluations,
    make_facts,
    make_steps,
    outcome_of,
    sentences,
)


def noisy(count: int, level: float, noise: float, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [level + draw.gauss(0, noise) for _ in range(count)]


def test_a_spike_is_found_with_its_steps() -> None:
    losses = [2 * math.exp(-k / 50) + 0.2 + value for k, value in enumerate(noisy(300, 0, 0.03))]
    for k in range(8):
        losses[200 + k] += 4.0 * (1 - k / 8)
    [evidence] = outcome_of("loss-spike", make_facts(steps=make_steps(300, losses=losses)))
    assert evidence.values["step"] == 201
    assert 6 <= evidence.values["steps_lost"] <= 8
    diverged = losses[:200] + noisy(100, 5.0, 0.1)
    [evidence] = outcome_of("loss-spike", make_facts(steps=make_steps(300, losses=diverged)))
    assert evidence.sentence.endswith("and did not come back since")
    assert evidence.share == pytest.approx(100 / 300)


def test_a_jump_to_a_level_with_more_noise_is_found() -> None:
    """Each loss of the new level is four times as large, and so is its noise."""
    draw = random.Random(2)
    before = [0.45 + 1.8 * math.exp(-k / 30) + draw.gauss(0, 0.12) for k in range(150)]
    after = [abs(4 * (0.45 + draw.gauss(0.1, 0.2))) + 0.6 for _ in range(150)]
    [evidence] = outcome_of("loss-spike", make_facts(steps=make_steps(300, losses=before + after)))
    assert 150 <= evidence.values["step"] <= 153
    assert "did not come back" in evidence.sentence


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_a_loss_that_rises_steadily_does_not_jump(noise: float) -> None:
    draw = random.Random(3)
    rising = [0.5 + k / 400 + draw.gauss(0, noise) for k in range(600)]
    assert sentences("loss-spike", make_facts(steps=make_steps(600, losses=rising))) == []


def test_a_learning_rate_that_is_too_large_from_the_beginning_is_found() -> None:
    draw = random.Random(4)
    losses = [2.31, 9e5, *(draw.uniform(1e3, 1e6) for _ in range(30)), *noisy(250, 2.4, 0.08)]
    [evidence] = outcome_of("loss-spike", make_facts(steps=make_steps(282, losses=losses)))
    assert evidence.sentence.startswith("the loss jumped from 2.31 to ")
    assert "in the first 10 steps" in evidence.sentence
    # Batches of one sample: the first loss may be small by chance.
    for seed in range(20):
        draw = random.Random(seed)
        heavy = [1e-4, *(draw.gauss(0, 1.0) ** 2 * math.exp(-k / 60) + 1e-5 for k in range(299))]
        assert sentences("loss-spike", make_facts(steps=make_steps(300, losses=heavy))) == []


def test_a_loss_that_is_not_finite_ends_a_training() -> None:
    failed = Failed(time=1100.0, what="run", step=149, message="the loss is nan", error="DivergedError")
    [evidence] = outcome_of("not-finite", make_facts(failures=(failed,)))
    assert evidence.sentence == "the loss was not finite after step 149, which ended the training"
    assert outcome_of("not-finite", make_facts()) == []
    resumed = replace(failed, time=900.0)
    assert outcome_of("not-finite", make_facts(failures=(resumed,))) == [], "the last start continued"
    other = replace(failed, error="RankError")
    assert outcome_of("not-finite", make_facts(failures=(other,))) == []


def test_one_step_is_a_spike_only_if_its_gradient_is_large() -> None:
    losses = noisy(200, 1.0, 0.05)
    losses[150] = 5.0
    assert sentences("loss-spike", make_facts(steps=make_steps(200, losses=losses))) == []
    norms = [1.0] * 200
    norms[150] = 30.0
    assert len(sentences("loss-spike", make_facts(steps=make_steps(200, losses=losses, norms=norms)))) == 1


@pytest.mark.parametrize("seed", range(10))
def test_noisy_losses_have_no_spike(seed: int) -> None:
    draw = random.Random(seed)
    heavy = [draw.lognormvariate(-2, 1.5) for _ in range(2000)]  # batches of one sample
    assert sentences("loss-spike", make_facts(steps=make_steps(2000, losses=heavy))) == []
    rare = [5 * draw.random() if draw.random() < 0.05 else 0.01 for _ in range(2000)]
    assert sentences("loss-spike", make_facts(steps=make_steps(2000, losses=rare))) == []
    warm = [2 + 0.5 * math.sin(k / 20) + draw.gauss(0, 0.1) for k in range(500)]
    assert sentences("loss-spike", make_facts(steps=make_steps(500, losses=warm))) == []
    rising = [0.5 + k / 500 + draw.gauss(0, 0.1) for k in range(500)]  # the loss of a discriminator
    assert sentences("loss-spike", make_facts(steps=make_steps(500, losses=rising))) == []


def test_a_loss_that_never_moved_is_a_plateau() -> None:
    for losses in (noisy(300, 2.303, 0.02), [2.3026] * 300):
        [evidence] = outcome_of("plateau", make_facts(steps=make_steps(300, losses=losses)))
        assert evidence.sentence.startswith("the loss has not moved in 300 steps: 2.30")


def test_healthy_losses_are_no_plateau() -> None:
    healthy = [
        [0.0] * 300,  # no loss
        [2 * math.exp(-k / 100) + value for k, value in enumerate(noisy(300, 0.1, 0.05))],
        [2 * math.exp(-k / 20) + value for k, value in enumerate(noisy(300, 0.5, 0.05))],  # has converged
        [2.3 - 0.02 * k / 300 + value for k, value in enumerate(noisy(300, 0, 0.005))],  # slow
        [5.0] * 5 + noisy(295, 1.0, 0.1),  # fast
        [max(0.0, 1 - k / 50) for k in range(300)],  # perfect
        # Targets without a signal: only the scale of the outputs is learned, in the first steps.
        [1.0 + 0.4 * math.exp(-k / 8) + value for k, value in enumerate(noisy(300, 0, 0.1))],
    ]
    for number, losses in enumerate(healthy):
        assert sentences("plateau", make_facts(steps=make_steps(300, losses=losses))) == [], number
    early = make_facts(steps=make_steps(300, losses=noisy(300, 2.303, 0.02)), length=10_000)
    assert isinstance(outcome_of("plateau", early), Missing)
    # The loss of training is noisy, and the evaluations improve.
    better = make_evaluations(0.1, every=60, losses=[2.3, 2.2, 2.1, 2.0, 1.9])
    facts = make_facts(steps=make_steps(300, losses=noisy(300, 2.303, 0.02)), evaluated=better)
    assert sentences("plateau", facts) == []


def test_a_run_that_stopped_improving_long_ago_is_a_plateau() -> None:
    losses = [3 * math.exp(-k / 20) + value for k, value in enumerate(noisy(1000, 1.0, 0.02))]
    stale = make_evaluations(0.1, every=80, losses=[1.5, 1.1, 1.0, *[1.0 + k / 100 for k in range(9)]])
    [evidence] = outcome_of("plateau", make_facts(steps=make_steps(1000, losses=losses), evaluated=stale))
    assert evidence.sentence.startswith("the loss and the evaluations have hardly improved since step 401")
    better = make_evaluations(0.1, every=80, losses=[1.5 * 0.9**k for k in range(12)])
    assert sentences("plateau", make_facts(steps=make_steps(1000, losses=losses), evaluated=better)) == []


def test_overflow() -> None:
    norms = [None if k % 5 == 0 else 1.0 for k in range(200)]
    facts = make_facts(steps=make_steps(norms=norms), precision="fp16")
    assert len(sentences("overflow", facts)) == 1
    rare = [None if k % 50 == 0 else 1.0 for k in range(200)]
    assert sentences("overflow", make_facts(steps=make_steps(norms=rare), precision="fp16")) == []
    assert isinstance(outcome_of("overflow", make_facts()), NotApplicable)


def test_precision() -> None:
    lacks = make_facts(precision="bf16", facts={**CORES, "native_precision": 0.0})
    [evidence] = outcome_of("precision", lacks)
    assert evidence.fix.endswith("--precision fp32")
    has = make_facts(precision="bf16", facts={**CORES, "native_precision": 1.0})
    assert sentences("precision", has) == []
    assert isinstance(outcome_of("precision", make_facts(precision="bf16")), Missing)
    assert isinstance(outcome_of("precision", make_facts()), NotApplicable)
    # Older runs have no facts, but the device is published.
    old = make_facts(precision="bf16", device="Tesla V100-SXM2-32GB", facts={})
    assert len(sentences("precision", old)) == 1


def test_options_without_effect() -> None:
    cases = {
        "--tf32": Spec(tf32=True),
        "schedule.floor": Spec(schedule=Schedule(floor=0.1)),
        "schedule.factor": Spec(schedule=Schedule(name="cosine", factor=0.5)),
        "schedule.length": Spec(schedule=Schedule(name="milestones", milestones=(9,), length="2 epochs")),
        "schedule.start": Spec(schedule=Schedule(name="cosine", start=0.5)),
        "data.prefetch": Spec(data=Loading(workers=0, prefetch=4)),
    }
    for name, spec in cases.items():
        [sentence] = sentences("ineffective-option", make_facts(spec=spec))
        assert sentence.startswith(name)
    for spec in (
        Spec(),
        Spec(optimizer=Optimizer(name="sgd", momentum=0.5)),
        Spec(schedule=Schedule(name="cosine", floor=0.1, length=9, warmup=3, start=0.5)),
        Spec(schedule=Schedule(name="plateau", factor=0.5)),
        Spec(schedule=Schedule(name="one-cycle", start=0.5)),
        Spec(data=Loading(workers=2, prefetch=4)),
    ):
        assert sentences("ineffective-option", make_facts(spec=spec)) == []
    gpu = {**CORES, "capability": 80.0}
    device = "NVIDIA A100-SXM4-80GB"
    assert sentences("ineffective-option", make_facts(spec=Spec(tf32=True), device=device, facts=gpu)) == []


def test_threads() -> None:
    [evidence] = outcome_of("threads", make_facts(threads=8))
    assert evidence.fix.endswith("--set spec.threads=2")
    assert sentences("threads", make_facts(threads=2)) == []
    # Four ranks on two cores try a plan; twelve are too many.
    small = {"cores": 2.0, "local_ranks": 4.0}
    assert sentences("threads", make_facts(ranks=4, threads=1, facts=small)) == []
    crowd = {"cores": 2.0, "local_ranks": 12.0}
    assert len(sentences("threads", make_facts(ranks=12, threads=1, facts=crowd))) == 1
    assert isinstance(outcome_of("threads", make_facts(facts={})), Missing)


def test_settings_of_gpus() -> None:
    a100 = {**CORES, "capability": 80.0, "convolutions": 20.0, "cudnn_benchmark": 0.0}
    facts = make_facts(device="NVIDIA A100-SXM4-80GB", facts=a100)
    assert len(sentences("tf32", facts)) == 1
    assert len(sentences("convolutions", facts)) == 1  # fp32 without TF32 does not need channels_last
    reduced = replace(facts, spec=Spec(precision="bf16"), started=replace(facts.started, precision="bf16"))
    assert isinstance(outcome_of("tf32", reduced), NotApplicable)
    assert len(sentences("convolutions", reduced)) == 2
    best = replace(reduced, facts={**a100, "channels_last": 1.0, "cudnn_benchmark": 1.0})
    assert sentences("convolutions", best) == []
    assert isinstance(outcome_of("tf32", make_facts()), NotApplicable)
    assert isinstance(outcome_of("convolutions", make_facts()), NotApplicable)
