"""Operations of `Task.after_step` under every plan equal a loop by hand on whole weights."""

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from command import checkpoint_weights, succeed, unequal_tensors
from faults import replaced
from harness import relative_difference, take_sgd_step_, train_on_ranks
from models import SAMPLES, Pairs, random_normal
from paceline import Spec, Task
from paceline.after_step import Clamp, CopyTo, Ema, Normalize, Polyak
from paceline.data.order import shuffle
from paceline.errors import PlanError, TaskError
from paceline.plan.plan import ResolvedPlan, parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save
from paceline.training.checkpoint.stored import load_weights
from paceline.training.step import weight_operations
from paceline.training.step.weight_operations import WeightOperations, read_operations
from runs import NEVER, train_run

STEPS, BATCH, LR = 5, 8, 0.1
SPEC = Spec(
    steps=STEPS, batch=BATCH, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=LR, momentum=0)
)


class Twins(nn.Module):
    """An online network, a target that follows it, a copy of it, and a head whose rows have norm 2."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6))
        for parameter in self.online.parameters():
            with torch.no_grad():
                parameter.copy_(torch.arange(parameter.numel()).double().sin().view_as(parameter) / 2)
        self.target, self.old = copy.deepcopy(self.online), copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.old.requires_grad_(False)
        self.head = nn.Linear(6, 4)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(torch.arange(parameter.numel()).double().cos().view_as(parameter))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.online(x)), self.target(x) + self.old(x)


class Bootstrap(Task):
    """A small task like BYOL, with all operations."""

    warmup: bool = False

    def model(self) -> nn.Module:
        return Twins()

    def dataset(self, split: str) -> Pairs:
        return Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 4, seed=1))

    def loss(self, output: Any, batch: Any) -> Tensor:
        predicted, fixed = output
        return (predicted - batch[1] - 0.1 * fixed[:, :4]).square()

    def after_step(self) -> Any:
        return [
            Normalize("head.weight", dim=-1, norm=2.0),
            Normalize("online.0.weight", dim=0, norm=1.5),
            Normalize("online.2.bias", dim=None),
            Clamp("online.2.weight", low=-0.2, high=0.3),
            Polyak("online", "target", tau=0.3),
            CopyTo("online", "old", every=2),
            Ema(decay=0.9, params="[oh]*", warmup=self.warmup),
        ]


def loss_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    predicted, fixed = model(x)
    return (predicted - y - 0.1 * fixed[:, :4]).square().mean()


@cache
def train_by_hand(warmup: bool = False) -> tuple[list[float], dict[str, np.ndarray], float]:
    """Return the losses, the weights and the loss of the averaged weights, computed on whole tensors."""
    model, data = Twins().double(), Bootstrap().dataset("train").columns
    x, y = data["x"].double(), data["y"].double()
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    for step in range(STEPS):
        indices = shuffle(np.arange(step * BATCH, (step + 1) * BATCH), SAMPLES, 3).tolist()
        loss = loss_by_hand(model, x[indices], y[indices])
        losses.append(loss.item())
        trained = nn.ModuleList([model.online, model.head])
        take_sgd_step_(trained, loss, LR)
        with torch.no_grad():
            head, first, bias = model.head.weight, model.online[0].weight, model.online[2].bias
            for row in head:
                row *= 2 / row.norm()
            for column in first.T:
                column *= 1.5 / column.norm()
            bias /= bias.norm()
            model.online[2].weight.clamp_(-0.2, 0.3)
            state, target = model.online.state_dict(), model.target.state_dict()
            for name, tensor in state.items():
                moved = 0.7 * target[name] + 0.3 * tensor if tensor.is_floating_point() else tensor
                target[name].copy_(moved)
            if step % 2:
                model.old.load_state_dict(state)
            decay = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
            for name, parameter in model.named_parameters():
                if name[0] in "oh":
                    average[name] = decay * average[name] + (1 - decay) * parameter
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    averaged = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, parameter in averaged.named_parameters():
            if name[0] in "oh":
                parameter.copy_(average[name])
        loss = loss_by_hand(averaged, x, y).item()
    return losses, weights, loss


def difference_from_hand(size: int, plan: str, task: Bootstrap | None = None, fault: Any = None) -> float:
    """Return the largest relative difference of losses, weights, buffers and the loss of the average."""
    task = task or Bootstrap()
    found = train_on_ranks(size, task, SPEC, plan, *([fault] if fault else []))
    losses, weights, averaged = train_by_hand(task.warmup)
    assert found.weights.keys() == weights.keys()
    pairs = [(found.losses, losses), ([found.metrics[-1]["loss"]], [averaged])]
    pairs += [(found.weights[name], weights[name]) for name in weights]
    return max(relative_difference(*pair) for pair in pairs)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *((1, "single"), (2, "ddp"), (2, "zero3"), (3, "zero3,uneven=1")),
        (2, "tp=2"),
        *[
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in [
                *[(2, "zero1"), (4, "zero2"), (4, "zero3"), (4, "hsdp"), (4, "dp=2,tp=2"), (4, "zero3,tp=2")]
            ]
        ],
    ],
)
def test_operations_equal_a_loop_by_hand(size: int, plan: str) -> None:
    assert difference_from_hand(size, plan) < 1e-10


@pytest.mark.processes
def test_warmup_of_the_decay() -> None:
    assert difference_from_hand(2, "zero3", Bootstrap(warmup=True)) < 1e-10
    assert abs(train_by_hand(True)[2] / train_by_hand(False)[2] - 1) > 1e-3


def norm_of_one_shard() -> Any:
    """Normalize each shard by its own norm."""

    def patch(original: Any) -> Any:
        return lambda parameter, operation: original(parameter.to_local(), operation)

    return replaced(weight_operations, "_normalize_", patch)


@pytest.mark.processes
def test_norms_of_shards_differ() -> None:
    assert difference_from_hand(2, "zero3", fault=norm_of_one_shard) > 1e-3


class Averaged(Bootstrap):
    """For pipelines, which refuse operations on two modules."""

    def model(self) -> nn.Module:
        model = Twins()
        return nn.Sequential(model.online[:3], nn.Tanh(), model.head)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()

    def after_step(self) -> Any:
        return [Normalize("2.weight"), Clamp("0.2.weight", high=0.3), Ema(decay=0.7, every=2)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "pp=2,microbatches=2"),
        pytest.param(4, "zero3,pp=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param(4, "pp=2,tp=2,microbatches=2", marks=pytest.mark.slow),
    ],
)
def test_pipelines_equal_one_process(size: int, plan: str) -> None:
    found, expected = (
        train_on_ranks(size, Averaged(), SPEC, plan),
        train_on_ranks(1, Averaged(), SPEC, "single"),
    )
    assert relative_difference(found.losses, expected.losses) < 1e-10
    assert abs(found.metrics[-1]["loss"] / expected.metrics[-1]["loss"] - 1) < 1e-10


@pytest.mark.processes
def test_checkpoints_contain_the_average(tmp_path: Path) -> None:
    """A resumed training continues the average, also under another plan."""
    spec = SPEC.model_copy(update={"task": f"{__file__}:Bootstrap", "steps": 8, "threads": 1})
    spec = spec.model_copy(update={"save": Save(minutes=NEVER)})
    train_run(2, spec, "zero3", tmp_path / "undisturbed")
    assert train_run(2, spec, "zero3", tmp_path / "stopped", 5)[-1].reason == "stopped"
    train_run(2, spec, "ddp", tmp_path / "stopped")
    paths = [RunFolder(tmp_path / name).checkpoint(8) for name in ("undisturbed", "stopped")]
    averages = [load_weights(path, averaged=True) for path in paths]
    assert averages[0].keys() == load_weights(paths[0]).keys()
    for name, tensor in averages[0].items():
        torch.testing.assert_close(averages[1][name], tensor, rtol=1e-10, atol=1e-12)
    weights = checkpoint_weights(tmp_path / "undisturbed")
    different = unequal_tensors(weights, {name: tensor.numpy() for name, tensor in averages[0].items()})
    assert {name.split(".")[0] for name in different} == {"online", "head", "old"}


def returns(*operations: Any) -> Any:
    class Returns(Bootstrap):
        def after_step(self) -> Any:
            return operations[0] if len(operations) == 1 else operations

    return Returns()


REFUSED = {
    "no list": (returns(3), "must return a list of operations"),
    "no operation": (
        returns(Ema(), "ema"),
        "must return operations of paceline.after_step, such as Ema",
    ),
    "two averages": (returns(Ema(), Ema(0.9)), "returned two Ema"),
    "no parameter": (
        returns(Ema(params="body.*")),
        r"no parameter of the model matches 'body.\*'",
    ),
    "no module": (returns(Polyak("online", "targte")), "no module 'targte'; its modules are online, target"),
    "other shapes": (returns(CopyTo("online", "head")), "online and head differ: 0.weight has shape"),
    "trained": (returns(CopyTo("target", "online")), r"online.0.weight is trained; in model\(\), call"),
    "itself": (returns(CopyTo("target", "target")), "is the same tensor"),
    "no dim": (returns(Normalize("head.*", dim=1)), r"head.bias has shape \(4,\), so no dim 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operations_that_cannot_be_applied(what: str) -> None:
    task, message = REFUSED[what]
    with pytest.raises(TaskError, match=message):
        WeightOperations(read_operations(task, ResolvedPlan()), Twins(), ResolvedPlan())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("local-sgd,period=2", r"plan local-sgd,.*: after_step\(\) needs the weights of one process"),
        ("parameter-server", r"plan parameter-server,.*: after_step\(\) needs"),
        ("pp=2", r"plan .*: Polyak of after_step\(\) reads online and writes target"),
    ],
)
def test_plans_that_cannot_apply_operations(plan: str, message: str) -> None:
    resolved = parse(plan).resolve(4)
    with pytest.raises(PlanError, match=message):
        WeightOperations(read_operations(Bootstrap(), resolved), Twins(), resolved)


@pytest.mark.processes
def test_example_of_the_page(tmp_path: Path) -> None:
    """Evaluations use the average, and an export writes it on request."""
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    [program] = [code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "Ema" in code]
    (tmp_path / "views.py").write_text(program)
    words = ("--steps", "6", "--ranks", "2", "--plan", "zero3", "--device", "cpu", "--run-dir", "r")
    succeed("train", "views.py:TwoViews", *words, at=tmp_path)
    succeed("export", "r", "weights.safetensors", at=tmp_path)
    succeed("export", "r", "ema.safetensors", "--ema", at=tmp_path)
    weights, averaged = (load_file(tmp_path / f"{name}.safetensors") for name in ("weights", "ema"))
    assert weights.keys() == averaged.keys()
    assert {name for name in weights if not weights[name].equal(averaged[name])} == {
        name for name in weights if name.startswith("online")
    }
    written = load_weights(RunFolder(tmp_path / "r").checkpoint(6), averaged=True)
    assert all(tensor.equal(averaged[name]) for name, tensor in written.items())
