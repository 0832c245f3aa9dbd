"""Each optimizer of a request equals a loop on whole tensors, under every plan and with uneven shards."""

import copy
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from faults import replaced
from harness import ranks, relative_difference, to_whole_array, train_on_this_rank
from models import SAMPLES, Pairs, random_normal
from paceline import Spec, Task, train
from paceline.data.order import shuffle
from paceline.distributed.dtensor import is_materialized
from paceline.errors import SpecError
from paceline.optimizer_options import OPTIMIZERS
from paceline.plan.plan import ResolvedPlan, parse
from paceline.run import RunFolder
from paceline.spec import Optimizer
from paceline.training.checkpoint.stored import load_weights
from paceline.training.dry_run.checkpoint_size import FRAME_BYTES, compute_state_bytes
from paceline.training.optimization.optimizer import make_optimizer
from paceline.training.optimizers import adafactor, whole_tensor
from paceline.training.optimizers import muon as muon_module
from paceline.training.optimizers.muon_groups import build_muon
from paceline.verify.run import Verification

STEPS, BATCH = 12, 8
Options = Mapping[str, Any]
State = dict[str, Any]


class Gain(nn.Module):
    """A vector and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.scalar = nn.Parameter(torch.empty(5)), nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.vector + self.scalar).unsqueeze(1)


class Mixed(Task):
    """Tensors with 0 to 3 dimensions, whose first ones 2 and 4 do not divide."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            Gain(),
            nn.Conv1d(1, 3, 2),
            nn.Flatten(),
            nn.Linear(12, 14),
            nn.Tanh(),
            nn.Linear(14, 7),
            nn.Tanh(),
            nn.Linear(7, 3),
        )
        with torch.no_grad():
            for at, parameter in enumerate(model.parameters()):
                values = torch.arange(1, parameter.numel() + 1).double() * (1.7 + at)
                parameter.copy_(values.sin().view_as(parameter) / 2)
        return model

    def dataset(self, split: str) -> Pairs | None:
        if split != "train":
            return None
        return Pairs(x=random_normal(SAMPLES, 5), y=random_normal(SAMPLES, 3, seed=1))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()


# The updates of the papers, on whole tensors: w, its gradient, its state, the count of its steps, options.


def lars(w: Tensor, g: Tensor, state: State, t: int, o: Options) -> None:
    ratio = o["trust_coefficient"] * w.norm() / (g.norm() + o["weight_decay"] * w.norm() + o["eps"])
    ratio = 1.0 if not w.norm() or not g.norm() else min(float(ratio), o["trust_clip"] or math.inf)
    if o["convention"] == "timm" and not o["weight_decay"]:
        ratio = 1.0
    step = ratio * (g + o["weight_decay"] * w)
    inside, outside = (o["lr"], 1) if o["convention"] == "you2017" else (1, o["lr"])
    state["v"] = o["momentum"] * state.get("v", 0) + inside * step
    w -= outside * (inside * step + o["momentum"] * state["v"] if o["nesterov"] else state["v"])


def lamb(w: Tensor, g: Tensor, state: State, t: int, o: Options) -> None:
    b1, b2 = o["betas"]
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    m, v = state["m"], state["v"]
    if o["bias_correction"]:
        m, v = m / (1 - b1**t), v / (1 - b2**t)
    r = m / (v.sqrt() + o["eps"]) + o["weight_decay"] * w
    ratio = float(w.norm() / r.norm()) if w.norm() and r.norm() else 1.0
    if o["convention"] == "timm" and not o["weight_decay"]:
        ratio = 1.0
    w -= o["lr"] * min(ratio, o["trust_clip"] or math.inf) * r


def novograd(w: Tensor, g: Tensor, state: State, t: int, o: Options) -> None:
    b1, b2 = o["betas"]
    square = (g * g).sum()
    state["v"] = square if t == 1 else b2 * state["v"] + (1 - b2) * square
    new = g / (state["v"].sqrt() + o["eps"]) + o["weight_decay"] * w
    state["m"] = b1 * state.get("m", 0) + (1 - b1 if o["grad_averaging"] else 1) * new
    w -= o["lr"] * state["m"]


def lion(w: Tensor, g: Tensor, state: State, t: int, o: Options) -> None:
    b1, b2 = o["betas"]
    m = state.get("m", torch.zeros_like(w))
    w -= o["lr"] * ((b1 * m + (1 - b1) * g).sign() + o["weight_decay"] * w)
    state["m"] = b2 * m + (1 - b2) * g


def plain_adafactor(w: Tensor, g: Tensor, state: State, t: int, o: Options) -> None:
    """Also without the step relative to 1/√t, and without the scale of the weights."""
    beta = 1 - t ** o["beta2_decay"]
    if w.dim() < 2:
        state["v"] = beta * state.get("v", 0) + (1 - beta) * g * g
        variance = state["v"]
    else:
        state["r"] = beta * state.get("r", 0) + (1 - beta) * (g * g).mean(-1)
        state["c"] = beta * state.get("c", 0) + (1 - beta) * (g * g).mean(-2)
        row = state["r"] / state["r"].mean(-1, keepdim=True)
        variance = torch.einsum("...i,...j->...ij", row, state["c"])
    update = g / variance.sqrt()
    lr = min(o["lr"], 1 / math.sqrt(t)) if o["relative_step"] else o["lr"]
    if o["scale_parameter"]:
        lr *= max(o["eps2"], float(w.square().mean().sqrt()))
    w -= lr * update / max(1.0, float(update.square().mean().sqrt()) / o["clip_threshold"])


def newton_schulz(g: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The iteration by singular values: each is mapped by the same odd polynomial."""
    u, s, v = torch.linalg.svd(g / g.norm(), full_matrices=False)
    a, b, c = coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def muon(w: Tensor, g: Tensor, state: State, t: int, o: Options) -> None:
    if w.dim() < 2 or w.shape == (3, 7):  # the head
        b1, b2 = o["betas"]
        state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
        state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
        step = state["m"] / (1 - b1**t) / ((state["v"] / (1 - b2**t)).sqrt() + o["eps"])
        lr = o["adamw_lr"] or o["lr"]
        w -= lr * (step + o["weight_decay"] * w)
        return
    state["b"] = o["momentum"] * state.get("b", 0) + (1 - o["momentum"]) * g
    update = (1 - o["momentum"]) * g + o["momentum"] * state["b"] if o["nesterov"] else state["b"]
    is_fused = o["fused"] is not None and w.shape == (14, 12)
    directions = []
    for part in update.split(7) if is_fused else [update]:
        rows, columns = len(part), part[0].numel()
        scale = max(1, rows / columns) ** 0.5
        if o["adjust_lr"] == "match_rms_adamw":
            scale = 0.2 * max(rows, columns) ** 0.5
        direction = newton_schulz(part.reshape(rows, columns), o["ns_steps"], o["ns_coefficients"])
        directions.append(scale * direction.reshape(part.shape))
    w -= o["lr"] * (torch.cat(directions) + o["weight_decay"] * w)


BY_HAND: dict[str, Callable[..., None]] = {
    "lars": lars,
    "lamb": lamb,
    "novograd": novograd,
    "lion": lion,
    "plain_adafactor": plain_adafactor,
    "muon": muon,
}
TORCH = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}
RECIPES = {
    "adamw": Optimizer(lr=1e-2, weight_decay=0.1),
    "adamw-amsgrad": Optimizer(lr=1e-2, betas=(0.7, 0.9), eps=1e-4, amsgrad=True),
    "sgd": Optimizer(name="sgd", lr=0.05, dampening=0.1),
    "sgd-no-momentum": Optimizer(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.1),
    "sgd-nesterov": Optimizer(name="sgd", lr=0.05, nesterov=True, weight_decay=0.1),
    "adam": Optimizer(name="adam", lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamax": Optimizer(name="adamax", lr=1e-2, betas=(0.8, 0.9)),
    "nadam": Optimizer(name="nadam", lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "nadam-coupled": Optimizer(name="nadam", lr=1e-2, weight_decay=0.1, momentum_decay=0.1),
    "radam": Optimizer(name="radam", lr=1e-2),
    "radam-decoupled": Optimizer(
        name="radam", lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adagrad": Optimizer(name="adagrad", lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "adagrad-decay": Optimizer(name="adagrad", lr=0.1, eps=1e-3, weight_decay=0.1),
    "adadelta": Optimizer(name="adadelta", lr=1.0, weight_decay=0.01),
    "adadelta-rho": Optimizer(name="adadelta", lr=5.0, rho=0.5, eps=1e-4),
    "rmsprop": Optimizer(name="rmsprop", lr=1e-2, momentum=0.5, centered=True),
    "rmsprop-decay": Optimizer(name="rmsprop", lr=1e-2, alpha=0.9, momentum=0.5, weight_decay=0.1),
    "rprop": Optimizer(name="rprop", lr=1e-2, etas=(0.6, 1.1), step_sizes=(1e-5, 0.5)),
    "asgd": Optimizer(name="asgd", lr=0.05, t0=5.0, lambd=1e-3),
    "lion": Optimizer(name="lion", lr=1e-2, weight_decay=0.1),
    "lars": Optimizer(name="lars", lr=1.0, trust_coefficient=0.05, weight_decay=0.01),
    "lars-nesterov": Optimizer(name="lars", lr=1.0, trust_coefficient=0.05, nesterov=True, weight_decay=0.01),
    "lars-no-momentum": Optimizer(name="lars", lr=1.0, trust_coefficient=0.05, momentum=0.0),
    "lars-timm": Optimizer(
        name="lars", lr=1.0, weight_decay=0.01, convention="timm", nesterov=True, trust_clip=5e-4
    ),
    "lars-timm-0": Optimizer(name="lars", lr=0.05, convention="timm"),
    "lamb": Optimizer(name="lamb", lr=0.02, weight_decay=0.1),
    "lamb-2019": Optimizer(name="lamb", lr=0.01, bias_correction=False, trust_clip=0.3),
    "lamb-timm-0": Optimizer(name="lamb", lr=0.02, convention="timm"),
    "novograd": Optimizer(name="novograd", lr=0.01, weight_decay=0.1),
    "novograd-averaging": Optimizer(name="novograd", lr=0.05, grad_averaging=True),
    "adafactor": Optimizer(name="adafactor", lr=0.1, weight_decay=0.1),
    "plain_adafactor": Optimizer(
        name="adafactor", lr=0.02, scale_parameter=False, relative_step=False, clip_threshold=1.1
    ),
    "adafactor-slow": Optimizer(
        name="adafactor", lr=0.1, relative_step=False, beta2_decay=-0.5, clip_threshold=1.5
    ),
    "adafactor-no-scale": Optimizer(name="adafactor", lr=0.1, scale_parameter=False),
    "muon": Optimizer(name="muon", lr=0.02, weight_decay=0.1, ns_precision="full"),
    "muon-coefficients": Optimizer(
        name="muon",
        lr=0.02,
        ns_precision="full",
        ns_coefficients=(2.0, -1.5, 0.5),
        betas=(0.8, 0.9),
        eps=1e-4,
    ),
    "muon-fused": Optimizer(
        name="muon",
        lr=0.02,
        nesterov=False,
        momentum=0.8,
        ns_precision="full",
        ns_steps=3,
        adjust_lr="match_rms_adamw",
        adamw="7.*",
        adamw_lr=0.01,
        fused="3.weight:2",
    ),
}


def request(recipe: str) -> Spec:
    return Spec(steps=STEPS, batch=BATCH, seed=3, precision="fp64", optimizer=RECIPES[recipe])


@cache
def train_by_hand(recipe: str) -> dict[str, np.ndarray]:
    """Return the weights after a training on whole tensors."""
    model, data, spec = Mixed().model().double(), Mixed().dataset("train").columns, RECIPES[recipe]
    x, y = data["x"].double(), data["y"].double()
    options = {"lr": spec.lr, "weight_decay": spec.weight_decay, **spec.options}
    has_options = spec.name == "adafactor" and recipe != "adafactor"  # that torch's does not have
    update = BY_HAND.get("plain_adafactor" if has_options else spec.name)
    states: list[State] = [{} for _ in model.parameters()]
    theirs = None
    if update is None:
        names = OPTIMIZERS["adafactor"].keys() - {"beta2_decay"}
        known = {key: value for key, value in options.items() if key not in names or spec.name != "adafactor"}
        if spec.name == "rprop":
            del known["weight_decay"]
        theirs = TORCH[spec.name](model.parameters(), **known)
    for step in range(STEPS):
        indices = shuffle(np.arange(step * BATCH, (step + 1) * BATCH), SAMPLES, 3).tolist()
        model.zero_grad()
        (model(x[indices]) - y[indices]).square().mean().backward()
        if theirs is not None:
            theirs.step()
            continue
        with torch.no_grad():
            for parameter, state in zip(model.parameters(), states, strict=True):
                update(parameter, parameter.grad, state, step + 1, options)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def train_each(plan: str, recipes: list[str], fault: Any = None) -> dict[str, dict[str, np.ndarray]]:
    arguments = [fault] if fault is not None else []
    return {
        recipe: train_on_this_rank(Mixed(), request(recipe), plan, *arguments).weights for recipe in recipes
    }


def differences_by_hand(size: int, plan: str, recipes: list[str], fault: Any = None) -> dict[str, float]:
    """Return the largest relative difference of a tensor from the loop by hand, for each recipe."""
    on_ranks = ranks(size)(train_each, plan, recipes, fault)
    found = {}
    for recipe in recipes:
        expected, weights = train_by_hand(recipe), {}
        for rank in on_ranks:
            weights |= rank[recipe]
        assert weights.keys() == expected.keys()
        found[recipe] = max(relative_difference(weights[name], expected[name]) for name in expected)
    return found


def test_each_optimizer_is_tested() -> None:
    assert {spec.name for spec in RECIPES.values()} == OPTIMIZERS.keys()


def test_one_process_equals_a_loop_by_hand() -> None:
    found = {}
    for recipe in RECIPES:
        weights = train_on_this_rank(Mixed(), request(recipe), "single").weights
        expected = train_by_hand(recipe)
        found[recipe] = max(relative_difference(weights[name], expected[name]) for name in expected)
    assert {recipe: error for recipe, error in found.items() if error > 1e-10} == {}


def test_muon_equals_torch() -> None:
    """In bf16, the data type of torch's iteration, for a model of matrices."""
    task, spec = models.Points(), Optimizer(name="muon", lr=0.02, weight_decay=0.1, adamw="")
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))
    twin = copy.deepcopy(model)
    ours = make_optimizer(task, spec, ResolvedPlan(), model)
    theirs = torch.optim.Muon(twin.parameters(), lr=0.02, weight_decay=0.1)
    for seed in range(5):
        for net in (model, twin):
            net(random_normal(4, 5, seed=seed)).square().sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_difference(parameter.detach(), expected.detach()) < 1e-6  # one bf16 bit is 4e-3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(9, 4), nn.Parameter(torch.zeros(1, 5, 4))
        self.attention, self.qkv = nn.MultiheadAttention(4, 1), nn.Linear(4, 12)
        self.kv, self.out = nn.Linear(4, 8), nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.zeros(3, 4, 5))
        self.head = nn.Linear(4, 9, bias=False)


def names_of_groups(model: nn.Module, **options: Any) -> dict[tuple[bool, int], set[str]]:
    spec, notes = Optimizer(name="muon", **options), []
    muon = build_muon(spec, model, dict(model.named_parameters()), {}, notes)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert len(notes) == 1
    return {
        (group["matrix"], group["blocks"]): {names[parameter] for parameter in group["params"]}
        for group in muon.param_groups
    }


def test_what_muon_orthogonalizes() -> None:
    model = Attention()
    groups = names_of_groups(model)
    assert groups[True, 3] == {"attention.in_proj_weight", "qkv.weight"}
    assert groups[True, 1] == {"attention.out_proj.weight", "kv.weight", "out.weight"}
    assert {"embedding.weight", "position", "experts", "head.weight"} <= groups[False, 1]
    groups = names_of_groups(model, adamw="out.*,embedding.*", fused="kv.weight:2")
    assert groups[True, 2] == {"kv.weight"}
    assert "head.weight" in groups[True, 1]
    assert {"out.weight", "embedding.weight"} <= groups[False, 1]
    model.head.weight = model.embedding.weight
    assert "out.weight" in names_of_groups(model)[True, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adamw": "none.*"}, r"optimizer.adamw: no trained parameter of the model matches 'none.\*'; its"),
        ({"fused": "qkv.weight"}, r"optimizer.fused must be PATTERN:NUMBER,…, such as \*.qkv.weight:3, got"),
        ({"fused": "qkv.weight:5"}, "qkv.weight has 12 rows, which are not 5 equal matrices; leave it out"),
        ({"adamw": "*"}, r"optimizer.adamw='\*' leaves no matrix to muon; leave some out"),
        ({"fused": "no.weight:3"}, "optimizer.fused: no trained parameter of the model matches 'no.weight'"),
    ],
)
def test_patterns_without_matches_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        names_of_groups(Attention(), **options)


@pytest.mark.parametrize("recipe", ["adamw", "lamb", "novograd", "adafactor", "muon", "rprop"])
def test_size_of_a_checkpoint_without_values(recipe: str) -> None:
    model = Mixed().model()
    optimizer = make_optimizer(Mixed(), RECIPES[recipe], ResolvedPlan(), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [*model.parameters()]
    tensors += [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    expected = sum(tensor.nbytes + FRAME_BYTES for tensor in tensors)
    assert compute_state_bytes(Spec(optimizer=RECIPES[recipe]), Mixed()) == expected


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


OWN = ["rprop", "lion", "lars", "lamb", "novograd", "adafactor", "muon-fused"]


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["zero1", "zero3", "tp=2", "pp=2,microbatches=2"])
def test_own_optimizers_equal_a_loop_by_hand(plan: str) -> None:
    found = differences_by_hand(2, plan, OWN)
    assert {recipe: error for recipe, error in found.items() if not error <= 1e-10} == {}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "zero1"),
        (2, "zero3"),
        (2, "tp=2"),
        (2, "pp=2,microbatches=2"),
        (2, "ddp"),
        (2, "zero2"),
        (4, "zero3"),
        (4, "zero1"),
        (4, "hsdp"),
        (4, "dp=2,tp=2,zero=3"),
        (4, "dp=2,tp=2,zero=1"),
        (4, "dp=2,pp=2,zero=2,microbatches=2"),
        (4, "tp=2,pp=2,microbatches=2"),
    ],
)
def test_each_plan_equals_a_loop_by_hand(size: int, plan: str) -> None:
    found = differences_by_hand(size, plan, [*RECIPES])
    assert {recipe: error for recipe, error in found.items() if not error <= 1e-10} == {}


def save_and_resume(plan: str, recipes: list[str], folder: str, steps: int, begin: int) -> dict[str, Any]:
    """Train to a step with a checkpoint at the end, from the checkpoint of step `begin` if that is not 0."""
    found = {}
    for recipe in recipes:
        run = RunFolder(Path(folder) / recipe)
        run.path.mkdir(exist_ok=True, parents=True)
        observed: list[nn.Module] = []
        spec = request(recipe).model_copy(update={"steps": steps})
        events = list(
            train(
                spec, plan, task=Mixed(), run=run, observe=lambda model, *_, seen=observed: seen.append(model)
            )
        )
        assert events[0].step == begin, events[0]
        found[recipe] = {
            name: to_whole_array(tensor)
            for name, tensor in observed[-1].named_parameters()
            if is_materialized(tensor)
        }
    return found


RESUMED = 7
STATEFUL = ["lamb", "novograd", "adafactor", "muon-fused"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "second", "recipes"),
    [
        ((2, "zero3"), (1, "single"), STATEFUL),
        ((1, "single"), (2, "tp=2"), STATEFUL),
        slow((2, "zero1"), (2, "zero3"), [*RECIPES]),
        slow((2, "pp=2,microbatches=2"), (2, "zero1"), [*RECIPES]),
        slow((4, "dp=2,tp=2,zero=3"), (2, "zero2"), [*RECIPES]),
        slow((2, "tp=2"), (4, "hsdp"), [*RECIPES]),
        slow((4, "hsdp"), (4, "dp=2,tp=2,zero=3"), [*RECIPES]),
    ],
    ids=["zero3-single", "single-tp", "zero1-zero3", "pp-zero1", "mixed-zero2", "tp-hsdp", "hsdp-mixed"],
)
def test_state_is_saved_and_read_under_another_plan(
    first: tuple[int, str], second: tuple[int, str], recipes: list[str], tmp_path: Path
) -> None:
    ranks(first[0])(save_and_resume, first[1], recipes, str(tmp_path), RESUMED, 0)
    weights: dict[str, dict[str, np.ndarray]] = {recipe: {} for recipe in recipes}
    for rank in ranks(second[0])(save_and_resume, second[1], recipes, str(tmp_path), STEPS, RESUMED):
        for recipe in recipes:
            weights[recipe] |= rank[recipe]
    errors = {
        recipe: max(
            relative_difference(weights[recipe][name], value) for name, value in train_by_hand(recipe).items()
        )
        for recipe in recipes
    }
    assert {recipe: error for recipe, error in errors.items() if not error <= 1e-10} == {}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "plan"),
    [(2, "ddp"), (2, "zero2"), (4, "hsdp")],
)
def test_resumed_and_exported_weights_are_bit_equal(size: int, plan: str, tmp_path: Path) -> None:
    recipes = ["plain_adafactor", "muon-fused", *OPTIMIZERS]

    def train_in(folder: str, steps: int, begin: int) -> list[dict[str, Any]]:
        return ranks(size)(save_and_resume, plan, recipes, str(tmp_path / folder), steps, begin)

    undisturbed = train_in("undisturbed", STEPS, 0)
    train_in("stopped", RESUMED, 0)
    resumed = train_in("stopped", STEPS, RESUMED)
    for recipe in recipes:
        exported = load_weights(RunFolder(tmp_path / "stopped" / recipe).checkpoint(STEPS))
        assert exported.keys() == train_by_hand(recipe).keys()
        for found, expected in zip(resumed, undisturbed, strict=True):
            for name, weights in expected[recipe].items():
                assert np.array_equal(found[recipe][name], weights), (recipe, name)
                assert np.array_equal(exported[name].numpy(), weights), (recipe, name)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("task", "plans"), [("Points", ("zero2", "zero3")), ("Tempered", ("tp=2",))])
def test_verify_accepts_each_optimizer(task: str, plans: tuple[str, ...]) -> None:
    found = {}
    for recipe, optimizer in RECIPES.items():
        if recipe == "muon-fused":  # names layers of another model
            continue
        spec = Spec(task=f"models:{task}", batch=8, steps=3, seed=3, optimizer=optimizer)
        with Verification(spec, 2) as verification:
            for plan in plans:
                verdict = verification.verify(parse(plan))
                if not verdict.same:
                    found[recipe, plan] = verdict.first
    assert found == {}


# Negative controls


def norms_of_shards() -> Any:
    """Leave out the sum over shards."""

    def patch(original: Any) -> Any:
        return lambda params, parts: [list(of_group) for of_group in parts]

    return replaced(whole_tensor, "sum_shards", patch)


def places_at_the_begin() -> Any:
    """Take the first rows and columns on each rank."""

    def patch(original: Any) -> Any:
        return lambda parameter: tuple(slice(0, part.stop - part.start) for part in original(parameter))

    return replaced(adafactor, "find_place", patch)


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["zero3", "tp=2"])
def test_sums_over_shards_alone_are_caught(plan: str) -> None:
    recipes = ["lars", "lamb", "novograd", "adafactor"]
    found = differences_by_hand(2, plan, recipes, norms_of_shards)
    assert all(error > 1e-6 for error in found.values()), found


@pytest.mark.processes
def test_rows_of_another_rank_are_caught() -> None:
    assert differences_by_hand(2, "zero3", ["adafactor"], places_at_the_begin)["adafactor"] > 1e-6


def orthogonal_shards() -> Any:
    """Orthogonalize the shard of each rank."""

    def patch(original: Any) -> Any:
        return lambda params, shards, function: [function(shard) for shard in shards]

    return replaced(muon_module, "update_matrices", patch)


@pytest.mark.processes
def test_orthogonal_shards_are_caught() -> None:
    assert differences_by_hand(2, "zero3", ["muon"], orthogonal_shards)["muon"] > 1e-3
