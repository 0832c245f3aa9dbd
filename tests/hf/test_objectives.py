"""The objectives of a Hugging Face folder, compared with plain loops of transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness import train_on_ranks
from hf_folders import TEXT, write_folder, write_text
from paceline import Spec, Task, train
from paceline.data.order import shuffle
from paceline.errors import Error
from paceline.events import Step
from paceline.hf import export
from paceline.hf.folder import open_folder
from paceline.hf.samples import MaskedWindows
from paceline.task import load_task

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

STEPS, BATCH, SAMPLES, LENGTH = 12, 4, 18, 16
AUTO = {
    "masked-lm": ("bert", "AutoModelForMaskedLM"),
    "classification": ("bert", "AutoModelForSequenceClassification"),
    "seq2seq": ("t5", "AutoModelForSeq2SeqLM"),
}
NAMES = ("bad", "fair", "good")
WORDS = TEXT.split()


def rows() -> list[dict[str, Any]]:
    """Return texts of different lengths with targets and labels."""
    return [
        {
            "text": " ".join(WORDS[: 2 + n % 4]),
            "target": " ".join(WORDS[n % 3 : 4 + n % 5]),
            "label": NAMES[n % 3],
        }
        for n in range(SAMPLES)
    ]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    names = {"id2label": dict(enumerate(NAMES)), "label2id": {name: n for n, name in enumerate(NAMES)}}
    for objective, (kind, auto) in AUTO.items():
        changes = names if objective == "classification" else {}
        write_folder(folder / objective, kind, auto, shard_bytes=20_000, **changes)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    write_text(folder / "text.txt", repeats=6)
    return folder


def request(here: Path, objective: str, **fields: Any) -> tuple[Task, Spec]:
    file = "text.txt" if objective == "masked-lm" else "rows.jsonl"
    values = {"data": str(here / file), **fields}
    if objective == "masked-lm":
        values.setdefault("length", LENGTH)
    spec = Spec(task=f"hf:{here / objective}", set=values, steps=STEPS, batch=BATCH, precision="fp64")
    return load_task(spec.task, spec.set), spec


def train_plainly(here: Path, objective: str, batches: Iterator[dict[str, torch.Tensor]]) -> list[float]:
    """Return the losses of a loop over batches that have the arguments of the model, and labels."""
    import transformers

    model = getattr(transformers, AUTO[objective][1]).from_pretrained(here / objective, dtype=torch.float64)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for batch in batches:
        labels = batch.pop("labels")
        logits = model(**batch).logits
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_batches(here: Path, objective: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches that the tokenizer of transformers pads."""
    from transformers import AutoTokenizer

    tokenizer, samples = AutoTokenizer.from_pretrained(here / objective), rows()
    for indices in shuffle(np.arange(STEPS * BATCH), SAMPLES, 0).reshape(STEPS, BATCH):
        chosen = [samples[index] for index in indices]
        batch = dict(tokenizer([row["text"] for row in chosen], padding=True, return_tensors="pt"))
        batch.pop("token_type_ids", None)
        if objective == "classification":
            batch["labels"] = torch.tensor([NAMES.index(row["label"]) for row in chosen])
        else:
            targets = tokenizer([row["target"] for row in chosen], padding=True, return_tensors="pt")
            numbers = targets["input_ids"]
            batch["decoder_input_ids"] = F.pad(numbers, (1, -1))  # starts with 0, which is also the padding
            batch["labels"] = numbers.masked_fill(targets["attention_mask"] == 0, -100)
        yield batch


def run_here(task: Task, spec: Spec) -> list[float]:
    return [event.loss for event in train(spec, task=task) if isinstance(event, Step)]


def record_batches(task: Task) -> list[dict[str, torch.Tensor]]:
    """Return a list that gets each batch of the task."""
    seen: list[dict[str, torch.Tensor]] = []
    loss: Callable[..., Any] = task.loss

    def see(output: Any, batch: dict[str, torch.Tensor]) -> Any:
        if batch["labels"].device.type == "cpu" and len(batch["labels"]) == BATCH:
            seen.append(dict(batch))
        return loss(output, batch)

    object.__setattr__(task, "loss", see)
    return seen


@pytest.mark.parametrize("objective", ["classification", pytest.param("seq2seq", marks=pytest.mark.slow)])
def test_losses_are_those_of_a_plain_loop(here: Path, objective: str) -> None:
    expected = train_plainly(here, objective, plain_batches(here, objective))
    np.testing.assert_allclose(run_here(*request(here, objective)), expected, rtol=1e-10)


def masked_losses(here: Path) -> list[float]:
    """Return the losses of a plain loop over the batches that a training on one process had."""
    task, spec = request(here, "masked-lm")
    seen = record_batches(task)
    losses = run_here(task, spec)
    expected = train_plainly(here, "masked-lm", iter([dict(batch) for batch in seen[-STEPS:]]))
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    return expected


def test_masked_losses_are_those_of_a_plain_loop(here: Path) -> None:
    masked_losses(here)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero3", "tp=2", "pp=2,microbatches=2"])
@pytest.mark.parametrize("objective", AUTO)
def test_losses_on_two_ranks(here: Path, objective: str, plan: str) -> None:
    is_masked = objective == "masked-lm"
    expected = (
        masked_losses(here) if is_masked else train_plainly(here, objective, plain_batches(here, objective))
    )
    fields = {"length": LENGTH} if "pp" in plan else {}  # pipelines require one shape
    losses = train_on_ranks(2, *request(here, objective, **fields), plan).losses
    np.testing.assert_allclose(losses, expected, rtol=1e-10)


def test_masks_hide_the_share_of_tokens_that_is_requested(here: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(here / "masked-lm")
    tokens = 4 + torch.arange(40_000, dtype=torch.int32) % 50
    tokens[::10] = tokenizer.eos_token_id
    torch.manual_seed(0)
    sample = MaskedWindows(tokens, len(tokens), 0.2, tokenizer)[0]
    is_predicted = sample["labels"] != -100
    assert not is_predicted[::10].any(), "special tokens are not predicted"
    assert float(is_predicted.float().mean()) == pytest.approx(0.9 * 0.2, rel=0.05)
    assert torch.equal(sample["labels"][is_predicted], tokens.long()[is_predicted])
    assert torch.equal(sample["input_ids"][~is_predicted], tokens.long()[~is_predicted])
    hidden, original = sample["input_ids"][is_predicted], tokens.long()[is_predicted]
    assert float((hidden == tokenizer.mask_token_id).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((hidden == original).float().mean()) == pytest.approx(0.1, abs=0.03)


def test_longer_texts_are_cut(here: Path) -> None:
    for objective in ("classification", "seq2seq"):
        task, _ = request(here, objective, length=3)
        data = task.dataset("train")
        assert data is not None
        assert max(len(data[index]["input_ids"]) for index in range(len(data))) == 3


def test_classes_by_name(here: Path, tmp_path: Path) -> None:
    """A folder with other classes gets a new head, and the export names the classes of the run."""
    from transformers import AutoModelForSequenceClassification

    task, _ = request(here, "classification", labels=["good", "bad", "fair", "unused"])
    data = task.dataset("train")
    assert data is not None
    assert [data[index]["labels"].item() for index in range(3)] == [1, 2, 0]
    model = task.model()
    assert model.classifier.out_features == 4
    source = open_folder(str(here / "classification" / "config.json"))
    trained = export.TrainedModel(source, "classification", ("good", "bad", "fair", "unused"))
    export.write_folder(model.state_dict(), trained, tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == {0: "good", 1: "bad", 2: "fair", 3: "unused"}
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)


@pytest.mark.parametrize(
    ("objective", "line", "fields", "message"),
    [
        ("classification", {"text": "a"}, {}, "line 1: no value in 'label'; it has text; name the key with"),
        (
            "classification",
            {"text": "a", "label": "worse"},
            {},
            "has the class 'worse', but the model has bad,",
        ),
        ("classification", {"text": "a", "label": 3}, {}, r"has the class 3, but .* \(or 0 to 2\)"),
        ("classification", {"label": 1}, {}, "line 1: no text in 'text'"),
        ("seq2seq", {"text": "a", "target": 3}, {}, "line 1: no text in 'target'"),
        ("seq2seq", None, {}, "has no samples; each line must be a JSON object"),
        ("masked-lm", {"text": "a"}, {"masked": 0.0}, "masked must be above 0 and at most 1, got 0"),
        ("masked-lm", {"text": "a"}, {}, "has 2 tokens, but a sample takes 16; use more text"),
    ],
)
def test_bad_samples_are_refused(
    here: Path, tmp_path: Path, objective: str, line: Any, fields: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(line) if line is not None else "")
    with pytest.raises(Error, match=message):
        request(here, objective, data=str(tmp_path / "a.jsonl"), **fields)[0].dataset("train")


def test_pairs_must_be_json_lines(here: Path) -> None:
    with pytest.raises(Error, match="must be JSON lines with the keys 'text' and 'target'; name it"):
        request(here, "seq2seq", data=str(here / "text.txt"))[0].dataset("train")
