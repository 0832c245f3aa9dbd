"""With any plan, ranks and micro-batches, losses, gradient norms and weights equal those of one process."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

import models
from faults import replaced
from harness import (
    TrainingResult,
    differences,
    ranks,
    relative_difference,
    train_on_ranks,
    train_on_this_rank,
)
from paceline import Spec, Task
from paceline.data.batch_slices import RankBatchSlice
from paceline.data.order import Numbers
from paceline.distributed.world import read_world
from paceline.errors import Error, PlanError, TaskError
from paceline.parallel.loss.forward import call_model
from paceline.plan.plan import parse
from paceline.spec import Optimizer, Schedule
from paceline.training.optimization.gradient_norm import GradientNorm, combine_norms, local_gradients, scale_
from paceline.training.optimization.optimizer import local_optimizer
from paceline.training.setup import build_training
from paceline.training.step import step

pytestmark = pytest.mark.processes

TASKS: list[type[Task]] = [
    models.Points,
    models.Images,
    models.NormedImages,
    models.Text,
    models.ScalarText,
    models.Scalar,
    models.Frozen,
    models.Idle,
    models.Weighed,
    models.OwnOptimizer,
    models.Shared,
    models.Unrecorded,
]
PLANS = [
    *[(1, plan) for plan in ("single", "ddp", "zero1", "zero2", "zero3")],
    *[(size, plan) for size in (2, 4) for plan in ("ddp", "zero1", "zero2", "zero3", "hsdp")],
]
MICRO = (1, 2)
RECIPES = {
    "adamw-clip-cosine": (
        Optimizer(name="adamw", lr=1e-2, weight_decay=0.1, clip=0.5),
        Schedule(name="cosine", warmup=12, floor=0.1),
    ),
    "sgd": (Optimizer(name="sgd", lr=0.05, weight_decay=0.1), Schedule()),
    "nesterov-clip-linear": (
        Optimizer(name="sgd", lr=0.1, nesterov=True, weight_decay=0.1, clip=0.3),
        Schedule(name="linear"),
    ),
    "adamw-step": (Optimizer(name="adamw", lr=1e-2, betas=(0.8, 0.9)), Schedule(name="step", every=16)),
}
RTOL = {"fp64": 1e-12, "fp32": 1e-5}
Case = tuple[int, str, int, type[Task], str, str]  # ranks, plan, microbatches, task, recipe, precision


# Recipes alternate over plans, micro-batches and tasks. One task has each plan with each recipe.
ALL_CASES: list[Case] = []
# Each task with two of the five plans on two ranks, and each plan with a sixth of the tasks on one and four
# ranks; recipes and micro-batches alternate.
FAST_CASES: list[Case] = []
for (p, (size, plan)), (m, microbatches), (t, task), (r, recipe) in product(
    *map(enumerate, (PLANS, MICRO, TASKS, RECIPES))
):
    is_chosen = r == (p + m + t) % len(RECIPES)
    if is_chosen or task is models.Text:
        ALL_CASES += [(size, plan, microbatches, task, recipe, precision) for precision in RTOL]
    is_fast = (p + t) % 5 in (0, 2) if size == 2 else (p + t) % 6 == 0
    if is_chosen and is_fast and m == (p + t // 2) % len(MICRO):
        FAST_CASES += ALL_CASES[-2:] if task is models.Text else ALL_CASES[-2:-1]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def case_id(case: Case) -> str:
    size, plan, microbatches, task, recipe, precision = case
    return f"{size}-{plan}-micro{microbatches}-{task.__name__}-{recipe}-{precision}"


def make_spec(recipe: str, precision: str) -> Spec:
    """Return a request of five steps, which cross the end of an epoch."""
    optimizer, schedule = RECIPES[recipe]
    return Spec(steps=5, batch=8, seed=3, precision=precision, optimizer=optimizer, schedule=schedule)  # type: ignore[arg-type]


@cache
def one_process(task: type[Task], recipe: str, precision: str, microbatches: int = 1) -> TrainingResult:
    return train_on_ranks(1, task(), make_spec(recipe, precision), f"single,microbatches={microbatches}")


def check_equals_one_process(case: Case) -> None:
    size, plan, microbatches, task, recipe, precision = case
    found = train_on_ranks(size, task(), make_spec(recipe, precision), f"{plan},microbatches={microbatches}")
    # BatchNorm computes its statistics on a micro-batch
    expected = one_process(task, recipe, precision, microbatches if task is models.NormedImages else 1)
    assert not differences(found, expected, RTOL[precision])


@pytest.mark.parametrize("case", FAST_CASES, ids=case_id)
def test_each_plan_and_task_equals_one_process(case: Case) -> None:
    check_equals_one_process(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL_CASES if case not in FAST_CASES], ids=case_id)
def test_all_combinations_equal_one_process(case: Case) -> None:
    check_equals_one_process(case)


@pytest.mark.parametrize("task", [_slow(models.Points), models.Text])
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (3, "zero1"),
        (3, "zero3,microbatches=2"),
        (3, "hsdp,replicate=3"),
        (4, "zero2,replicate=2"),
        _slow(4, "hsdp,replicate=4"),
    ],
)
def test_other_meshes_equal_one_process(size: int, plan: str, task: type[Task]) -> None:
    spec = make_spec("adamw-clip-cosine", "fp64").model_copy(update={"batch": 12})
    assert not differences(
        train_on_ranks(size, task(), spec, plan), train_on_ranks(1, task(), spec, "single"), 1e-12
    )


@pytest.mark.parametrize("recipe", ["adamw-clip-cosine", _slow("sgd")])
@pytest.mark.parametrize("plan", ["ddp", "zero1", "ddp,microbatches=2", "zero2", "zero3,microbatches=2"])
@pytest.mark.parametrize("size", [2, _slow(4)])
def test_parameters_used_on_some_ranks_equal_one_process(size: int, plan: str, recipe: str) -> None:
    found = train_on_ranks(size, models.Routed(), make_spec(recipe, "fp64"), plan)
    assert not differences(found, one_process(models.Routed, recipe, "fp64"), 1e-12)


@pytest.mark.parametrize("plan", ["ddp", "zero2,microbatches=2", "zero3", _slow("zero1"), _slow("hsdp")])
def test_parameters_of_outputs_that_the_loss_does_not_read_keep_their_values(plan: str) -> None:
    """Weight decay would change them if their gradient were 0 and not None."""
    expected = one_process(models.Unread, "adamw-clip-cosine", "fp64")
    found = train_on_ranks(2, models.Unread(), make_spec("adamw-clip-cosine", "fp64"), plan)
    assert not differences(found, expected, 1e-12)
    fresh = train_on_ranks(1, models.Unread(), make_spec("sgd", "fp64"), "single")
    assert (fresh.weights["pooler.weight"] == expected.weights["pooler.weight"]).all()


@pytest.mark.parametrize("recipe", ["adamw-clip-cosine", _slow("sgd")])
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2,microbatches=2", "zero3", "hsdp"])
def test_scalar_parameter_equals_one_process(plan: str, recipe: str) -> None:
    """Plans that shard weights do not shard it."""
    found = train_on_ranks(2, models.Temperature(), make_spec(recipe, "fp64"), plan)
    assert not differences(found, one_process(models.Temperature, recipe, "fp64"), 1e-12)


@pytest.mark.parametrize("plan", [_slow("tp=2,dp=2"), "tp=2,dp=2,zero=1", "pp=2,dp=2,zero=3"])
def test_scalar_parameter_in_mixtures_equals_one_process(plan: str) -> None:
    spec = make_spec("adamw-clip-cosine", "fp64")
    assert not differences(
        train_on_ranks(4, models.Tempered(), spec, plan),
        train_on_ranks(1, models.Tempered(), spec, "single"),
        1e-12,
    )


@pytest.mark.parametrize("plan", ["ddp", _slow("zero3")])
def test_batch_norm_without_running_statistics_sees_the_samples_of_all_ranks(plan: str) -> None:
    spec = make_spec("sgd", "fp64")
    found = train_on_ranks(2, models.UntrackedNorm(), spec, plan)
    assert not differences(found, train_on_ranks(1, models.UntrackedNorm(), spec, "single"), 1e-10)


@pytest.mark.parametrize("plan", ["ddp", _slow("zero1"), "zero3"])
def test_local_batch_norm_equals_micro_batches(plan: str) -> None:
    """Each rank normalizes like a micro-batch, but updates the running statistics once, not twice."""
    spec = make_spec("sgd", "fp64").model_copy(update={"steps": 1})
    found = train_on_ranks(2, models.NormedImages(), spec.model_copy(update={"batch_norm": "local"}), plan)
    assert any("batch_norm=local" in note for note in found.notes)
    halves = train_on_ranks(1, models.NormedImages(), spec, "single,microbatches=2")
    whole = train_on_ranks(1, models.NormedImages(), spec, "single")
    assert found.losses != pytest.approx(whole.losses, rel=1e-6)
    assert found.losses == pytest.approx(halves.losses, rel=1e-12)
    assert (
        relative_difference(found.weights["1.running_mean"], whole.weights["1.running_mean"]) < 1e-12
    )  # the mean over the ranks of their means
    assert relative_difference(found.weights["1.running_var"], whole.weights["1.running_var"]) > 1e-6
    for name, weight in found.weights.items():
        if "running" not in name and "num_batches" not in name:
            assert relative_difference(weight, halves.weights[name]) < 1e-12, name


def refusal(task: Task, plan: str, error: type[Error] = PlanError) -> str:
    with pytest.raises(error) as raised:
        train_on_this_rank(task, make_spec("sgd", "fp64"), plan)
    return str(raised.value)


@pytest.mark.parametrize(
    ("size", "plan"), [(1, "single,microbatches=2"), (2, "ddp"), (2, "zero3,microbatches=2")]
)
def test_varying_number_of_items_requires_weights(size: int, plan: str) -> None:
    """Their number in the global batch is unknown before the backward pass, so the training is refused."""
    for message in ranks(size)(refusal, models.Ragged(), plan, TaskError):
        assert "define weights(batch)" in message


@pytest.mark.parametrize("plan", [_slow("ddp"), "zero1", _slow("zero2"), "zero3", "ddp,microbatches=2"])
def test_bf16_equals_one_process_to_its_precision(plan: str) -> None:
    """Results agree to bf16 precision: products over the samples of a rank are rounded before the sum."""
    spec = make_spec("adamw-clip-cosine", "fp32").model_copy(update={"precision": "bf16"})
    found, expected = (
        train_on_ranks(2, models.Text(), spec, plan),
        train_on_ranks(1, models.Text(), spec, "single"),
    )
    assert not differences(found, expected, 0.02)
    assert differences(found, one_process(models.Text, "adamw-clip-cosine", "fp32"), 1e-4)
    assert all(weight.dtype == np.float32 for weight in found.weights.values())


@dataclass(frozen=True)
class RankElements:
    """Numbers of elements of a model and its optimizer on a rank."""

    parameters: int
    state: int
    units: int
    whole_after_forward: bool


def count_elements_on_rank(plan: str) -> RankElements:
    task, world = models.Text(), read_world()
    prepared = build_training(
        make_spec("adamw-step", "fp32"), parse(plan).resolve(world.size), world, task, torch.device("cpu")
    )
    batch = default_collate([task.dataset("train")[i] for i in range(8)])  # type: ignore[index]
    prepared.update([batch], 0, 1.0)
    state = local_optimizer(prepared.update.optimizer).state.values()
    counts = RankElements(
        parameters=count_elements(prepared.model.parameters()),
        state=count_elements(value for values in state for value in values.values() if value.dim()),
        units=sum(isinstance(module, FSDPModule) for module in prepared.model.modules()),
        whole_after_forward=False,
    )
    call_model(task, prepared.update.model, batch)
    return replace(
        counts,
        whole_after_forward=not any(
            isinstance(parameter, DTensor) for parameter in prepared.model.blocks.parameters()
        ),
    )


def count_elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors)


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *[(2, plan) for plan in ("ddp", "zero1", "zero2", "zero3")],
        *[_slow(4, plan) for plan in ("ddp", "zero1", "zero2", "zero3")],
        *[_slow(2, "hsdp"), (4, "hsdp")],
    ],
)
def test_plans_shard_parameters_and_optimizer_state(size: int, plan: str) -> None:
    """Each plan saves the memory that it promises to save."""
    [whole] = ranks(1)(count_elements_on_rank, "single")
    assert whole.state == 2 * whole.parameters
    found = ranks(size)(count_elements_on_rank, plan)
    if plan == "ddp":
        assert found == [whole] * size
    elif plan == "zero1":
        assert {rank.parameters for rank in found} == {whole.parameters}
        assert sum(rank.state for rank in found) == whole.state
        assert max(rank.state for rank in found) < 0.75 * whole.state
    else:
        copies = 2 if plan == "hsdp" else 1
        assert sum(rank.parameters for rank in found) == copies * whole.parameters
        assert sum(rank.state for rank in found) == copies * whole.state
        assert {rank.units for rank in found} == {4}
        assert {rank.whole_after_forward for rank in found} == {plan == "zero2"}


def test_recipes_and_tasks_give_different_results() -> None:
    """If two recipes or tasks computed the same, an error could hide."""
    assert (one_process(models.Idle, "sgd", "fp64").weights["spare"] == 1).all()
    assert len(one_process(models.Text, "sgd", "fp64").weights) == len(list(models.Gpt().parameters()))
    assert len(set(models.Text().dataset("train").columns["mask"].sum(1).tolist())) > 5
    for first, second in combinations(RECIPES, 2):
        assert differences(
            one_process(models.Points, first, "fp64"), one_process(models.Points, second, "fp64"), 1e-3
        )


# Negative controls: the comparison above must detect these faults.


def gradient_summed_over_ranks() -> Any:
    """Sum the gradient over the ranks instead of averaging it."""

    def patch(original: Any) -> Any:
        def update(self: step.TrainingStep, *args: Any) -> Any:
            scale_(self.params, self.data_ranks)
            return original(self, *args)

        return update

    return replaced(step.TrainingStep, "update", patch)


def sample_taken_from_another_rank() -> Any:
    """Give the last rank a sample of another rank, once."""

    def patch(original: Any) -> Any:
        def numbers(self: RankBatchSlice, step: int) -> Numbers:
            samples = original(self, step)
            if step == 2 and self.rank == self.ranks - 1:
                samples[-1, -1] += 1
            return samples

        return numbers

    return replaced(RankBatchSlice, "numbers", patch)


def loss_averaged_per_rank() -> Any:
    """Average the loss over the items of each rank, and then over the ranks."""

    def patch(original: Any) -> Any:
        class RankWeight:
            def __init__(self, task: Task, batches: Any, counted: bool):
                self.sum = sum(task.weights(batch).sum().double() for batch in batches)

            def result(self) -> torch.Tensor:
                return self.sum * dist.get_world_size()

        return RankWeight

    return replaced(step, "GlobalWeight", patch)


def zeros_for_missing_gradients() -> Any:
    """Give parameters without a gradient a gradient of zeros."""

    def patch(original: Any) -> Any:
        def update(self: step.TrainingStep, *args: Any) -> Any:
            for parameter in self.params:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return original(self, *args)

        return update

    return replaced(step.TrainingStep, "update", patch)


def gradient_clipped_by_shard_norm() -> Any:
    """Clip on each rank by the norm of its shard."""

    def patch(original: Any) -> Any:
        def shard_norm(self: GradientNorm) -> torch.Tensor:
            return combine_norms(
                [grad.norm() for grad in local_gradients(self.params) if grad.numel()], self.device
            )

        return shard_norm

    return replaced(GradientNorm, "global_norm", patch)


@pytest.mark.parametrize(
    ("fault", "task", "recipe", "plans"),
    [
        (gradient_summed_over_ranks, models.Images, "adamw-clip-cosine", "ddp zero3"),
        _slow(gradient_summed_over_ranks, models.Images, "adamw-clip-cosine", "zero1 zero2 hsdp"),
        _slow(gradient_summed_over_ranks, models.Images, "adamw-step", "ddp zero1 zero2 zero3 hsdp"),
        _slow(gradient_summed_over_ranks, models.Text, "sgd", "ddp zero1 zero2 zero3 hsdp"),
        (sample_taken_from_another_rank, models.Images, "sgd", "ddp zero3"),
        _slow(sample_taken_from_another_rank, models.Images, "sgd", "zero1 zero2 hsdp"),
        _slow(sample_taken_from_another_rank, models.Images, "adamw-clip-cosine", "ddp zero3"),
        (loss_averaged_per_rank, models.Text, "sgd", "ddp zero3"),
        _slow(loss_averaged_per_rank, models.Text, "sgd", "zero1 zero2 hsdp"),
        (zeros_for_missing_gradients, models.Idle, "sgd", "ddp zero3"),
        _slow(zeros_for_missing_gradients, models.Idle, "sgd", "zero1 zero2 hsdp"),
        (gradient_clipped_by_shard_norm, models.Images, "nesterov-clip-linear", "zero3"),
        _slow(gradient_clipped_by_shard_norm, models.Images, "nesterov-clip-linear", "zero2 hsdp"),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", _slow("fp32")])
def test_faults_are_detected(fault: Any, task: type[Task], recipe: str, plans: str, precision: str) -> None:
    for plan in plans.split():
        found = train_on_ranks(2 if plan != "hsdp" else 4, task(), make_spec(recipe, precision), plan, fault)
        assert differences(found, one_process(task, recipe, precision), 10 * RTOL[precision])


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("plan", ["single", _slow("ddp"), "zero3"])
def test_recomputation_equals_one_process(plan: str, recompute: str) -> None:
    spec = Spec(batch=8, steps=3, precision="fp64")
    task = models.Text()
    found = train_on_ranks(1 if plan == "single" else 2, task, spec, f"{plan},recompute={recompute}")
    assert not differences(found, train_on_ranks(1, task, spec), 1e-12)
