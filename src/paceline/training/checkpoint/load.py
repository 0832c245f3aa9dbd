"""Load a checkpoint into a model and its optimizers, distributed by any plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.dtensor import is_materialized
from paceline.errors import CheckpointError
from paceline.training.checkpoint.index import Index, read_index
from paceline.training.checkpoint.state import collect_model_tensors
from paceline.training.optimization.optimizer import local_optimizer
from paceline.training.optimization.optimizer_values import allocate_values, restore_values


def check_same_model(
    path: Path, index: Index, task: str, settings: Mapping[str, Any], model: nn.Module
) -> None:
    """Raise CheckpointError if a checkpoint is of another task, or its tensors have other shapes."""
    if index.task.rpartition(":")[2] != task.rpartition(":")[2]:
        raise CheckpointError(
            f"{path} is of the task {index.task}, not of {task}; start that task in another run"
        )
    shapes = {name: list(tensor.shape) for name, tensor in collect_model_tensors(model).items()}
    if shapes == index.shapes:
        return
    name = next(name for name in [*shapes, *index.shapes] if shapes.get(name) != index.shapes.get(name))
    in_model, in_checkpoint = (
        f"has shape {tuple(table[name])}" if name in table else "is missing"
        for table in (shapes, index.shapes)
    )
    changed = [key for key in {*settings, *index.set} if settings.get(key) != index.set.get(key)]
    why = (
        f" (--set {changed[0]}={index.set.get(changed[0])!r} then, {settings.get(changed[0])!r} now)"
        if changed
        else ""
    )
    raise CheckpointError(
        f"{path} is of another model{why}: {name} {in_checkpoint} in the checkpoint and {in_model} in the "
        "model"
    )


def load_(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    prefix: str = "",
    group: dist.ProcessGroup | None = None,
    averages: Mapping[str, Tensor] | None = None,
) -> bool:
    """Read a checkpoint into a model and its optimizers, distributed by any plan.

    Each rank reads what it holds.

    optimizers: none: only the weights are read. prefix: of the names to read, "" or that of a rank. `group`:
    the ranks that read; None: all. averages: tensors to read by their names in the checkpoint. A collective.

    Returns whether the checkpoint has the averages; if not, they are not changed.
    """
    from paceline.training.checkpoint.metadata import read_tensors

    metadata = load_metadata(path, read_index(path))
    stored = metadata.state_dict_metadata
    wanted: dict[str, Any] = {
        f"{prefix}model/{name}": tensor
        for name, tensor in collect_model_tensors(model).items()
        if is_materialized(tensor)
    }
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    begin = f"{prefix}optimizer/"
    of_optimizers = {
        name.removeprefix(begin): meta for name, meta in stored.items() if name.startswith(begin)
    }
    values = [
        allocate_values(of_optimizers, local_optimizer(optimizer), names, index)
        for index, optimizer in enumerate(optimizers)
    ]
    for of_optimizer in values:
        wanted |= {f"{begin}{name}": value for name, value in of_optimizer.items()}
    has_averages = all(name in stored for name in averages or ())
    if has_averages:
        wanted |= averages or {}
    read_tensors(path, metadata, wanted, group)
    for index, (optimizer, of_optimizer) in enumerate(zip(optimizers, values, strict=True)):
        restore_values(local_optimizer(optimizer), names, of_optimizer, index)
    return has_averages


def load_metadata(path: Path, index: Index) -> Any:
    """Return the metadata of a checkpoint: its tensors and their places. Raises CheckpointError."""
    from paceline.training.checkpoint.metadata import read_metadata

    return read_metadata(path, index.files, sum(size for size, _ in index.files.values()))
