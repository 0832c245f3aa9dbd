"""trainer_task computes the losses of the Trainer of transformers, and refuses other models."""

import json
import re
import subprocess
import sys

import pytest
from torch import nn

import paceline
from command import clean_environment
from paceline import Evaluated, Spec, Step
from paceline.adapters.trainer import HINTS, TrainerTask, trainer_task
from paceline.errors import TaskError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # transformers imports for seconds
STEPS = 20

COMMON = """
import json, sys
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

# Labels of BERT by the kind of its problem, and the options of its configuration.
LABELS = {
    "bert": (lambda number: number % 2, {}),
    "number": (lambda number: number / 96, {"num_labels": 1}),
    "numbers": (lambda number: [number / 96, 1.0], {"problem_type": "regression"}),
    "several": (lambda number: [1.0, 0.0, number % 2], {"num_labels": 3}),
    "decided": (lambda number: [1.0], {"num_labels": 1, "problem_type": "multi_label_classification"}),
}

def build(name):
    torch.manual_seed(4)
    kind = BertForTokenClassification if name == "tokens" else BertForSequenceClassification
    if name in LABELS or name == "tokens":
        return kind(BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            **LABELS.get(name, (None, {}))[1],
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
        rows.append(row | ({"label": LABELS[name][0](index)} if name in LABELS else {"name": name}))
    return rows

def collate(rows):
    length = 12
    texts = [row["input_ids"] for row in rows]
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    targets = ids % 2 if rows[0].get("name") == "tokens" else ids
    labels = targets.where(mask > 0, -100)
    if "label" in rows[0]:
        labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
"""
NATIVE = """
from common import *

class Recording(transformers.Trainer):
    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        self.losses.append(loss.item())
        return loss

def train(name, smoothing, parts, mean):
    # Returns the losses by step, and those of evaluations by name. mean: the loss of the model is a mean.
    arguments = transformers.TrainingArguments(
        output_dir="out", max_steps=20, learning_rate=5e-3, warmup_steps=4,
        per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts,
        label_smoothing_factor=smoothing, per_device_eval_batch_size=16,
        lr_scheduler_type="linear", max_grad_norm=1.0, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, label_names=["labels"], remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    model = build(name)
    if mean:
        model.accepts_loss_kwargs = False
    sets = {"a": texts(name)[:20], "b": texts(name)[40:]}
    trainer = Recording(
        model, arguments, train_dataset=texts(name), eval_dataset=sets, data_collator=collate
    )
    trainer.losses = []
    trainer.train()
    metrics = trainer.evaluate()
    losses = [sum(trainer.losses[i : i + parts]) for i in range(0, len(trainer.losses), parts)]
    return losses, {key: metrics[f"eval_{key}_loss"] for key in sets}

json.dump([train(*case) for case in json.loads(sys.argv[1])], open("native.json", "w"))
"""


@pytest.fixture
def common(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "native.py").write_text(NATIVE)
    names: dict = {"__name__": "__main__"}
    exec(COMMON, names)
    return names


def run_native(folder, *cases):
    """Return what `train` of the program of the Trainer returns for each case, in one process."""
    result = subprocess.run(
        [sys.executable, "native.py", json.dumps(cases)],
        cwd=folder,
        env=clean_environment(OMP_NUM_THREADS="1"),
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
    evaluate_splits=("a", "b"),
    save={"best": "min a/loss"},
)


def train_adapted(common, name, smoothing, plan=None, ranks=None, spec=SPEC):
    """Return the losses by step, and the metrics of the last evaluation."""
    task = trainer_task(
        common["build"](name),
        common["texts"](name),
        {"a": common["texts"](name)[:20], "b": common["texts"](name)[40:]},
        common["collate"],
        label_smoothing_factor=smoothing,
    )
    events = list(paceline.train(spec, plan, ranks=ranks, task=task))
    [*_, last] = [event.metrics for event in events if isinstance(event, Evaluated)]
    return [event.loss for event in events if isinstance(event, Step)], last


# Models with their label smoothing, by the plan and the ranks that train them.
CASES = {
    ("llama", 0.0): ("zero3", 2),
    ("tokens", 0.2): ("ddp,microbatches=2", 2),
    ("bert", 0.0): ("single,microbatches=2", None),
    ("tokens", 0.0): ("single,microbatches=2", None),
    ("llama", 0.1): ("single", None),
    **{(name, 0.0): ("single,microbatches=2", None) for name in ("number", "numbers", "several", "decided")},
}


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_losses_equal_those_of_the_trainer(common, tmp_path):
    cases = dict(zip(CASES, run_native(tmp_path, *((*case, 1, False) for case in CASES)), strict=True))
    for (name, smoothing), (native, evaluated) in cases.items():
        losses, metrics = train_adapted(common, name, smoothing, *CASES[name, smoothing])
        assert len(losses) == len(native) == STEPS
        assert losses == pytest.approx(native, rel=1e-6), name
        if name not in ("llama", "tokens"):  # of tokens, the Trainer averages the means of batches
            expected = {f"{key}/loss": loss for key, loss in evaluated.items()}
            assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-6), name
    # The smoothing and the schedule matter for the comparison.
    assert cases["llama", 0.0][0] != pytest.approx(cases["llama", 0.1][0], rel=1e-3)
    spec = SPEC.model_copy(update={"schedule": SPEC.schedule.model_copy(update={"warmup": 0})})
    other, _ = train_adapted(common, "llama", 0.0, spec=spec)
    assert other != pytest.approx(cases["llama", 0.0][0], rel=1e-3)


@pytest.mark.processes
def test_accumulated_gradients_equal_those_of_the_trainer(common, tmp_path):
    # transformers 5.24: the loss of BERT ignores num_items_in_batch, and Trainer takes it for a share of the
    # batch, so that loss and gradient are those of 4 batches (issue 47688 of transformers).
    (llama, _), (mean, _), (fourfold, _) = run_native(
        tmp_path, ("llama", 0.0, 4, False), ("bert", 0.0, 4, True), ("bert", 0.0, 4, False)
    )
    plan = "single,microbatches=4"
    assert train_adapted(common, "llama", 0.0, plan)[0] == pytest.approx(llama, rel=1e-6)
    losses, _ = train_adapted(common, "bert", 0.0, plan)
    assert losses == pytest.approx(mean, rel=1e-6)
    assert losses[0] * 4 == pytest.approx(fourfold[0], rel=1e-6)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "tokens", "number", "numbers", "several", "decided"]
)
def test_losses_by_item_average_to_the_loss_of_the_model(name, common):
    model = common["build"](name)
    task = trainer_task(model, common["texts"](name), data_collator=common["collate"])
    batch = task.collate(common["texts"](name)[:6])
    output = model(**task.inputs(batch))
    items, weights = task.loss(output, batch), task.weights(batch)
    mean = items.mean() if weights is None else (items * weights).sum() / weights.sum()
    expected = model(**batch).loss
    assert mean.item() == pytest.approx(expected.item(), rel=1e-6)


def refuse(model, words, dataset=()):
    with pytest.raises(TaskError, match=re.escape(words)):
        trainer_task(model, list(dataset))


def test_other_models_are_refused(common):
    from transformers import BartConfig, BartForCausalLM, BertForQuestionAnswering, BertModel

    small = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = common["BertConfig"](**small, intermediate_size=8)
    refuse("gpt2", "model must be a model, got the name 'gpt2'; load it")
    refuse(nn.Linear(1, 1), "a model of transformers is required, got Linear")
    refuse(BertModel(config), "BertModel has the loss of its own code")
    refuse(BertForQuestionAnswering(config), "has the loss ForQuestionAnswering, which is not known")
    refuse(
        common["build"]("gpt2").bfloat16(), "has weights of torch.bfloat16; load it with dtype=torch.float32"
    )
    bart = BartForCausalLM(BartConfig(vocab_size=9, d_model=8, decoder_layers=1, decoder_attention_heads=1))
    refuse(bart, "BartForCausalLM computes its loss by its own code, which may pair tokens and labels")
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


def test_a_loss_that_differs_from_that_of_the_model_is_refused(common):
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    def build(**options):
        config = DebertaV2Config(
            vocab_size=50,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
            num_labels=3,
            **options,
        )
        return DebertaV2ForSequenceClassification(config)

    samples = common["texts"]("several")
    decided = build(problem_type="multi_label_classification")
    trainer_task(decided, samples, data_collator=common["collate"])
    undecided = build()
    undecided.train()
    with pytest.raises(
        TaskError, match=r"DebertaV2ForSequenceClassification computes the loss .* of the first"
    ):
        trainer_task(undecided, samples, data_collator=common["collate"])
    assert undecided.training
    assert undecided.config.problem_type is None


def test_labels_that_the_loss_does_not_take_are_refused(common):
    excluded = [{"input_ids": [1, 2], "label": -100}] * 2
    with pytest.raises(TaskError, match="a sample has the label -100, which excludes it from the loss"):
        trainer_task(common["build"]("bert"), excluded, data_collator=common["collate"])
    for name, labels in (("number", "numbers"), ("several", "several labels")):
        task = trainer_task(
            common["build"](name),
            common["texts"](name),
            data_collator=common["collate"],
            label_smoothing_factor=0.1,
        )
        with pytest.raises(
            TaskError, match=f"label_smoothing_factor=0.1 requires a class for each sample, got {labels}"
        ):
            list(
                paceline.train(
                    SPEC.model_copy(update={"evaluate_splits": (), "save": Spec().save}), task=task
                )
            )


@pytest.mark.parametrize("name", HINTS)
def test_other_arguments_of_the_trainer_are_refused(name, common):
    with pytest.raises(
        TaskError, match=re.escape(f"{name} of a Trainer has no counterpart in trainer_task; ")
    ):
        trainer_task(common["build"]("bert"), [], **{name: print})


def test_a_split_named_train_is_refused(common):
    with pytest.raises(TaskError, match="eval_dataset has a split 'train', which is that of the training"):
        trainer_task(common["build"]("bert"), [], {"train": []})
