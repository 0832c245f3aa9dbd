"""trainer_task computes the losses of the Trainer of transformers, and refuses other models."""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import paceline
from command import clean_environment
from paceline import Spec, Step
from paceline.adapters.trainer import TrainerTask, trainer_task
from paceline.adapters.trainer_losses import LOSSES
from paceline.errors import TaskError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # transformers imports for seconds
STEPS = 20

COMMON = """
import json, sys
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers import LlamaConfig, LlamaForCausalLM

def build(name):
    torch.manual_seed(4)
    if name == "bert":
        return BertForSequenceClassification(BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16,
        ))
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))

def texts(name):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in torch.randperm(96, generator=generator).tolist():
        length = 4 + index % 9
        tokens = torch.randint(1, 50, (length,), generator=generator).tolist()
        row = {"input_ids": tokens, "number": index}
        rows.append(row | ({"label": index % 2} if name == "bert" else {}))
    return rows

def collate(rows):
    length = 12
    texts = [row["input_ids"] for row in rows]
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    labels = torch.tensor([row["label"] for row in rows]) if "label" in rows[0] else ids.where(mask > 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
"""
NATIVE = """
from common import *

class Recording(transformers.Trainer):
    losses = []
    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        self.losses.append(loss.item())
        return loss
    def _get_train_sampler(self, *arguments):
        return torch.utils.data.SequentialSampler(self.train_dataset)

arguments = transformers.TrainingArguments(
    output_dir="out", max_steps=20, per_device_train_batch_size=8, learning_rate=5e-3, warmup_steps=4,
    lr_scheduler_type="linear", max_grad_norm=1.0, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, label_names=["labels"], remove_unused_columns=False,
)
name = sys.argv[1]
trainer = Recording(build(name), arguments, train_dataset=texts(name), data_collator=collate)
trainer.train()
json.dump(trainer.losses, open("native.json", "w"))
"""


@pytest.fixture
def common(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "native.py").write_text(NATIVE)
    names: dict = {"__name__": "__main__"}
    exec(COMMON, names)
    return names


def run_native(folder, name):
    result = subprocess.run(
        [sys.executable, "native.py", name],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return json.loads((folder / "native.json").read_text())


SPEC = Spec(
    task="common:Net",
    steps=STEPS,
    batch=8,
    optimizer={"lr": 5e-3, "weight_decay": 0.0, "clip": 1.0},
    schedule={"name": "linear", "warmup": "4 steps", "start": 0.0},
    data={"shuffle": "none"},
)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "plan"), [("llama", "zero3"), ("bert", "ddp,microbatches=2")])
def test_losses_equal_those_of_the_trainer(name, plan, common, tmp_path):
    native = run_native(tmp_path, name)
    model = common["build"](name)
    task = trainer_task(model, common["texts"](name), data_collator=common["collate"])
    losses = [
        event.loss for event in paceline.train(SPEC, plan, ranks=2, task=task) if isinstance(event, Step)
    ]
    assert len(losses) == len(native) == STEPS
    assert losses == pytest.approx(native, rel=1e-6)
    # The weights and the schedule matter for the comparison.
    spec = SPEC.model_copy(update={"schedule": SPEC.schedule.model_copy(update={"warmup": 0})})
    other = [event.loss for event in paceline.train(spec, task=task) if isinstance(event, Step)]
    assert other != pytest.approx(native, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_losses_by_item_average_to_the_loss_of_the_model(name, common):
    model = common["build"](name)
    task = trainer_task(model, common["texts"](name), data_collator=common["collate"])
    batch = task.collate(common["texts"](name)[:6])
    output = model(**task.inputs(batch))
    items, weights = task.loss(output, batch), task.weights(batch)
    mean = items.mean() if weights is None else (items * weights).sum() / weights.sum()
    expected = model(**batch).loss
    assert mean.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["regression", "multi"])
def test_losses_of_samples_are_those_of_transformers(kind, common):
    from transformers.loss.loss_utils import LOSS_MAPPING

    config = common["BertConfig"](num_labels=1 if kind == "regression" else 3)
    logits = torch.randn(5, config.num_labels, generator=torch.Generator().manual_seed(1))
    labels = torch.linspace(0, 1, 5) if kind == "regression" else (torch.arange(15).view(5, 3) % 2).float()
    expected = LOSS_MAPPING["ForSequenceClassification"](labels, logits, config)
    own = LOSSES["ForSequenceClassification"].compute(logits, labels)
    assert own.shape == (5,)
    assert own.mean().item() == pytest.approx(expected.item(), rel=1e-6)


def refuse(model, words, dataset=()):
    with pytest.raises(TaskError, match=re.escape(words)):
        trainer_task(model, list(dataset))


def test_other_models_are_refused(common):
    from transformers import BertForQuestionAnswering, BertModel

    small = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = common["BertConfig"](**small, intermediate_size=8)
    refuse("gpt2", "model must be a model, got the name 'gpt2'; load it")
    refuse(nn.Linear(1, 1), "a model of transformers is required, got Linear")
    refuse(BertModel(config), "BertModel has the loss of its own code")
    refuse(BertForQuestionAnswering(config), "has the loss ForQuestionAnswering, which is not known")
    refuse(
        common["build"]("gpt2").bfloat16(), "has weights of torch.bfloat16; load it with dtype=torch.float32"
    )
    regression = common["BertConfig"](**small, intermediate_size=8, num_labels=3, problem_type="regression")
    refuse(common["BertForSequenceClassification"](regression), "predicts 3 numbers for each sample")
    with pytest.raises(TaskError, match="train_dataset has no length"):
        trainer_task(common["build"]("bert"), iter([]))


def test_a_batch_without_labels_is_refused(common):
    class Net(TrainerTask):
        def model(self):
            return common["build"]("bert")

        def dataset(self, split):
            return [{"input_ids": [1, 2]}]

    task = Net()
    batch = task.collate(task.dataset("train"))
    with pytest.raises(TaskError, match="a batch of Net has no labels, but input_ids"):
        task.loss(None, batch)
