"""verify accepts equal trainings, and finds, names and locates planted faults."""

import dataclasses
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import faults
import models
from command import paceline, start, succeed, write_task
from paceline import Plan, Spec
from paceline.errors import PlanError, TaskError
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import parse
from paceline.plan.search.candidates import enumerate_candidates
from paceline.spec import Optimizer
from paceline.verify.compare import (
    Difference,
    estimate_factor,
    find_axis,
    scalar_difference,
    tensor_difference,
)
from paceline.verify.disable_dropout import disable_dropout_
from paceline.verify.report import describe_conditions, describe_difference, format_verdict, max_difference
from paceline.verify.run import Verdict, Verification, choose_batch

pytestmark = pytest.mark.processes


def spec(task: str, **more: Any) -> Spec:
    return Spec(task=f"{task}" if ":" in task else f"models:{task}", batch=8, steps=3, seed=3, **more)


CLIPPED = Optimizer(name="sgd", lr=0.05, clip=0.1)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def text(two: Ranks) -> Iterator[Verification]:
    with Verification(spec("Text"), two) as verification:
        yield verification


@pytest.fixture(scope="module")
def clipped(two: Ranks) -> Iterator[Verification]:
    with Verification(spec("Text", optimizer=CLIPPED), two) as verification:
        yield verification


@pytest.mark.parametrize(
    "plan", ["ddp", "zero1", "zero2,microbatches=2", "zero3", "hsdp", "ddp,recompute=full"]
)
def test_equal_trainings_are_accepted(text: Verification, plan: str) -> None:
    verdict = text.verify(parse(plan))
    assert verdict.same
    assert verdict.first is None
    assert len(verdict.rows) == 3
    assert max_difference(verdict) < 1e-12
    assert "same training" in format_verdict(verdict)


FAULTS = [
    # plan, fault, step, what, name, factor, axis
    ("ddp", faults.gradient_times_data_ranks, 1, "gradient", "tokens.weight", 2.0, "dp"),
    ("zero3", faults.gradient_times_data_ranks, 1, "gradient", "tokens.weight", 2.0, "dp"),
    ("zero2", faults.gradient_over_data_ranks, 1, "gradient", "tokens.weight", 0.5, "1 / dp"),
    (
        "ddp,microbatches=4",
        faults.gradient_times_microbatches,
        1,
        "gradient",
        "tokens.weight",
        4.0,
        "microbatches",
    ),
    ("ddp", faults.gradient_doubled_on_last_rank, 1, "gradient", "tokens.weight", 2.0, "dp"),
    ("zero1", faults.gradient_times_data_ranks_before_update, 1, "norm", "", 2.0, "dp"),
    ("ddp", faults.no_sync, 1, "gradient", "tokens.weight", ..., None),
    ("zero3", faults.no_sync, 1, "gradient", "tokens.weight", None, None),
    ("ddp", faults.block_dropped, 0, "parameter", "blocks.1.norm.weight", None, None),
    ("ddp", faults.block_skipped, 1, "gradient", "blocks.1.norm.weight", None, None),
    ("zero3", faults.shards_with_equal_seeds, 0, "parameter", "tokens.weight", ..., None),
    ("hsdp,replicate=1", faults.shards_with_equal_seeds, 0, "parameter", "tokens.weight", ..., None),
    ("zero3", faults.norm_of_one_shard, 1, "norm", "", ..., None),
    ("ddp", faults.replicated_norm_counted_on_each_rank, 1, "norm", "", math.sqrt(2), "√dp"),
]


@pytest.mark.parametrize(
    ("plan", "fault", "step", "what", "name", "factor", "axis"),
    FAULTS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_faults_are_found(
    text: Verification, plan: str, fault: Any, step: int, what: str, name: str, factor: Any, axis: Any
) -> None:
    verdict = text.verify(parse(plan), fault)
    assert not verdict.same
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.what, verdict.first.name, verdict.axis) == (
        step,
        what,
        name,
        axis,
    )
    if factor is ...:
        assert verdict.first.factor != pytest.approx(1, abs=1e-6)
    else:
        assert verdict.first.factor == (pytest.approx(factor, rel=1e-9) if factor is not None else None)
    assert verdict.as_json()["first_difference"]["axis"] == axis
    if fault is faults.gradient_times_data_ranks:
        assert (
            describe_difference(verdict)
            == "the gradient of tokens.weight is 2.000 times that of one process from step 1 on: "
            "the degree of dp"
        )
    if fault is faults.gradient_doubled_on_last_rank:
        assert "tokens.weight on rank 1 is 2.000 times" in describe_difference(verdict)
    assert text.verify(parse(plan)).same  # the fault is removed


def test_a_norm_of_shards_is_found_where_it_clips(clipped: Verification) -> None:
    assert clipped.verify(parse("zero3")).same
    verdict = clipped.verify(parse("zero3"), faults.norm_of_one_shard)
    assert verdict.first is not None
    assert verdict.first.what == "norm"
    assert verdict.rows[0].gradient_difference < 1e-12
    assert verdict.rows[0].parameter_difference > 1e-10


def test_a_missing_gradient_differs_from_zero(two: Ranks) -> None:
    with Verification(spec("Idle"), two) as idle:
        assert idle.verify(parse("zero3")).same
        verdict = idle.verify(parse("ddp"), faults.zeros_for_missing_gradients)
    assert verdict.first is not None
    assert verdict.first.name == "spare"
    assert "has a gradient, but with one process it has none" in describe_difference(verdict)


@pytest.mark.parametrize(
    "fault", [pytest.param(faults.hang, marks=pytest.mark.slow), faults.die, faults.fail]
)
def test_failing_ranks_fail_one_verdict_only(two: Ranks, fault: Any) -> None:
    with Verification(spec("Points"), two, timeout_s=5.0 if fault is faults.hang else 60.0) as points:
        verdict = points.try_verify(parse("ddp"), fault)
        assert not verdict.same
        assert verdict.failed is not None
        expected = {
            faults.hang: "",
            faults.die: "rank 1 failed: it was killed by SIGKILL",
            faults.fail: "rank 1 failed: IndexError",
        }
        assert expected[fault] in verdict.failed
        assert verdict.as_json()["same"] is False
        points.timeout_s = 60.0
        assert points.try_verify(parse("zero3")).same


def test_the_reference_uses_micro_batches_if_they_change_the_training(two: Ranks) -> None:
    with Verification(spec("NormedImages"), two) as normed:
        assert normed.verify(parse("zero3,microbatches=2")).same
        assert any("BatchNorm" in line for line in describe_conditions(normed.reference()))
        assert normed.references.keys() == {1, 2}
    with Verification(spec("test_verify:Summed"), two) as summed:
        verdict = summed.verify(parse("ddp,microbatches=2"))
        assert summed.depends_on_microbatches
        assert (
            "not the same training as one process with microbatches=2: "
            "the gradient of 0.weight is 0.500 times" in format_verdict(verdict)
        )
        assert "one over the degree of dp" in format_verdict(verdict)


class Summed(models.Points):
    """A sum over the samples, although a scalar loss must be their mean: a common mistake."""

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output - batch[1]).square().sum()


class Dropping(models.Points):
    functional: bool = False

    def model(self) -> nn.Module:
        return Drops(self.functional)


class Drops(nn.Module):
    def __init__(self, functional: bool):
        super().__init__()
        self.functional = functional
        self.first, self.drop, self.last = nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        return self.last(F.dropout(x, 0.5, self.training) if self.functional else x)


class Upcast(models.Points):
    """Norms in float32, as those of Gemma and Llama."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 16), Rms(16), nn.Tanh(), nn.Linear(16, 16), Rms(16), nn.Linear(16, 3)
        )


class Rms(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (normed * (1 + self.weight.float())).type_as(x)


class BiasBeforeNorm(models.Points):
    """A gradient that is 0 except for rounding, which Adam amplifies to whole steps."""

    single: bool = False

    def model(self) -> nn.Module:
        after = [Rms(8)] if self.single else []
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), *after, nn.Linear(8, 3))


class IllConditioned(models.Points):
    """A chaotic map doubles differences in each iteration, so rounding changes its gradients by 1e-8."""

    iterations: int = 28

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), Chaotic(self.iterations), nn.Linear(8, 3)
        )


class Chaotic(nn.Module):
    def __init__(self, iterations: int):
        super().__init__()
        self.iterations = iterations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        for _ in range(self.iterations):
            x = 3.9 * x * (1 - x)
        return x


class NoKernel(models.Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), Kernel(), nn.Linear(8, 3))


class Kernel(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("grouped_mm is not implemented for Double")
        return x.tanh()


class Broken(NoKernel):
    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        raise RuntimeError("fails in every dtype")


class Mixing(models.Points):
    """A loss that depends on the whole batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)), nn.Linear(5, 3))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output - output.mean(0) - batch[1]).square().mean(-1)


HARSH = Optimizer(name="adamw", lr=0.05, eps=1e-14)
PLANTED = (faults.gradient_times_1_001, faults.weights_times_1_01_on_last_rank)


@pytest.mark.parametrize(
    ("name", "fields", "optimizer", "plans", "message"),
    [
        (
            "Upcast",
            {},
            Optimizer(),
            ("ddp", "zero3", "ddp,microbatches=2"),
            "the model casts to float32 inside of float64",
        ),
        ("BiasBeforeNorm", {}, HARSH, ("ddp", "zero1"), "BatchNorm computes its statistics"),
        (
            "BiasBeforeNorm",
            {"single": True},
            HARSH,
            ("ddp",),
            "the model casts to float32 inside of float64",
        ),
        (
            "NoKernel",
            {},
            Optimizer(),
            ("ddp", "zero3"),
            "float64 cannot be computed (the forward pass raised NotImplementedError: "
            "grouped_mm is not implemented for Double",
        ),
    ],
    ids=["float32 inside", "zero gradient", "both", "no kernel"],
)
def test_rounding_is_accepted_and_a_small_fault_is_found(
    two, name, fields, optimizer, plans, message
) -> None:
    with Verification(spec(f"test_verify:{name}", set=fields, optimizer=optimizer), two) as verification:
        for plan in plans:
            verdict = verification.verify(parse(plan))
            assert verdict.same, (plan, describe_difference(verdict))
        assert any(message in line for line in describe_conditions(verification.reference())), (
            describe_conditions(verification.reference())
        )
        for fault in PLANTED:
            verdict = verification.verify(parse(plans[0]), fault)
            assert not verdict.same, (fault, format_verdict(verdict))
            assert "0.0e+00 times" not in describe_difference(verdict)


def test_an_ill_conditioned_model_is_accepted_and_measured(two: Ranks) -> None:
    sgd = Optimizer(name="sgd", lr=0.1)
    with Verification(spec("test_verify:IllConditioned", optimizer=sgd), two) as checked:
        verdict = checked.verify(parse("tp=2"))
        assert verdict.same, describe_difference(verdict)
        assert verdict.max_difference("gradient_difference") > verdict.tolerance
        assert "to which one process amplifies rounding too" in format_verdict(verdict)
        assert max(checked.reference().amplified[1].values()) < 1e-6
        faulty = checked.verify(parse("tp=2"), faults.gradient_times_1_001)
        assert faulty.first is not None
        assert (faulty.first.what, faulty.first.step) == ("gradient", 1)
    with Verification(
        spec("test_verify:IllConditioned", set={"iterations": 0}, optimizer=sgd), two
    ) as checked:
        # Without iterations, measuring does not widen the tolerance.
        verdict = checked.verify(parse("ddp"), faults.gradient_times_1_000001)
        assert verdict.first is not None
        assert (verdict.first.what, verdict.first.step) == ("gradient", 1)
        assert max(checked.reference().amplified[1].values()) < checked.reference().tolerance


class Counting(models.Points):
    """The whole model changes buffers between its parts, so that only one stage can change them."""

    times: float = 1.0  # another value is a fault with several ranks

    def model(self) -> nn.Module:
        return Counted(self.times)


class Counted(nn.Module):
    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.last = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:1]:
            x = torch.tanh(layer(x))
        times = (
            self.times
            if torch.distributed.get_world_size() > 1 and torch.distributed.get_rank() == 0
            else 1.0
        )
        self.mean.add_(x.detach().sum(0) * times)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return self.last(x)


def test_buffers_are_compared_on_their_stage(two: Ranks) -> None:
    with Verification(spec("test_verify:Counting"), two) as counting:
        verdict = counting.verify(parse("pp=2"))
        assert verdict.same, describe_difference(verdict)
    with Verification(spec("test_verify:Counting", set={"times": 2.0}), two) as counting:
        verdict = counting.verify(parse("pp=2"))
        assert not verdict.same
        assert describe_difference(verdict).startswith(
            "the buffer mean is 2.000 times that of one process from step 1 on"
        )


@pytest.mark.parametrize("kind", ["buffers", "late buffer"])
def test_buffers_of_every_kind_are_compared(two: Ranks, kind: str) -> None:
    with Verification(spec("unprepared:Unprepared", set={"kind": kind}), two) as verification:
        for plan in ("ddp", "zero3"):
            verdict = verification.verify(parse(plan))
            assert verdict.same, describe_difference(verdict)


class NormedStages(models.Images):
    def model(self) -> nn.Module:
        layers = [
            nn.Sequential(nn.Conv2d(inputs, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh())
            for inputs in (1, 2, 2, 2)
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 7))


@pytest.mark.slow
def test_batch_norm_of_stages_uses_all_data_ranks() -> None:
    """BatchNorm in the stages of a pipeline, each on several data ranks."""
    with Ranks(4) as four, Verification(spec("test_verify:NormedStages"), four) as verification:
        for plan in (
            "pp=2",
            "pp=2,microbatches=2",
            "pp=2,zero=1",
            "pp=2,zero=2",
            "pp=2,microbatches=2,pp_schedule=zbv",
        ):
            verdict = verification.try_verify(parse(plan))
            assert verdict.same, (plan, format_verdict(verdict))
        assert verification.reference().has_batch_norm


def test_a_task_that_fails_in_every_dtype_reports_the_first_error(two: Ranks) -> None:
    with (
        Verification(spec("test_verify:Broken"), two) as broken,
        pytest.raises((TaskError, NotImplementedError), match="grouped_mm"),
    ):
        broken.reference()


def test_the_verdict_says_that_micro_batches_change_the_training(two: Ranks) -> None:
    with Verification(spec("test_verify:Mixing"), two) as mixing:
        verdict = mixing.verify(parse("pp=2,microbatches=4"))
        assert verdict.same
        assert verdict.whole_batch_difference is not None
        assert verdict.whole_batch_difference > 1e-3
        assert (
            "one process with microbatches=4 (not as one process on whole batches: its loss differs by "
            in format_verdict(verdict)
        )
        assert verdict.as_json()["compared_with"]["microbatches"] == 4
        assert not mixing.verify(parse("ddp")).same, "each rank computes the mean of its own samples"
    with Verification(spec("Points"), two) as points:
        assert "whole batches" not in format_verdict(points.verify(parse("ddp,microbatches=2")))


def test_dropout_is_disabled_and_reported(two: Ranks) -> None:
    with Verification(spec("test_verify:Dropping"), two) as dropping:
        assert dropping.verify(parse("ddp")).same
        assert describe_conditions(dropping.reference()) == ["dropout is switched off: drop.p"]
    with Verification(spec("test_verify:Dropping", set={"functional": True}), two) as dropping:
        assert not dropping.verify(parse("ddp")).same
        assert any("draws random numbers" in line for line in describe_conditions(dropping.reference()))


def test_every_kind_of_dropout_is_found() -> None:
    class Config:
        def __init__(self) -> None:
            self.attention_dropout, self.resid_pdrop, self.rope_theta, self.p = 0.1, 0.2, 0.5, 0.5

    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.attn_dropout, self.scale = 0.1, 0.5
            self.drop = nn.Dropout2d(0.3)

    model = nn.ModuleDict(
        {"torch": nn.TransformerEncoderLayer(4, 2, 8), "lstm": nn.LSTM(3, 3, 2, dropout=0.5), "ours": Ours()}
    )
    assert disable_dropout_(model) == [
        "torch.self_attn.dropout",
        "torch.dropout.p",
        "torch.dropout1.p",
        "torch.dropout2.p",
        "lstm.dropout",
        "ours.attn_dropout",
        "config.attention_dropout",
        "config.resid_pdrop",
        "ours.drop.p",
    ]
    assert model["ours"].scale == model["ours"].config.rope_theta == model["ours"].config.p == 0.5
    assert disable_dropout_(model) == []


def test_an_impossible_plan_is_not_a_failure(two: Ranks) -> None:
    with Verification(spec("Temperature"), two) as temperature:
        verdict = temperature.try_verify(parse("hsdp,replicate=3"))
        assert "does not divide" in str(verdict.cannot_be)
        assert verdict.as_json()["same"] is None
        assert temperature.try_verify(parse("ddp")).same
        with pytest.raises(PlanError, match="differs from that of one process by design"):
            temperature.verify(parse("local-sgd"))


def test_relative_differences() -> None:
    tensor = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert tensor_difference(tensor, tensor.clone(), 4.0) == 0
    assert tensor_difference(tensor + torch.tensor([0.0, 4e-3]), tensor, 4.0) == pytest.approx(1e-3)
    assert (
        tensor_difference(torch.full((2,), 1e-17), torch.zeros(2), 1.0) < 1e-14
    )  # rounding of a gradient that is 0
    assert tensor_difference(torch.full((2,), 2e-3), torch.full((2,), 1e-3), 1.0) > 0.05  # small and wrong
    assert tensor_difference(torch.tensor([math.nan]), torch.ones(1), 1.0) == math.inf
    assert tensor_difference(torch.ones(1), torch.zeros(1), 0.0) == math.inf
    mask = torch.tensor([0.0, -math.inf, 2.0])
    assert tensor_difference(mask + torch.tensor([0.0, 0.0, 1e-3]), mask, 2.0) == pytest.approx(
        5e-4, rel=1e-3
    )
    assert tensor_difference(mask, mask.abs(), 2.0) == math.inf
    assert scalar_difference(0.0, 0.0) == 0
    assert scalar_difference(math.nan, 1.0) == math.inf


def test_factors_and_their_names() -> None:
    tensor = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert estimate_factor(3 * tensor, tensor) == (pytest.approx(3), True)
    assert estimate_factor(torch.zeros(50), tensor) == (0, True)
    assert estimate_factor(tensor.flip(0), tensor)[1] is False
    assert estimate_factor(tensor, torch.zeros(50)) == (None, False)
    plan = parse("dp=2,tp=4,microbatches=3").resolve(8)
    assert [find_axis(factor, plan, 8) for factor in (2.0, 0.25, 3.0, 8.0, 5.0, None)] == [
        "dp",
        "1 / tp",
        "microbatches",
        "ranks",
        None,
        None,
    ]
    assert find_axis(2.0, parse("dp=2,tp=2").resolve(4), 4) == "dp or tp"
    assert find_axis(math.sqrt(8), plan, 8, of_norm=True) == "√ranks"
    verdict = Verdict(plan, 8, first=Difference(2, "gradient", "up", 0, 1.0, 0.25, True), axis="1 / tp")
    assert (
        describe_difference(verdict)
        == "the gradient of up is 0.250 times that of one process from step 2 on: one over the degree of tp"
    )
    verdict = dataclasses.replace(
        verdict, first=Difference(2, "gradient", "up", 0, 1e-3, 1.0, True), axis=None
    )
    assert (
        describe_difference(verdict)
        == "the gradient of up differs in some elements from that of one process from step 2 on, "
        "by 0.001 of its largest element"
    )
    verdict = dataclasses.replace(
        verdict, axis=None, first=Difference(0, "parameter", "up", 0, 0.5, 1.3, False)
    )
    assert (
        describe_difference(verdict)
        == "the parameter up differs from that of one process before the first step, "
        "by 0.5 of its largest element, and not by one factor"
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_candidates_fit_the_ranks(ranks: int) -> None:
    plans = list(enumerate_candidates(ranks))
    assert len({plan.resolve(ranks) for plan in plans}) == len(plans)
    assert {str(plan) for plan in plans} >= {
        "ddp" if ranks > 1 else "single",
        "zero1",
        "zero2",
        "zero3",
        "zero3,microbatches=2",
    }
    if ranks > 1:
        assert {plan.pp_schedule for plan in plans} >= {"gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"}
        assert {Plan(tp=ranks), Plan(cp=ranks)} <= set(plans)
    if ranks == 8:
        assert parse("dp=2,tp=2,pp=2,zero=2") in plans
    assert choose_batch(5, plans, ranks) >= 5


def test_the_batch_is_divisible_by_all_plans() -> None:
    assert choose_batch(64, [Plan(dp=3), Plan(pp=3)], 3) == 66
    assert choose_batch(64, [Plan()], 4) == 64


TASK = """
import os
import torch
from torch import nn
from paceline import Task


class Rows:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=draw), torch.randn(3, generator=draw)


class Mine(Task):
    by_rank: bool = False
    width: int = 8

    def model(self):
        model = nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(self.width, 3))
        if self.by_rank:
            with torch.no_grad():
                model[3].weight.mul_(1 + int(os.environ.get("RANK", 0)))
        return model

    def dataset(self, split):
        return Rows()

    def loss(self, output, batch):
        return (output - batch[1]).square()
"""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_task(folder, TASK)
    return folder


def test_the_command_accepts_an_equal_training(at: Path) -> None:
    result = succeed(
        "verify", "my.py:Mine", "--plan", "zero3", "--ranks", "2", "--json", "same.json", at=at, COLUMNS="80"
    )
    assert "plan zero3 on 2 ranks vs. one process; 3 steps, batch 64, float64" in " ".join(result.out.split())
    assert "dropout is switched off: 2.p" in result.out
    assert "the same training as one process" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    found = json.loads((at / "same.json").read_text())
    assert list(found) == [
        "plan",
        "ranks",
        "same",
        "max_rel_loss",
        "max_rel_grad",
        "max_rel_param",
        "first_difference",
    ]
    assert (found["plan"], found["ranks"], found["same"], found["first_difference"]) == (
        "zero3",
        2,
        True,
        None,
    )
    assert max(found["max_rel_loss"], found["max_rel_grad"], found["max_rel_param"]) < 1e-11
    assert not (at / "runs").exists()


def test_the_command_finds_a_difference(at: Path) -> None:
    words = ("--set", "by_rank=true", "--ranks", "2", "--batch", "8", "--steps", "2")
    result = paceline("verify", "my.py:Mine", "--plan", "ddp", *words, "--json", "other.json", at=at)
    assert result.status == 1, result.all
    assert (
        "the parameter 3.weight on rank 1 is 2.000 times that of one process before the first step"
        in result.out
    )
    first = json.loads((at / "other.json").read_text())["first_difference"]
    assert {key: first[key] for key in ("step", "what", "name", "factor")} == {
        "step": 0,
        "what": "parameter",
        "name": "3.weight",
        "factor": 2.0,
    }


@pytest.mark.slow
def test_the_command_checks_all_plans(at: Path) -> None:
    words = ("verify", "my.py:Mine", "--all", "--ranks", "2", "--steps", "1", "--json", "all.json")
    result = succeed(*words, at=at, COLUMNS="80")
    assert max(map(len, result.out.splitlines())) <= 80
    found = json.loads((at / "all.json").read_text())
    assert [verdict["plan"] for verdict in found] == [str(plan) for plan in enumerate_candidates(2)]
    same = [verdict["plan"] for verdict in found if verdict["same"]]
    assert {"ddp", "zero1", "zero2", "zero3", "hsdp", "zero3,microbatches=2"} <= set(same)
    assert all("cannot_be" in verdict for verdict in found if not verdict["same"])
    assert f"{len(same)} of {len(same)} plans are the same training" in result.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nothing.py:Mine", "--all"), "no such file: nothing.py"),
        (("my.py:Mine", "--plan", "zero4"), "there is no plan 'zero4'"),
        (("my.py:Mine", "--plan", "hsdp,replicate=3", "--ranks", "2"), "does not divide 2 ranks"),
        (("my.py:Mine", "--batch", "7", "--plan", "ddp", "--ranks", "2"), "batch 7 is not divisible"),
        (("my.py:Mine", "--all", "--plan", "ddp"), "--all includes --plan ddp; give only one of them"),
        (("my.py:Mine", "--plan", "ddp", "--set", "widht=3"), "did you mean width?"),
        (("my.py:Mine", "--plan", "ddp", "--json", "no/such.json"), "no such folder: no"),
        (("my.py:Mine",), "verify requires a plan to compare with one process; add --plan PLAN or --all"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(at: Path, words: tuple[str, ...], sentence: str) -> None:
    result = paceline("verify", *words, at=at)
    assert result.status == 2, result.all
    assert sentence in result.err
    assert result.err.count("\n") == 1


def test_verify_refuses_to_run_as_a_rank(at: Path) -> None:
    result = paceline(
        "verify",
        "my.py:Mine",
        "--plan",
        "ddp",
        at=at,
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
    )
    assert result.status == 2
    assert "run verify without" in result.err


@pytest.mark.slow
def test_an_interrupt_ends_everything(at: Path) -> None:
    with start("verify", "my.py:Mine", "--all", "--ranks", "2", "--steps", "20", at=at) as running:
        running.wait_until(lambda: "same" in running.output_so_far().out.replace("; same:", ""), "verifying")
        running.process.send_signal(signal.SIGINT)
        assert running.wait().status == 130
        running.wait_until_all_ended()
