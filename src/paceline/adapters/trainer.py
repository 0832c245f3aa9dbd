"""TrainerTask and trainer_task: what a Hugging Face Trainer is called with, as a task.

from paceline.adapters.trainer import trainer_task

task = trainer_task(model, train_dataset=train, eval_dataset=test, data_collator=collator)
for event in paceline.train(spec, task=task, ranks=2, plan="zero3"):
    ...
"""

import atexit
import copy
import dataclasses
import inspect
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.adapters.trainer_losses import IGNORED, LOSSES, SAMPLE_LOSSES, Loss
from paceline.errors import TaskError
from paceline.hf.folder import import_transformers
from paceline.task import MapDataset, Task

# Arguments of a Trainer that `trainer_task` refuses, and what has their effect.
HINTS = {
    "args": "its settings are those of paceline.Spec (docs/from-hf-trainer.md)",
    "model_init": "pass the model that it returns",
    "gradient_accumulation_steps": "use the plan key microbatches, and the batch of all ranks as Spec.batch",
    "processing_class": "pass data_collator=DataCollatorWithPadding(…)",
    "tokenizer": "pass data_collator=DataCollatorWithPadding(…)",
    "compute_loss_func": "define loss(output, batch) of a TrainerTask",
    "compute_metrics": "define metrics(output, batch) of a TrainerTask",
    "preprocess_logits_for_metrics": "define metrics(output, batch) of a TrainerTask",
    "callbacks": "read the events of paceline.train",
    "optimizers": "set optimizer and schedule of paceline.Spec, or define optimizer of a TrainerTask",
    "optimizer_cls_and_kwargs": "set optimizer of paceline.Spec, or define optimizer of a TrainerTask",
}


class TrainerTask(Task):
    """A task with a model of transformers, whose loss and batches are those of its Trainer.

    A subclass defines `model` and `dataset`. The samples are dicts, as for the Trainer. `collator` makes a
    batch of them. Keys that the model does not take are left out of a batch, and out of the samples of a
    collator of transformers. The loss is that of the model:
    the mean over all tokens with a label, or over the samples, of the global batch.

    label_smoothing_factor: that of TrainingArguments.

    Raises TaskError for a model whose loss is none of those; such a task defines `loss`.
    """

    label_smoothing_factor: float = 0.0

    def collator(self) -> Callable[[list[Any]], Mapping[str, Any]]:
        """Return the function that makes a batch; by default, `default_data_collator` of transformers."""
        collator: Callable[[list[Any]], Mapping[str, Any]] = import_transformers().default_data_collator
        return collator

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        if "_collator" not in vars(self):
            object.__setattr__(self, "_collator", self.collator())  # tasks are frozen
        collator = vars(self)["_collator"]
        if getattr(collator, "__module__", "").startswith("transformers."):
            used = {*self._facts()[1], "label", "label_ids"}  # as Trainer does by default
            samples = [{key: value for key, value in sample.items() if key in used} for sample in samples]
        batch = dict(collator(samples))
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and not self._facts()[0].is_by_token and labels.eq(IGNORED).any():
            raise TaskError(
                f"a sample has the label {IGNORED}, which excludes it from the loss; leave such samples out "
                "of the dataset"
            )
        return batch

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        taken = self._facts()[1]
        return {name: value for name, value in batch.items() if name in taken and name != "labels"}

    def loss(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of each token, or of each sample."""
        if "labels" not in batch:
            raise TaskError(
                f"a batch of {type(self).__name__} has no labels, but {', '.join(sorted(batch))}; return "
                "labels from the dataset or the collator"
            )
        return self._facts()[0].compute(output.logits, batch["labels"], self.label_smoothing_factor)

    def weights(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return 1 for each token that has a label and 0 for others; None if each sample has one."""
        if not self._facts()[0].is_by_token:
            return None
        return (self._facts()[0].find_targets(batch["labels"]) != IGNORED).float()

    def _facts(self) -> tuple[Loss, frozenset[str]]:
        """Return the loss of the model, and the names of its arguments. Raises TaskError."""
        if "_read_facts" not in vars(self):
            with torch.device("meta"):
                model: Any = self.model()
            object.__setattr__(self, "_read_facts", (find_loss(model), find_arguments(model)))
        facts: tuple[Loss, frozenset[str]] = vars(self)["_read_facts"]
        return facts


def find_loss(model: Any) -> Loss:
    """Return the loss of a model of transformers. Raises TaskError if it is not known by item."""
    check_model(model)
    kind = model.loss_type
    if kind is None and type(model).__name__ in _causal_classes():
        kind = "ForCausalLM"  # such as GPT2LMHeadModel, whose name has no hint
    if kind not in LOSSES:
        raise TaskError(
            f"{type(model).__name__} has the loss {kind or 'of its own code'}, which is not known for each "
            f"item; known are {', '.join(LOSSES)}; define loss(output, batch) in a task"
        )
    if getattr(model.config, "output_router_logits", False):
        raise TaskError(
            f"{type(model).__name__} adds a loss of its router (output_router_logits), which is not known "
            "for each item; set it to False in the configuration, or define loss(output, batch) in a task"
        )
    if kind == "ForCausalLM" and "loss_function(" not in inspect.getsource(type(model).forward):
        raise TaskError(  # BartForCausalLM, for example, does not shift its labels
            f"{type(model).__name__} computes its loss by its own code, which may pair tokens and labels in "
            "another way; define loss(output, batch) and weights(batch) in a task"
        )
    if not LOSSES[kind].is_by_token:
        return SAMPLE_LOSSES[model.config.problem_type]
    return LOSSES[kind]


def _causal_classes() -> Collection[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: Collection[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return names


def find_arguments(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def check_model(model: Any) -> None:
    """Raise TaskError for a model that cannot be built again from its class and its configuration."""
    name = type(model).__name__
    if isinstance(model, str):
        raise TaskError(
            f"model must be a model, got the name {model!r:.60}; load it, for example by "
            "AutoModelForCausalLM.from_pretrained, or train hf:FOLDER"
        )
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise TaskError(f"a model of transformers is required, got {name}; write a task (docs/tasks.md)")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise TaskError(f"{name} has adapters of peft; use hf:FOLDER with --set lora.rank=16")
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        raise TaskError(f"{name} is quantized, and its weights cannot be trained; load it without that")
    dtypes = {str(parameter.dtype) for parameter in model.parameters()} - {"torch.float32"}
    if dtypes:
        raise TaskError(
            f"{name} has weights of {', '.join(sorted(dtypes))}; load it with dtype=torch.float32, and "
            "compute in bfloat16 with precision=bf16"
        )


class ModelTask(TrainerTask):
    """The task of `trainer_task`."""

    kind: type
    config: Any
    weights_file: str
    datasets: Any
    data_collator: Any = None

    def model(self) -> nn.Module:
        config = copy.deepcopy(self.config)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # a cache of keys and values serves generation only
        model: nn.Module = self.kind(config)
        return model

    def pretrained(self) -> str:
        return self.weights_file

    def dataset(self, split: str) -> MapDataset | None:
        dataset: MapDataset | None = self.datasets.get(split)
        return dataset

    def collator(self) -> Callable[[list[Any]], Mapping[str, Any]]:
        return self.data_collator if self.data_collator is not None else super().collator()


def trainer_task(
    model: Any,
    train_dataset: MapDataset,
    eval_dataset: MapDataset | Mapping[str, MapDataset] | None = None,
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    *,
    label_smoothing_factor: float = 0.0,
    folder: str | Path | None = None,
    **others: Any,
) -> TrainerTask:
    """Return the task of a model, its datasets and its collator, as they are given to a Trainer.

    model: of transformers, in float32. Its weights are those from which the training starts.
    train_dataset, eval_dataset: with a length and samples by index. A dict of several datasets for
    evaluations has their splits, which `Spec.evaluate_splits` names.
    data_collator: makes a batch of samples [default: `default_data_collator`].
    label_smoothing_factor: that of TrainingArguments.
    folder: where the weights are written, for ranks to read their shares; on several nodes, a folder that all
    of them see [default: a folder of this user, which is deleted with this process].

    Raises TaskError for other models and datasets, and for other arguments of a Trainer.
    """
    for name, value in others.items():
        if name not in HINTS:
            raise TypeError(f"trainer_task() got an unexpected keyword argument {name!r}")
        if value is not None and value != (None, None):
            raise TaskError(f"{name} of a Trainer has no counterpart in trainer_task; {HINTS[name]}")
    find_loss(model)
    splits = dict(eval_dataset) if isinstance(eval_dataset, Mapping) else {"validation": eval_dataset}
    if "train" in splits:
        raise TaskError("eval_dataset has a split 'train', which is that of the training; rename it")
    for name, dataset in {"train_dataset": train_dataset, **splits}.items():
        name = (
            name
            if name == "train_dataset"
            else "eval_dataset"
            if name == "validation"
            else f"eval_dataset[{name!r}]"
        )
        if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TaskError(
                f"{name} has no length or no samples by index, got {type(dataset).__name__}; read a stream "
                "into a list"
            )
    task = ModelTask(
        kind=type(model),
        config=model.config,
        weights_file="",
        datasets={"train": train_dataset, **splits},
        data_collator=data_collator,
        label_smoothing_factor=label_smoothing_factor,
    )
    check_loss(task, model)
    if folder is None:
        folder = tempfile.mkdtemp(prefix="paceline-weights-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return dataclasses.replace(task, weights_file=str(_write_weights(model, Path(folder))))


def check_loss(task: TrainerTask, model: Any) -> None:
    """Compare the loss of a model with the mean of the losses by item, on the first samples of a task.

    Raises TaskError if they differ: the class of the model has code of its own for these labels.
    """
    samples: Any = task.dataset("train")
    batch = task.collate([samples[index] for index in range(min(2, len(samples)))]) if len(samples) else {}
    if "labels" not in batch:
        return
    batch = {
        key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()
    }
    was_training, problem_type = model.training, model.config.problem_type
    try:
        model.eval()
        with torch.no_grad():
            output = model(**task.inputs(batch), labels=batch["labels"])
    finally:
        model.train(was_training)
        model.config.problem_type = problem_type  # transformers sets it by the labels
    # The Trainer smooths labels, and the model does not.
    items, weights = find_loss(model).compute(output.logits, batch["labels"], 0.0), task.weights(batch)
    mean = items.mean() if weights is None else (items * weights).sum() / weights.sum()
    if not torch.allclose(mean, output.loss.to(mean.dtype), rtol=1e-3, atol=1e-6, equal_nan=True):
        raise TaskError(
            f"{type(model).__name__} computes the loss {output.loss.item():.6g} of the first samples, and "
            f"the losses by item have the mean {mean.item():.6g}; define loss(output, batch) in a TrainerTask"
        )


def _write_weights(model: nn.Module, folder: Path) -> Path:
    """Write the tensors of a model once, also if modules share them. Returns the file."""
    from safetensors.torch import save_file

    persistent = model.state_dict().keys()
    tensors = {
        name: tensor.detach().contiguous()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name in persistent
    }
    path = folder.resolve() / "start.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    except OSError as error:
        raise TaskError(f"cannot write the weights to {path}: {error}; specify folder=") from error
    return path
