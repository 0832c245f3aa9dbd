"""A Hugging Face folder trains as in a plain loop of transformers, under every plan."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from harness import train_on_ranks
from hf_folders import write_folder, write_text
from paceline import Spec, Task, train
from paceline.data.open_samples import open_training_samples
from paceline.data.order import shuffle
from paceline.events import Step
from paceline.hf.task import HuggingFace
from paceline.task import load_task
from paceline.training.init.pretrained import PretrainedWeights

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

STEPS, BATCH, LENGTH = 20, 8, 8
PLANS = ["ddp", "tp=2", "pp=2,microbatches=2"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for kind in ("llama", "gpt2"):
        write_folder(folder / kind, kind, shard_bytes=20_000)
    write_text(folder / "text.txt", repeats=6)
    return folder


def request(folder: Path, precision: str = "fp64", **fields: Any) -> tuple[Task, Spec]:
    """Return a task and its request: 20 steps over several epochs of uneven length."""
    values = {"data": str(folder.parent / "text.txt"), "length": LENGTH, **fields}
    spec = Spec(task=f"hf:{folder}", set=values, steps=STEPS, batch=BATCH, precision=precision)
    return load_task(spec.task, spec.set), spec


def train_plainly(folder: Path, dtype: torch.dtype) -> list[float]:
    """Return the losses of a loop of transformers alone, on the same samples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([*tokenizer.encode((folder.parent / "text.txt").read_text()), 1])
    assert tokenizer.eos_token_id == 1
    count = (len(tokens) - 1) // LENGTH
    windows = torch.stack([tokens[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(count)])
    assert count % BATCH, "the epochs must not end with a batch"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for indices in shuffle(np.arange(STEPS * BATCH), count, 0).reshape(STEPS, BATCH):
        window = windows[indices]
        if dtype == torch.float32:
            loss = model(input_ids=window, labels=window).loss  # transformers shifts the labels
        else:  # its loss is float32 for logits of any type
            logits = model(input_ids=window[:, :-1]).logits
            loss = F.cross_entropy(logits.transpose(1, 2), window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected(here: Path) -> dict[str, list[float]]:
    return {}


def check(folder: Path, expected: dict[str, list[float]], ranks: int, plan: str) -> None:
    if folder.name not in expected:
        expected[folder.name] = train_plainly(folder, torch.float64)
    task, spec = request(folder)
    losses = train_on_ranks(ranks, task, spec, plan).losses
    np.testing.assert_allclose(losses, expected[folder.name], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_losses_are_those_of_a_plain_loop(here: Path, expected: dict[str, list[float]], plan: str) -> None:
    check(here / "llama", expected, 2, plan)


@contextlib.contextmanager
def refuse_whole_tensors() -> Iterator[None]:
    """Raise if a rank reads a whole tensor of the folder."""

    def read(self: PretrainedWeights, name: str) -> torch.Tensor:
        raise ValueError(f"{name} is read whole")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainedWeights, "read", read)
        yield


def test_a_rank_reads_only_its_part_of_the_weights(here: Path, expected: dict[str, list[float]]) -> None:
    task, spec = request(here / "llama")
    losses = train_on_ranks(2, task, spec, "zero3", refuse_whole_tensors).losses
    if "llama" not in expected:
        expected["llama"] = train_plainly(here / "llama", torch.float64)
    np.testing.assert_allclose(losses, expected["llama"], rtol=1e-10)


@pytest.mark.slow
def test_a_rank_that_reads_whole_tensors_is_noticed(here: Path) -> None:
    task, spec = request(here / "llama")
    with pytest.raises(AssertionError, match=r"ValueError: \S+ is read whole"):
        train_on_ranks(2, task, spec, "ddp", refuse_whole_tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *(("gpt2", plan) for plan in (*PLANS, "zero1", "zero3", "cp=2")),
        *(("llama", plan) for plan in ("zero1", "zero2", "cp=2")),
    ],
)
def test_losses_of_other_models(here: Path, expected: dict[str, list[float]], kind: str, plan: str) -> None:
    check(here / kind, expected, 2, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["zero3", "hsdp", "zero3,tp=2", "pp=2,tp=2,microbatches=2", "zero2,pp=2,microbatches=2"]
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_on_four_ranks(here: Path, expected: dict[str, list[float]], kind: str, plan: str) -> None:
    check(here / kind, expected, 4, plan)


@pytest.mark.slow
def test_float32_losses_are_those_of_a_plain_loop(here: Path) -> None:
    task, spec = request(here / "llama", "fp32")
    losses = [event.loss for event in train(spec, task=task) if isinstance(event, Step)]
    np.testing.assert_allclose(losses, train_plainly(here / "llama", torch.float32), rtol=1e-6)


class AnswersOnly(HuggingFace):
    """A fine-tuning whose samples label only some tokens: each sample another number of them."""

    def dataset(self, split: str) -> Any:
        windows: Any = super().dataset(split)
        return [self.mask(windows[index], index) for index in range(len(windows))] if windows else None

    @staticmethod
    def mask(sample: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
        labels = sample["labels"].clone()
        labels[: index % LENGTH] = -100
        return sample | {"labels": labels}


def test_labels_of_some_tokens_are_weighted_by_the_global_batch(here: Path) -> None:
    """The loss of hf: has weights if a subclass has samples of its own."""
    folder = here / "llama"
    fields = {"data": str(here / "text.txt"), "length": LENGTH}
    task = AnswersOnly(folder=str(folder), **fields)
    samples: Any = task.dataset("train")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    expected = []
    for indices in shuffle(np.arange(3 * BATCH), len(samples), 0).reshape(3, BATCH).tolist():
        batch = {key: torch.stack([samples[index][key] for index in indices]) for key in samples[0]}
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    spec = Spec(steps=3, batch=BATCH, precision="fp64")
    np.testing.assert_allclose(train_on_ranks(2, task, spec, "ddp").losses, expected, rtol=1e-10)


def test_windows_of_tokens_have_no_weights(here: Path) -> None:
    task, _ = request(here / "llama")
    samples: Any = task.dataset("train")
    assert all((samples[index]["labels"] >= 0).all() for index in range(len(samples)))
    assert task.weights(samples[0]) is None
    assert (
        AnswersOnly(folder=str(here / "llama"), data=str(here / "text.txt")).weights(samples[0]) is not None
    )


class OwnCollate(HuggingFace):
    """A fine-tuning whose batches have reversed samples."""

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples[::-1])


def test_a_batch_of_windows_is_that_of_the_samples(here: Path) -> None:
    task, spec = request(here / "llama")
    indices = [5, 0, 3]
    samples: Any = task.dataset("train")
    expected = default_collate([samples[index] for index in indices])
    found = samples.batch_of(indices)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert tensor.dtype == expected[key].dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[key])
    read = open_training_samples(task, spec)[(indices, indices)]
    assert all(torch.equal(read[key], expected[key]) for key in expected)


def test_collate_of_a_subclass_is_called(here: Path) -> None:
    task = OwnCollate(folder=str(here / "llama"), data=str(here / "text.txt"), length=LENGTH)
    samples: Any = task.dataset("train")
    read: Any = open_training_samples(task, request(here / "llama")[1])[([0, 1], [0, 1])]
    assert torch.equal(read["input_ids"], torch.stack([samples[1]["input_ids"], samples[0]["input_ids"]]))
