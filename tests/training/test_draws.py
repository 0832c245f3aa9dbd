"""Draws through `rng` are equal under every plan: the training equals a hand-written loop of one process."""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command import checkpoint_weights, unequal_tensors
from drawing import Masked, Oracle, Undeclared, Vae
from faults import replaced
from harness import differences_from_single, relative_difference, train_on_ranks
from models import SAMPLES
from paceline import Spec, train
from paceline.data.order import shuffle
from paceline.sample_rng import SampleNumbers
from paceline.spec import Optimizer, Save
from paceline.training.step import step
from runs import NEVER, train_run

pytestmark = pytest.mark.processes

STEPS, BATCH, LR = 5, 8, 0.05
# Five steps cross the end of an epoch; three ranks have uneven shares.
SPEC = Spec(
    steps=STEPS, batch=BATCH, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=LR, momentum=0)
)


@cache
def train_by_hand() -> tuple[list[float], dict[str, np.ndarray], dict[str, float]]:
    """Return the losses, the weights and the metrics of a training that uses nothing of Paceline but
    the order of the samples."""
    task = Vae()
    model, train, validation = task.model().double(), task.dataset("train"), task.dataset("validation")
    optimizer = torch.optim.SGD(model.parameters(), LR)
    losses = []
    for at in range(STEPS):
        numbers = np.arange(at * BATCH, (at + 1) * BATCH)
        loss = loss_by_hand(model, train, shuffle(numbers, SAMPLES, 3).tolist(), numbers.tolist(), "train")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    numbers = list(range(len(validation)))
    draws = [Oracle(number, derive("validation"), "metrics") for number in numbers]
    shared = [Oracle(number, derive("validation"), "stream/shared") for number in numbers]
    metrics = {
        "loss": loss_by_hand(model, validation, numbers, numbers, "validation").item(),
        "draw": float(np.mean([oracle.rand(1) for oracle in draws])),
        "shared": float(np.mean([next(oracle.words()) % 2**63 % 9 for oracle in shared])),
    }
    return losses, {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}, metrics


def loss_by_hand(model: Any, data: Any, indices: list[int], numbers: list[int], split: str) -> torch.Tensor:
    x, y = data.columns["x"][indices].double(), data.columns["y"][indices].double()
    inputs = [Oracle(number, derive(split), "inputs").randn(5) for number in numbers]
    oracles = [Oracle(number, derive(split), "loss") for number in numbers]
    noise = torch.from_numpy(np.stack([oracle.randn(3) for oracle in oracles]))
    kept = torch.from_numpy(np.stack([oracle.rand(3) for oracle in oracles])) < 0.7
    mean, log_var = model(x + 0.1 * torch.from_numpy(np.stack(inputs))).chunk(2, -1)
    return ((mean + (log_var / 2).exp() * noise - y).square() * kept).mean()


def derive(split: str) -> int:
    """Return the seed of a split."""
    return int.from_bytes(hashlib.blake2b(f"3/rng/{split}".encode(), digest_size=8).digest(), "big") >> 1


def differences_from_hand(size: int, plan: str, fault: Any = None) -> float:
    """Return the largest relative difference of losses, weights and metrics."""
    found = train_on_ranks(size, Vae(), SPEC, plan, *([fault] if fault else []))
    losses, weights, metrics = train_by_hand()
    pairs = [(found.losses, losses), *((found.weights[name], weights[name]) for name in weights)]
    if found.metrics:
        pairs += [([found.metrics[-1][name]], [value]) for name, value in metrics.items()]
    assert found.metrics
    return max(relative_difference(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *((1, "single"), (1, "single,microbatches=4"), (2, "ddp"), (2, "zero3,microbatches=2")),
        *((2, "tp=2"), (2, "pp=2,microbatches=2"), (3, "ddp,uneven=1")),
        *[
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in [
                *((2, "zero1"), (2, "zero2,microbatches=2"), (4, "zero2"), (4, "zero3"), (4, "hsdp")),
                *((4, "dp=2,tp=2"), (4, "dp=2,pp=2,microbatches=2")),
                (2, "pp=2,microbatches=4,pp_schedule=gpipe"),
            ]
        ],
    ],
)
def test_draws_equal_a_loop_by_hand(size: int, plan: str) -> None:
    assert differences_from_hand(size, plan) < 1e-10


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *((2, "zero3,microbatches=2"), (2, "tp=2"), (2, "cp=2"), (2, "pp=2,microbatches=2")),
        *[
            pytest.param(size, plan, marks=pytest.mark.slow)
            for size, plan in [(4, "dp=2,cp=2"), (4, "dp=2,tp=2"), (4, "pp=2,cp=2,microbatches=2")]
        ],
    ],
)
def test_inputs_and_weights_share_a_stream(size: int, plan: str) -> None:
    assert not differences_from_single(size, plan, Masked(), SPEC)


def drawn_by_position() -> Any:
    """Number the samples by their position on the rank."""

    def patch(original: Any) -> Any:
        def number(seed: int, split: str, numbers: list[int], floats: Any) -> SampleNumbers:
            return original(seed, split, range(len(numbers)), floats)

        return number

    return replaced(step, "number_batch", patch)


def test_draws_by_rank_differ() -> None:
    assert differences_from_hand(2, "ddp", drawn_by_position) > 1e-4
    assert differences_from_single(2, "ddp", Undeclared(), SPEC)


def test_resumed_training_draws_the_same(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"task": "drawing:Vae", "steps": 12, "threads": 1})
    spec = spec.model_copy(update={"save": Save(minutes=NEVER)})
    train_run(2, spec, "ddp", tmp_path / "undisturbed")
    assert train_run(2, spec, "ddp", tmp_path / "stopped", 5)[-1].reason == "stopped"
    train_run(2, spec, "ddp", tmp_path / "stopped")
    assert not unequal_tensors(
        checkpoint_weights(tmp_path / "stopped"), checkpoint_weights(tmp_path / "undisturbed")
    )


def test_program_of_the_page_trains(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    [program] = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "class Denoise" in code]
    (tmp_path / "denoise.py").write_text(program)
    *_, ended = train(Spec(task=f"{tmp_path / 'denoise.py'}:Denoise", batch=12, steps=2), device="cpu")
    assert ended.reason == "done"
