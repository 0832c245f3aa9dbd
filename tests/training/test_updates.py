"""Several updates in a step, as `Task.updates` declares them, equal loops by hand under every plan."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from command import checkpoint_weights, succeed
from faults import replaced
from harness import relative_difference, train_on_ranks
from models import SAMPLES, Pairs, random_normal
from paceline import Spec, Task, Update
from paceline.data.order import shuffle
from paceline.debug.replay import replay
from paceline.errors import PlanError, SpecError, TaskError
from paceline.events import Profiled, Step
from paceline.parallel.data_parallel.inner_gradients import InnerGradients
from paceline.plan.plan import ResolvedPlan, parse
from paceline.run import RunFolder, create
from paceline.spec import Launch, Optimizer, Save, Schedule
from paceline.training.checkpoint.identity import describe_changes, describe_identity
from paceline.training.checkpoint.index import read_index
from paceline.training.checkpoint.metadata import read_metadata
from paceline.training.dry_run.dry_run import compute_comm_volume
from paceline.training.optimization.read_updates import assign_parameters, read_updates
from runs import NEVER, train_run

STEPS, BATCH, LR = 6, 8, 0.1
SPEC = Spec(
    steps=STEPS,
    batch=BATCH,
    seed=3,
    precision="fp64",
    threads=1,
    optimizer=Optimizer(name="sgd", lr=LR, momentum=0),
)
CRITIC = Optimizer(name="adamw", lr=0.02, betas=(0.5, 0.9), weight_decay=0.1, clip=0.4)


def fill_(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).double().sin().view_as(parameter) / 2)


class Adversaries(nn.Module):
    """A generator and a critic, in one model. The critic runs twice in its own pass.

    (A bias before BatchNorm has no gradient but rounding errors, which AdamW would enlarge.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
        self.critic = nn.Sequential(
            nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)
        )
        fill_(self)

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Any:
        fake = self.generator(noise)
        return self.critic(fake) if real is None else (self.critic(real), self.critic(fake.detach()))


class Gan(Task):
    def model(self) -> nn.Module:
        return Adversaries()

    def dataset(self, split: str) -> Pairs:
        return Pairs(x=random_normal(SAMPLES, 5), z=random_normal(SAMPLES, 3, seed=1))

    def critic_inputs(self, batch: Any) -> Any:
        return {"real": batch[0], "noise": batch[1]}

    def critic_loss(self, output: Any, batch: Any) -> dict[str, Tensor]:
        real, fake = output
        return {"real": F.softplus(-real), "fake": F.softplus(fake)}

    def generator_inputs(self, batch: Any) -> Any:
        return batch[1]

    def generator_loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.softplus(-output)

    def updates(self) -> Any:
        return [
            Update("critic", "critic.*", self.critic_loss, self.critic_inputs, repeat=2, optimizer=CRITIC),
            Update(
                "generator",
                "generator.*",
                self.generator_loss,
                self.generator_inputs,
                every=2,
                schedule=Schedule(name="linear"),
            ),
        ]


def batch_of(step: int, columns: dict[str, Tensor]) -> list[Tensor]:
    indices = shuffle(np.arange(step * BATCH, (step + 1) * BATCH), SAMPLES, SPEC.seed).tolist()
    return [column.double()[indices] for column in columns.values()]


@cache
def train_gan_by_hand() -> tuple[dict[str, list[float]], dict[str, np.ndarray], dict[str, float]]:
    """Return the losses of the steps, the final weights, and the losses of an evaluation."""
    model, columns = Adversaries().double(), Gan().dataset("train").columns
    generator, critic = model.generator, model.critic
    of_critic = torch.optim.AdamW(critic.parameters(), lr=0.02, betas=(0.5, 0.9), weight_decay=0.1)
    losses: dict[str, list[float]] = {"critic": [], "critic.real": [], "critic.fake": [], "loss": []}
    for step in range(STEPS):
        real, noise = batch_of(step, columns)
        for _ in range(2):
            fake = generator(noise).detach()
            of_real, of_fake = F.softplus(-critic(real)).mean(), F.softplus(critic(fake)).mean()
            critic_loss = of_real + of_fake
            of_critic.zero_grad()
            critic_loss.backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 0.4)
            of_critic.step()
        for name, value in zip(losses, (critic_loss, of_real, of_fake, critic_loss), strict=True):
            losses[name].append(value.item())
        if step % 2:
            loss = F.softplus(-critic(generator(noise))).mean()
            losses["loss"][-1] += loss.item()
            grads = torch.autograd.grad(loss, list(generator.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(generator.parameters(), grads, strict=True):
                    parameter -= LR * (1 - step / STEPS) * grad
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        real, noise = (column.double() for column in columns.values())
        fake = generator(noise)
        of = {
            "critic.real": F.softplus(-critic(real)).mean().item(),
            "critic.fake": F.softplus(critic(fake)).mean().item(),
            "generator": F.softplus(-critic(fake)).mean().item(),
        }
    of["critic"] = of["critic.real"] + of["critic.fake"]
    return losses, weights, of | {"loss": of["critic"] + of["generator"]}


def difference_from_hand(size: int, plan: str, fault: Any = None) -> float:
    """Return the largest relative difference of losses, weights, buffers and the losses of the evaluation."""
    found = train_on_ranks(size, Gan(), SPEC, plan, *([fault] if fault else []))
    losses, weights, metrics = train_gan_by_hand()
    assert found.weights.keys() == weights.keys()
    assert found.metrics[-1].keys() == metrics.keys()
    pairs = [({"loss": found.losses, **found.named}[name], losses[name]) for name in losses]
    pairs += [([found.metrics[-1][name]], [metrics[name]]) for name in metrics]
    pairs += [(found.weights[name], weights[name]) for name in weights]
    return max(relative_difference(*pair) for pair in pairs)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *((2, "ddp"), (2, "zero3")),
        *[
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in [
                *((1, "single"), (2, "zero1"), (2, "zero2"), (3, "zero3,uneven=1")),
                *((4, "ddp"), (4, "zero1"), (4, "zero2"), (4, "zero3"), (4, "hsdp")),
            ]
        ],
    ],
)
def test_gan_equals_a_loop_by_hand(size: int, plan: str) -> None:
    assert difference_from_hand(size, plan) < 1e-10


def always_due() -> Any:
    return replaced(Update, "is_due", lambda original: lambda update, step: True)


@pytest.mark.processes
def test_an_update_in_a_wrong_step_is_found() -> None:
    assert difference_from_hand(2, "ddp", always_due) > 1e-3


class Gradual(Task):
    """The head trains from the start, the body from the third step on; both share a pass of `loss`."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        fill_(model)
        return model

    def dataset(self, split: str) -> Pairs | None:
        pairs = Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 3, seed=1))
        return pairs if split == "train" else None

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()

    def updates(self) -> Any:
        slow = Optimizer(name="adamw", lr=0.01, weight_decay=0.2)
        return [Update("head", "2.*"), Update("body", ("0.weight", "0.bias"), start=2, optimizer=slow)]


def test_parameters_have_no_gradient_before_their_start() -> None:
    from paceline.training.train import train

    computed = []

    def observe(model: Any, what: str, step: int) -> None:
        if (what, step) == ("weights", 0):
            model[0].weight.register_post_accumulate_grad_hook(lambda _: computed.append(step))

    assert list(train(SPEC, "single", task=Gradual(), device="cpu", observe=observe))
    assert len(computed) == STEPS - 2


def train_gradually_by_hand() -> tuple[list[float], dict[str, np.ndarray]]:
    model, columns = Gradual().model().double(), Gradual().dataset("train").columns
    head = torch.optim.SGD(model[2].parameters(), lr=LR)
    body = torch.optim.AdamW(model[0].parameters(), lr=0.01, weight_decay=0.2)
    losses = []
    for step in range(STEPS):
        x, y = batch_of(step, columns)
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        head.step()
        if step >= 2:
            body.step()
    return losses, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *((2, "zero3,microbatches=2"), (2, "ddp,microbatches=2")),
        *[
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in [(1, "single"), (2, "zero1"), (2, "zero2")]
        ],
    ],
)
def test_joint_updates_and_a_late_start(size: int, plan: str) -> None:
    found, (losses, weights) = train_on_ranks(size, Gradual(), SPEC, plan), train_gradually_by_hand()
    assert relative_difference(found.losses, losses) < 1e-10
    for name, tensor in weights.items():
        assert relative_difference(found.weights[name], tensor) < 1e-10, name


class Noisy(Gan):
    """Each pass and each repetition draws noise of its own, which belongs to the samples."""

    def critic_inputs(self, batch: Any, rng: Any) -> Any:
        return {"real": batch[0], "noise": rng.randn(3)}

    def generator_inputs(self, batch: Any, rng: Any) -> Any:
        return rng.randn(3)


@pytest.mark.slow
@pytest.mark.processes
def test_draws_by_sample_do_not_depend_on_the_plan() -> None:
    expected = train_on_ranks(1, Noisy(), SPEC, "single")
    found = train_on_ranks(2, Noisy(), SPEC, "zero3")
    assert relative_difference(found.losses, expected.losses) < 1e-10


@pytest.mark.processes
def test_a_resumed_gan_equals_an_undisturbed_one(tmp_path: Path) -> None:
    """The checkpoint has the state of all optimizers; another plan continues with it."""
    spec = SPEC.model_copy(update={"task": f"{__file__}:Noisy", "save": Save(minutes=NEVER)})
    train_run(2, spec, "zero3", tmp_path / "undisturbed")
    assert train_run(2, spec, "zero1", tmp_path / "stopped", 3)[-1].reason == "stopped"
    train_run(2, spec, "ddp", tmp_path / "stopped")
    weights = [checkpoint_weights(tmp_path / name) for name in ("undisturbed", "stopped")]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        assert relative_difference(weights[0][name], weights[1][name]) < 1e-10, name
    path = RunFolder(tmp_path / "stopped").checkpoint(STEPS)
    index = read_index(path)
    stored = read_metadata(path, index.files, 10**9).state_dict_metadata
    assert {name for name in stored if name.startswith("optimizer/critic.0.weight")} == {
        f"optimizer/critic.0.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert index.metrics.keys() == {"loss", "critic", "critic.real", "critic.fake", "generator"}


def test_events_have_the_loss_of_each_update() -> None:
    from paceline.training.train import train

    steps = [event for event in train(SPEC, "single", task=Gan(), device="cpu") if isinstance(event, Step)]
    of_critic = ["critic", "critic.real", "critic.fake"]
    assert [[*step.losses] for step in steps] == [of_critic, [*of_critic, "generator"]] * 3
    for step in steps:
        assert step.loss == pytest.approx(step.losses["critic"] + step.losses.get("generator", 0.0))
        assert step.losses["critic"] == pytest.approx(step.losses["critic.real"] + step.losses["critic.fake"])
        assert step.lr == 0.02


def write_example(at: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    [program] = [code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "Update" in code]
    (at / "gan.py").write_text(program)


@pytest.mark.processes
def test_example_of_the_page(tmp_path: Path) -> None:
    write_example(tmp_path)
    words = ("--steps", "4", "--ranks", "2", "--plan", "zero2", "--device", "cpu", "--run-dir", "r")
    output = succeed("train", "gan.py", *words, at=tmp_path).all
    assert re.search(r"step 1  loss \d\.\d+ \(critic \d\.\d+  generator \d\.\d+\)", output), output
    assert re.search(r"evaluated: loss \d\.\d+  critic \d\.\d+  generator \d", output), output


@pytest.mark.slow
@pytest.mark.processes
def test_verify_the_example_of_the_page(tmp_path: Path) -> None:
    write_example(tmp_path)
    succeed("verify", "gan.py", "--plan", "zero2", "--ranks", "2", at=tmp_path)


class Penalized(Gan):
    """WGAN-GP: the critic is trained with penalties on its gradient, one of forward and one of its loss."""

    def model(self) -> nn.Module:
        return Smooth()

    def critic_loss(self, output: Any, batch: Any) -> dict[str, Tensor]:
        score, at, inner = output
        slope = torch.autograd.grad(score.sum(), at, create_graph=True)[0] if at.requires_grad else at
        return {"score": score, "slope": slope.square().sum(1), "inner": inner}

    def updates(self) -> Any:
        critic, generator = super().updates()
        return [critic, replace(generator, every=1, schedule=None)]


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        fill_(self)

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Any:
        fake = self.generator(noise)
        if real is None:
            return self.critic(fake)
        at = real.clone().requires_grad_(torch.is_grad_enabled())
        inner = self.critic(at).square()
        if at.requires_grad:
            inner = torch.autograd.grad(inner.sum(), at, create_graph=True)[0].square().sum(1)
        return self.critic(at) - self.critic(fake.detach()), at, inner


def train_penalized_by_hand() -> tuple[list[float], dict[str, np.ndarray]]:
    model, columns = Smooth().double(), Penalized().dataset("train").columns
    generator, critic = model.generator, model.critic
    of_critic = torch.optim.AdamW(critic.parameters(), lr=0.02, betas=(0.5, 0.9), weight_decay=0.1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        real, noise = batch_of(step, columns)
        for _ in range(2):
            at = real.clone().requires_grad_()
            [inner] = torch.autograd.grad(critic(at).square().sum(), at, create_graph=True)
            [slope] = torch.autograd.grad(critic(at).sum(), at, create_graph=True)
            score = (critic(at) - critic(generator(noise).detach())).mean()
            critic_loss = score + slope.square().sum(1).mean() + inner.square().sum(1).mean()
            of_critic.zero_grad()
            critic_loss.backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 0.4)
            of_critic.step()
        loss = F.softplus(-critic(generator(noise))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        losses.append(critic_loss.item() + loss.item())
    return losses, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "zero3,microbatches=2"),
        *[
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in [
                (1, "single"),
                (2, "ddp"),
                (2, "zero1"),
                (2, "zero2"),
                (2, "zero3"),
                (4, "hsdp"),
            ]
        ],
    ],
)
def test_penalties_on_the_gradient(size: int, plan: str) -> None:
    found = train_on_ranks(size, Penalized(), SPEC, plan)
    losses, weights = train_penalized_by_hand()
    assert relative_difference(found.losses, losses) < 1e-10
    for name, tensor in weights.items():
        assert relative_difference(found.weights[name], tensor) < 1e-10, name


def keeps_nothing() -> Any:
    return replaced(InnerGradients, "_keep", lambda original: lambda self, gradient: None)


@pytest.mark.slow
@pytest.mark.processes
def test_units_that_are_freed_too_early_are_found() -> None:
    with pytest.raises(Exception, match="setStorage"):
        train_on_ranks(2, Penalized(), SPEC, "zero3", keeps_nothing)


class WithoutStatistics(Gan):
    def model(self) -> nn.Module:
        model = Adversaries()
        model.critic[1] = nn.Tanh()
        return model


@pytest.mark.parametrize(
    ("plan", "collective", "multiple"), [("ddp", "all-reduce", 1), ("zero3", "reduce-scatter", 2)]
)
def test_each_pass_sends_only_its_gradients(plan: str, collective: str, multiple: int) -> None:
    """The step that `paceline comms` counts has two passes of the critic and one of the generator."""
    volume = compute_comm_volume(SPEC, parse(plan), 2, task=WithoutStatistics())
    found = sum(entry.bytes for entry in volume.of(collective).entries if entry.module != "paceline")
    model = WithoutStatistics().model()
    critic, generator = (
        sum(-(-len(p) // multiple) * multiple * (p.numel() // len(p)) for p in part.parameters())
        for part in (model.critic, model.generator)
    )
    assert found == 8 * (2 * critic + generator)


class Mixing(Gan):
    def generator_loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.softplus(output.mean() - output)


@pytest.mark.processes
def test_the_first_loss_of_a_later_pass_is_checked() -> None:
    """The generator runs in the second step."""
    with pytest.raises(Exception, match="mixes the samples"):
        train_on_ranks(2, Mixing(), SPEC, "ddp")


class More(Gan):
    def updates(self) -> Any:
        critic, generator = super().updates()
        return [replace(critic, repeat=3, optimizer=None), generator]


def test_changes_of_updates_are_described() -> None:
    then, now = (describe_identity(SPEC, task, "", []) for task in (Gan(), More()))
    changes = describe_changes(then, now)
    assert "update critic.repeat was 2, is 3" in changes
    assert any(change.startswith("update critic.optimizer was Optimizer(") for change in changes)
    assert not any("generator" in change for change in changes)


@pytest.mark.processes
def test_replay_of_a_step(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"task": f"{__file__}:Noisy", "save": Save(minutes=NEVER)})
    run = create(tmp_path / "r", spec, Launch(ranks=1, plan="single", device="cpu"))
    from paceline.training.train import train

    events = [event for event in train(spec, "single", run=run, device="cpu") if isinstance(event, Step)]
    found = replay(run, 4, "cpu")
    event = events[3]
    assert found.loss == pytest.approx(event.loss, rel=1e-12)
    assert found.losses == pytest.approx(event.losses, rel=1e-12)
    assert (found.grad_norm, found.lr) == pytest.approx((event.grad_norm, event.lr), rel=1e-12)
    assert {entry.module for entry in found.gradients} == {
        *("generator.0", "generator.2", "critic.0", "critic.1", "critic.3")
    }


def test_profile_of_a_step_with_two_passes() -> None:
    from paceline.training.train import train

    spec = SPEC.model_copy(update={"profile": True})
    [found, *_] = [
        event for event in train(spec, "single", task=Gan(), device="cpu") if isinstance(event, Profiled)
    ]
    assert found.num_steps == 2, "the generator runs in every second step"
    assert sum(found.seconds.values()) == pytest.approx(found.step_s)
    assert found.seconds["compute"] > 0
    assert found.seconds["optimizer"] > 0
    sizes = [sum(p.numel() for p in part.parameters()) * 8 for part in Adversaries().children()]
    assert found.memory["weights"] >= sum(sizes)
    assert found.memory["gradients"] <= max(sizes), "only those of one pass exist at a time"


def returns(*updates: Any, **methods: Any) -> Task:
    def declared(self: Task) -> Any:
        return updates[0] if len(updates) == 1 else list(updates)

    return type("Returns", (Gan,), {"updates": declared, **methods})()


def loss(output: Any, batch: Any) -> Any: ...


CRITICS = Update("critic", "critic.*", loss)
REFUSED = {
    "no list": (returns(3), r"updates\(\) must return a list of updates"),
    "no update": (returns(CRITICS, "generator"), "must return objects of paceline.Update, got str"),
    "empty": (returns([]), "returned no update"),
    "repeated": (returns(CRITICS, CRITICS), "two updates named 'critic'"),
    "no parameter": (
        returns(CRITICS, Update("generator", ("generatr.*",), loss)),
        r"generator.0.weight belongs to no update",
    ),
    "no match": (
        returns(CRITICS, Update("other", "encoder.*", loss), Update("generator", "generator.*", loss)),
        r"Update other: no parameter of the model matches 'encoder.\*'; its parameters are generator",
    ),
    "two updates": (
        returns(CRITICS, Update("all", "*", loss)),
        "critic.0.weight belongs to two updates, critic and all",
    ),
    "no loss": (
        returns(CRITICS, Update("generator", "generator.*")),
        "Update generator has no loss, and the task has no method loss",
    ),
    "reserved name": (
        returns([Update("lr", "critic.*", loss)]),
        "an update named 'lr', under which each step reports another value",
    ),
    "loss_weights": (
        returns([CRITICS], loss_weights=lambda self: {"real": 2.0}),
        r"loss_weights\(\) has the weights of loss\(\), which no update minimizes",
    ),
    "optimizer": (
        returns([CRITICS], optimizer=lambda self, params: None),
        "defines both updates and optimizer",
    ),
    "never": (returns([Update("all", "*", loss, start=3)]), "no update that runs in each step"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_updates_that_cannot_be_run(what: str) -> None:
    task, message = REFUSED[what]
    with pytest.raises(TaskError, match=message):
        assign_parameters(read_updates(task, ResolvedPlan()), Adversaries())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a b"}, "name must be a word such as 'critic', got 'a b'"),
        ({"params": ["*"]}, r"params must be a pattern of names, .* got \['\*'\]"),
        ({"repeat": 0}, "repeat must be an integer, at least 1, got 0"),
        ({"every": 1.5}, "every must be an integer, at least 1, got 1.5"),
        ({"start": -1}, "start must be an integer, at least 0, got -1"),
        ({"loss": "mean"}, "loss must be a method, such as self.critic_loss, got 'mean'"),
        ({"loss": None, "repeat": 2}, "repeat=2 requires loss"),
        ({"loss": None, "inputs": loss}, "inputs requires loss"),
        ({"optimizer": "adamw"}, "optimizer must be a paceline.spec.Optimizer, got str"),
        ({"schedule": 3}, "schedule must be a paceline.spec.Schedule, got int"),
    ],
)
def test_values_of_an_update(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Update(**{"name": "critic", "params": "*", "loss": loss, **fields})


@pytest.mark.parametrize("plan", ["pp=2", "tp=2", "cp=2", "local-sgd,period=2", "parameter-server"])
def test_plans_that_refuse_updates(plan: str) -> None:
    message = r"plan .*: updates\(\) runs several optimizers in a step.* use single, ddp, zero1"
    with pytest.raises(PlanError, match=message):
        read_updates(Gan(), parse(plan).resolve(4))


def test_fp16_is_refused() -> None:
    with pytest.raises(SpecError, match="precision fp16 does not support updates"):
        read_updates(Gan(), ResolvedPlan(), "fp16")
