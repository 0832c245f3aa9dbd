"""The cost of a step with several updates: the sum over their passes, and only plans that can train it."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from models import SAMPLES, Pairs, random_normal
from paceline import Spec, Task, Update
from paceline.cluster.facts import Cluster, Device, Fact
from paceline.errors import PlanError, SpecError
from paceline.plan.cost_model.framework_profiles import FLOAT32
from paceline.plan.search.best_plans import find_best_plans
from paceline.training.model_facts.describe import describe
from paceline.training.model_facts.model_analysis import validate_plan
from paceline.training.planning.auto_plan import choose_plan

MACHINE = Cluster(
    device=Device(name="a CPU", kind="cpu", memory_bytes=Fact(value=8e9), memory_Bps=Fact(value=2e10)),
    cores_per_node=4,
)
SPEC = Spec(batch=8)
GENERATOR, CRITIC = 3 * 6 + 6 * 5, 5 * 7 + 7 * 1  # products for a sample
GENERATOR_PARAMS, CRITIC_PARAMS = GENERATOR + 6 + 5, CRITIC + 7 + 1


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Any:
        fake = self.generator(noise)
        return self.critic(fake) if real is None else (self.critic(real), self.critic(fake.detach()))


class Gan(Task):
    repeat: int = 2
    every: int = 2

    def model(self) -> nn.Module:
        return Adversaries()

    def dataset(self, split: str) -> Pairs:
        return Pairs(x=random_normal(SAMPLES, 5), z=random_normal(SAMPLES, 3, seed=1))

    def critic_inputs(self, batch: Any) -> Any:
        return {"real": batch[0], "noise": batch[1]}

    def critic_loss(self, output: Any, batch: Any) -> Tensor:
        return F.softplus(-output[0]) + F.softplus(output[1])

    def generator_inputs(self, batch: Any) -> Any:
        return batch[1]

    def generator_loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.softplus(-output)

    def updates(self) -> Any:
        return [
            Update("critic", "critic.*", self.critic_loss, self.critic_inputs, repeat=self.repeat),
            Update("generator", "generator.*", self.generator_loss, self.generator_inputs, every=self.every),
        ]


class Joint(Gan):
    """Both updates share the pass of one loss."""

    def inputs(self, batch: Any) -> Any:
        return batch[1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.softplus(-output)

    def updates(self) -> Any:
        return [Update("critic", "critic.*"), Update("generator", "generator.*")]


@pytest.mark.parametrize(("repeat", "every"), [(1, 1), (2, 2), (5, 1)])
def test_computing_is_that_of_all_passes(repeat: int, every: int) -> None:
    facts = describe(SPEC, Gan(repeat=repeat, every=every))
    assert facts.flops == pytest.approx(
        2 * (repeat * (GENERATOR + 2 * CRITIC) + (GENERATOR + CRITIC) / every)
    )
    # Forward only: the generator in the pass of the critic; without gradients of its weights: the critic in
    # that of the generator.
    assert facts.frozen_flops == pytest.approx(2 * (repeat * GENERATOR + CRITIC / every))
    assert facts.params == GENERATOR_PARAMS + CRITIC_PARAMS
    assert facts.passes == repeat + 1 / every
    assert facts.updates == pytest.approx(
        (repeat * CRITIC_PARAMS + GENERATOR_PARAMS / every) / (CRITIC_PARAMS + GENERATOR_PARAMS)
    )


def test_updates_of_one_loss_have_one_pass() -> None:
    facts = describe(SPEC, Joint())
    assert (facts.flops, facts.frozen_flops) == (2 * (GENERATOR + CRITIC), 0)
    assert (facts.passes, facts.updates) == (1.0, 1.0)


def test_more_repetitions_take_longer_but_no_more_memory() -> None:
    few, many = (
        find_best_plans(describe(SPEC, Gan(repeat=repeat)), MACHINE, 8, "ddp", FLOAT32, 2).plans[0][1]
        for repeat in (1, 4)
    )
    assert few.step_s < many.step_s < 4 * few.step_s
    assert few.peak_bytes == many.peak_bytes
    parts_few, parts_many = ({part.name: part.value for part in cost.time.parts} for cost in (few, many))
    assert parts_many["optimizer"] > 2 * parts_few["optimizer"]


def test_only_plans_that_can_train_are_candidates() -> None:
    found = find_best_plans(describe(SPEC, Gan()), MACHINE, 8, recipe=FLOAT32, ranks=4)
    assert len(found.plans) > 10
    for plan, _ in found.plans:
        validate_plan(SPEC, plan.resolve(4), Gan())
    choice = choose_plan(SPEC, Gan(), 4, cluster=MACHINE)
    assert choice.plan.resolve(4).dp == 4
    with pytest.raises(
        PlanError, match=r"plan tp=2: updates\(\) of Gan runs several optimizers .* use single"
    ):
        find_best_plans(describe(SPEC, Gan()), MACHINE, 8, "tp=2", FLOAT32, 2)


def test_what_training_refuses_is_not_described() -> None:
    with pytest.raises(SpecError, match="precision fp16 does not support updates"):
        describe(Spec(batch=8, precision="fp16"), Gan())
