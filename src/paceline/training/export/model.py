"""The model of a checkpoint on one process, and inputs for it from the samples of its task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.loader import batches
from paceline.data.samples import Samples, number_batch
from paceline.distributed.rng import seeded_rngs
from paceline.errors import RunError
from paceline.sample_rng import number_samples
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.checkpoint.index import read_index
from paceline.training.checkpoint.load import check_same_model
from paceline.training.checkpoint.stored import load_weights
from paceline.training.init.deferred_init import allocate_
from paceline.training.init.named_tensors import named_tensors
from paceline.training.model_facts.model_analysis import build_meta_model
from paceline.user_code import UserCode

CPU = torch.device("cpu")
MAX_SAMPLES = 4  # of the example


def load_model(spec: Spec, task: Task, path: Path, averaged: bool) -> nn.Module:
    """Return the model of a checkpoint on the CPU, in evaluation mode. Its output has plain containers.

    averaged: as for `load_weights`. Raises CheckpointError and TaskError.
    """
    weights = load_weights(path, averaged)
    analysis = build_meta_model(spec, task)
    check_same_model(path, read_index(path), spec.task, spec.set, analysis.model)
    allocate_(analysis.model, CPU)
    with torch.no_grad():
        for name, tensor in named_tensors(analysis.model).items():
            # Buffers that are not in the checkpoint keep their initial values.
            tensor.copy_(weights[name] if name in weights else analysis.weights.draw(name))
    analysis.model.register_forward_hook(lambda module, args, output: _to_plain(output))
    return analysis.model.eval()


def _to_plain(output: Any) -> Any:
    """Return an output in tuples, lists and dicts, which a program can have without the classes of the task.

    Keys whose value is None are left out.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return {str(key): _to_plain(value) for key, value in output.items() if value is not None}
    if is_dataclass(output) and not isinstance(output, type):
        return _to_plain({field.name: getattr(output, field.name) for field in fields(output)})
    if isinstance(output, (tuple, list)):
        items = [_to_plain(item) for item in output]
        return items if isinstance(output, list) else tuple(items)
    if output is None:
        return None
    raise RunError(
        f"the model returns an object of type {type(output).__name__}, which a program cannot return; return "
        "tensors in tuples, lists, dicts or dataclasses, or use --format safetensors"
    )


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of a model for some samples: model(*args, **kwargs)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int


def choose_counts(batch: int) -> tuple[int, ...]:
    """Return the numbers of samples in the batches that a program is checked with: the example first, 1 last.

    batch: of the run.
    """
    count = max(2, min(batch, MAX_SAMPLES))  # torch.export takes a size of 1 for a fixed size
    return count, count + 1, 1


def read_inputs(spec: Spec, task: Task, training: Samples, counts: Sequence[int]) -> list[ModelInputs]:
    """Return the inputs of batches with these numbers of samples, from the first training samples in a row.

    Raises DataError and TaskError.
    """
    numbers = count()
    parts = [list(islice(numbers, samples)) for samples in counts]
    indices = [[number % training.count for number in part] for part in parts]
    found = []
    with seeded_rngs(spec.seed):
        read = batches(training, zip(parts, indices, strict=True), CPU, 0, 1)
        for part, batch in zip(parts, read, strict=True):
            of_batch = number_batch(spec.seed, "train", part, training.floats)
            with UserCode("inputs()", task.inputs), number_samples([batch], [of_batch]):
                inputs = task.inputs(batch)
            args = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
            found.append(
                ModelInputs((), dict(inputs), len(part))
                if isinstance(inputs, dict)
                else ModelInputs(tuple(args), {}, len(part))
            )
    return found
