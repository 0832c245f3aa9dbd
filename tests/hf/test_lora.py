"""Adapters of low rank, compared with a plain loop over a frozen model of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness import train_on_ranks
from hf_folders import write_folder, write_text
from paceline import Spec, Task, train
from paceline.data.order import shuffle
from paceline.errors import Error
from paceline.events import Step
from paceline.hf import export
from paceline.task import load_task
from paceline.training.init.deferred_init import fill_
from paceline.training.init.named_tensors import named_tensors
from paceline.training.init.pretrained import PretrainedWeights
from paceline.training.model_facts.model_analysis import build_meta_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

STEPS, BATCH, LENGTH, RANK, ALPHA = 10, 8, 8, 4, 6.0


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for kind in ("llama", "gpt2"):
        write_folder(folder / kind, kind, shard_bytes=20_000)
    write_folder(folder / "bert", "bert", "AutoModelForSequenceClassification")
    write_text(folder / "text.txt", repeats=6)
    return folder


def request(folder: Path, **fields: Any) -> tuple[Task, Spec]:
    values = {
        "data": str(folder.parent / "text.txt"),
        "length": LENGTH,
        **fields,
        "lora": {"rank": RANK, "alpha": ALPHA, **fields.get("lora", {})},
    }
    spec = Spec(task=f"hf:{folder}", set=values, steps=STEPS, batch=BATCH, precision="fp64")
    return load_task(spec.task, spec.set), spec


def initial_values(folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    task, spec = request(folder, **fields)
    analysis = build_meta_model(spec, task)
    assert analysis.recorded
    source: Any = task.pretrained()
    fill_(analysis.model, analysis.weights, torch.device("cpu"), PretrainedWeights(source, analysis.model))
    return {name: tensor.detach() for name, tensor in named_tensors(analysis.model).items()}


def train_plainly(folder: Path) -> tuple[list[float], Any]:
    """Return the losses of a plain loop, and the model with hooks that add the adapters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = initial_values(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([*tokenizer.encode((folder.parent / "text.txt").read_text()), 1])
    count = (len(tokens) - 1) // LENGTH
    windows = torch.stack([tokens[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(count)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.requires_grad_(False)
    trained = []
    for name, layer in model.named_modules():
        if f"{name}.lora_A" not in start:
            continue
        first, second = (start[f"{name}.lora_{part}"].clone().requires_grad_() for part in "AB")
        assert not second.any(), "B starts at 0"
        trained += [first, second]
        layer.register_forward_hook(
            lambda _, args, output, first=first, second=second: (
                output + (args[0] @ first.T) @ second.T * (ALPHA / RANK)
            )
        )
    assert len(trained) == (28 if folder.name == "llama" else 16)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    losses = []
    for indices in shuffle(np.arange(STEPS * BATCH), count, 0).reshape(STEPS, BATCH):
        window = windows[indices]
        logits = model(input_ids=window[:, :-1]).logits
        loss = F.cross_entropy(logits.transpose(1, 2), window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_losses_are_those_of_a_plain_loop_and_merged_weights_give_its_logits(
    here: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    expected, model = train_plainly(here / "gpt2")
    task, spec = request(here / "gpt2")
    found: list[Any] = []
    events = train(spec, task=task, observe=lambda model, what, step: found.append(model))
    losses = [event.loss for event in events if isinstance(event, Step)]
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    export.write_folder(found[-1].state_dict(), export.find_model(spec), tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(4, 20).reshape(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3", "tp=2", "pp=2,microbatches=2", "cp=2"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_on_two_ranks(here: Path, kind: str, plan: str) -> None:
    losses = train_on_ranks(2, *request(here / kind), plan).losses
    np.testing.assert_allclose(losses, train_plainly(here / kind)[0], rtol=1e-10)


def trained_names(folder: Path, **fields: Any) -> set[str]:
    model = request(folder, **fields)[0].model()
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_only_adapters_are_trained(here: Path) -> None:
    chosen = trained_names(here / "llama", lora={"targets": ["q_proj", "v_proj"]})
    assert chosen == {
        f"model.layers.{layer}.self_attn.{name}_proj.lora_{part}"
        for layer in (0, 1)
        for name in "qv"
        for part in "AB"
    }
    every = trained_names(here / "bert", objective="classification")
    assert {"classifier.weight", "classifier.bias"} < every
    assert all("lora_" in name for name in every - {"classifier.weight", "classifier.bias"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ["q_porj"]}, r"no linear layer 'q_porj'; did you mean q_proj\?"),
        ({"rank": 0}, "lora.rank must be greater than or equal to 1, got 0"),
        ({"alpha": 0.0}, "lora.alpha must be greater than 0, got 0.0"),
        ({"rnak": 2}, r"unknown field lora.rnak"),
    ],
)
def test_bad_adapters_are_refused(here: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        request(here / "llama", lora=fields)[0].model()
