"""The experts of a mixture are balanced over the global batch, as transformers does in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from faults import replaced
from harness import train_on_ranks
from hf_folders import write_folder, write_text
from paceline import Spec, Task
from paceline.data.order import shuffle
from paceline.errors import Error
from paceline.parallel.loss.batch_sums import SumsOfParts
from paceline.task import load_task

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

STEPS, BATCH, LENGTH, WEIGHT = 4, 8, 8, 0.1


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for kind in ("mixtral", "qwen3_moe"):
        write_folder(folder / kind, kind, output_router_logits=True, router_aux_loss_coef=WEIGHT)
    write_folder(folder / "llama")
    write_text(folder / "text.txt", repeats=6)
    return folder


def request(folder: Path, precision: str = "fp32", **fields: Any) -> tuple[Task, Spec]:
    values = {"data": str(folder.parent / "text.txt"), "length": LENGTH, **fields}
    values["validation"] = values["data"]
    spec = Spec(task=f"hf:{folder}", set=values, steps=STEPS, batch=BATCH, precision=precision)
    return load_task(spec.task, spec.set), spec


def read_windows(folder: Path) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([*tokenizer.encode((folder.parent / "text.txt").read_text()), 1])
    count = (len(tokens) - 1) // LENGTH
    return torch.stack([tokens[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(count)])


def balance_by_hand(output: Any, top_k: int) -> Tensor:
    """Return the loss that balances the experts, in the precision of the model."""
    logits = torch.cat(output.router_logits)
    probabilities = logits.softmax(-1)
    chosen = F.one_hot(logits.topk(top_k).indices, logits.shape[-1]).sum(1)
    return logits.shape[-1] * (chosen.to(logits.dtype).mean(0) * probabilities.mean(0)).sum()


def train_plainly(folder: Path, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the losses of a loop of transformers alone, on the same samples.

    In float32 the balance is that of transformers, which computes it in float32 for each type.
    """
    from transformers import AutoModelForCausalLM

    windows = read_windows(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses: dict[str, list[float]] = {"loss": [], "aux_loss": []}

    def compute(window: Tensor) -> tuple[Tensor, Tensor]:
        output = model(input_ids=window[:, :-1])
        is_exact = dtype == torch.float64
        balance = balance_by_hand(output, model.num_experts_per_tok) if is_exact else output.aux_loss
        loss = F.cross_entropy(output.logits.transpose(1, 2), window[:, 1:])
        return loss + model.router_aux_loss_coef * balance, balance

    for indices in shuffle(np.arange(STEPS * BATCH), len(windows), 0).reshape(STEPS, BATCH):
        loss, balance = compute(windows[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses["loss"].append(loss.item())
        losses["aux_loss"].append(balance.item())
    with torch.no_grad():
        losses["validation"] = [value.item() for value in compute(windows)]
    return losses


def check(folder: Path, ranks: int, plan: str, precision: str, fault: Any = None) -> None:
    dtype, rtol = (torch.float64, 1e-10) if precision == "fp64" else (torch.float32, 1e-5)
    expected = train_plainly(folder, dtype)
    task, spec = request(folder, precision)
    found = train_on_ranks(ranks, task, spec, plan, *((fault,) if fault else ()))
    np.testing.assert_allclose(found.losses, expected["loss"], rtol=rtol)
    np.testing.assert_allclose(found.named["aux_loss"], expected["aux_loss"], rtol=rtol)
    metrics = [found.metrics[-1][name] for name in ("loss", "aux_loss")]
    np.testing.assert_allclose(metrics, expected["validation"], rtol=rtol)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "ranks", "plan", "precision"),
    [
        ("mixtral", 2, "zero3", "fp64"),
        slow("mixtral", 1, "single", "fp32"),
        slow("mixtral", 2, "ddp", "fp32"),
        slow("mixtral", 2, "zero1", "fp64"),
        slow("mixtral", 2, "tp=2", "fp64"),
        slow("mixtral", 2, "pp=2,microbatches=2,pp_schedule=gpipe", "fp64"),
        slow("mixtral", 2, "ddp,recompute=full", "fp64"),
        slow("mixtral", 2, "zero3,microbatches=2", "fp64"),
        slow("qwen3_moe", 2, "ddp,microbatches=2", "fp32"),
        slow("qwen3_moe", 2, "zero2", "fp64"),
        slow("qwen3_moe", 2, "tp=2", "fp64"),
        slow("qwen3_moe", 4, "dp=2,tp=2,zero=3", "fp64"),
        slow("qwen3_moe", 4, "hsdp", "fp64"),
    ],
)
def test_experts_are_balanced_as_by_transformers(
    here: Path, kind: str, ranks: int, plan: str, precision: str
) -> None:
    check(here / kind, ranks, plan, precision)


def with_balance_of_parts() -> Any:
    """Compute the balance of each part, as a task that returns the loss of the model does."""
    return replaced(SumsOfParts, "reduce", lambda _: lambda self, device, group: self.whole())


@pytest.mark.slow
def test_the_balance_of_parts_is_found(here: Path) -> None:
    with pytest.raises(AssertionError):
        check(here / "mixtral", 2, "ddp", "fp64", with_balance_of_parts)


def test_the_weight_may_be_set_or_0(here: Path) -> None:
    assert request(here / "mixtral")[0].loss_weights() == {"aux_loss": WEIGHT}
    assert request(here / "mixtral", router_aux_loss_coef=0.5)[0].loss_weights() == {"aux_loss": 0.5}
    for kind, weight in (("mixtral", 0.0), ("llama", None), ("llama", 0.0)):
        task, _ = request(here / kind, router_aux_loss_coef=weight)
        assert task.loss_weights() == {}
        assert not task._has_auxiliary_loss()
    # A config that requests no router logits, as most do
    config = here / "plain"
    write_folder(config, "mixtral", router_aux_loss_coef=WEIGHT)
    assert request(config)[0].loss_weights() == {}
    model = request(config)[0].model()
    assert not model.config.output_router_logits
    assert request(config, router_aux_loss_coef=0.2)[0].model().config.output_router_logits


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1 requires a mixture of experts"),
        ("mixtral", {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef must be 0 or above, got -1.0"),
    ],
)
def test_unsuitable_weights_are_refused(here: Path, kind: str, fields: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        request(here / kind, **fields)


def error_of(task: Task, spec: Spec, plan: str) -> str:
    try:
        harness.train_on_this_rank(task, spec, plan)
    except Error as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("cp=2", "blocks store results elsewhere than in their output; use a plan without cp"),
        ("pp=2,microbatches=2", "use pp_schedule=gpipe or microbatches=1"),
    ],
)
def test_other_plans_are_refused(here: Path, plan: str, reason: str) -> None:
    for message in harness.ranks(2)(error_of, *request(here / "mixtral"), plan):
        assert reason in message, message
