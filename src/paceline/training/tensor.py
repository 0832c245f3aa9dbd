"""Tensor parallelism: weights split by column and row over the ranks of one mesh axis.

Parameters are DTensors, so that sharding, checkpoints and export know how they are cut; a layer computes on what lies here.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import PlanError, TaskError
from paceline.spec import nearest
from paceline.task import Task
from paceline.training.data import Batch
from paceline.training.discover import Found, discover, pattern
from paceline.training.imagine import imagined
from paceline.training.layers import FORWARDS, Entrance
from paceline.training.shards import local
from paceline.training.watch import features, is_embedding, is_linear, is_transposed

STYLES = ("column", "row", "gather", "head", "vocabulary", "whole")
HUGGING_FACE = {  # styles of transformers' tp_plan
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
}


@dataclass(frozen=True)
class Splits:
    """What is done with each module that is split, and names of parameters whose gradients are summed over the axis."""

    styles: Mapping[str, str]
    partial: frozenset[str]
    output: torch.Size | None  # shape of what the model returns, where that is one tensor
    notes: tuple[str, ...]


def find_splits(model: nn.Module, task: Task, batch: Batch, tp: int) -> Splits:
    """How `model`, on the meta device, is split `tp` ways: as the task's layout says, as the model itself does (tp_plan), or as found.
    Raises PlanError where it cannot be, TaskError for a layout that names what is not there."""
    from paceline.training.step import call

    outputs: list[Any] = []

    def run() -> Any:
        outputs[:] = [call(task, model, inputs)]
        return outputs[0]

    with imagined(model) as imagine:
        inputs = imagine(batch)
        found = discover(model, run, tp)
    styles = _found_styles(model, found, tp) | _own_plan(model, found) | _asked(model, task.layout().tensor, tp)
    styles = {name: style for name, style in styles.items() if style != "whole"}
    _drop_unlike_ties(model, styles)
    if not styles:
        raise PlanError(f"tp={tp}, but {type(model).__name__} has no linear layer or embedding whose size {tp} divides; use pp or zero3")
    whole = [name for name, module in model.named_modules() if (is_linear(module) or is_embedding(module)) and name not in styles]
    notes = [*found.notes]
    if gathered := [name for name, style in styles.items() if style == "gather"]:
        notes.append(f"tp: {_list(gathered)} split by columns and gathered, because no layer takes their outputs in parts")
    if whole:
        notes.append(f"tp: {_list(whole)} not split")
    shape = outputs[0].shape if isinstance(outputs[0], Tensor) else None
    return Splits(styles, found.partial, shape, tuple(notes))


def _list(names: list[str]) -> str:
    patterns = list(dict.fromkeys(map(pattern, names))) if len(names) > 4 else names
    return ", ".join(patterns[:8]) + (" …" if len(patterns) > 8 else "")


def _found_styles(model: nn.Module, found: Found, tp: int) -> dict[str, str]:
    styles = {}
    embeddings = {name: module for name, module in model.named_modules() if name in found.called and is_embedding(module)}
    largest = max(embeddings, key=lambda name: embeddings[name].weight.numel(), default=None)
    for name in found.called:
        module: Any = model.get_submodule(name)
        if name in found.columns:
            styles[name] = "column"
        elif name in found.rows:
            styles[name] = "row"
        elif is_linear(module) and features(module)[1] % tp == 0:
            styles[name] = "head" if name in found.heads else "gather"
        elif name == largest and module.num_embeddings % tp == 0:
            styles[name] = "vocabulary"
    return styles


def _own_plan(model: nn.Module, found: Found) -> dict[str, str]:
    """Of the model's own plan what was not found: the watching cannot see as far as its author."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    styles = {name: HUGGING_FACE[style] for names, style in plan.items() if style in HUGGING_FACE for name in _matching(model, names)}
    return {name: style for name, style in styles.items() if name not in found.called and is_linear(model.get_submodule(name))}


def _asked(model: nn.Module, tensor: Mapping[str, str] | None, tp: int) -> dict[str, str]:
    styles = {}
    for path, style in (tensor or {}).items():
        if style not in STYLES:
            raise TaskError(f"layout().tensor[{path!r}] is {style!r}{nearest(style, STYLES)}")
        names = _matching(model, path)
        if not names:
            raise TaskError(
                f"layout().tensor names {path!r}, which the model has not{nearest(path, [n for n, _ in model.named_modules() if n])}"
            )
        for name in names:
            module: Any = model.get_submodule(name)
            fits = is_embedding(module) if style == "vocabulary" else is_linear(module)
            if style != "whole" and not fits:
                raise TaskError(f"layout().tensor[{path!r}] is {style!r}, which a {type(module).__name__} cannot be")
            size = module.num_embeddings if style == "vocabulary" else features(module)[0 if style == "row" else 1] if fits else 0
            if size % tp:
                raise PlanError(f"tp={tp} does not divide the {size} {'rows' if style == 'vocabulary' else 'features'} of {name}")
            styles[name] = style
    return styles


def _matching(model: nn.Module, path: str) -> list[str]:
    return [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, path)]


def _drop_unlike_ties(model: nn.Module, styles: dict[str, str]) -> None:
    """A weight that several modules share is split only where all of them split it alike."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if module._parameters.get("weight") is not None:
            users.setdefault(id(module.weight), []).append(name)
    for names in users.values():
        if len({_cuts(model.get_submodule(name), styles.get(name)).get("weight") for name in names}) > 1:
            for name in names:
                styles.pop(name, None)


def _cuts(module: nn.Module, style: str | None) -> dict[str, int]:
    """Parameter -> the dimension that is cut."""
    if style in (None, "whole"):
        return {}
    if style == "vocabulary":
        return {"weight": 0}
    if style == "row":
        return {"weight": 0 if is_transposed(module) else 1}
    return {"weight": 1 if is_transposed(module) else 0, "bias": 0}


def split(model: nn.Module, splits: Splits, mesh: DeviceMesh) -> None:
    """Cut the parameters of `model`, on the meta device, over the one axis of `mesh`, and let the layers compute on their parts."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.backends.mha.set_fastpath_enabled(False)
    group = mesh.get_group()
    cut: dict[int, nn.Parameter] = {}
    entrances: dict[str, Entrance] = {}
    for name, style in splits.styles.items():
        module: Any = model.get_submodule(name)
        for key, dim in _cuts(module, style).items():
            parameter = module._parameters[key]
            if parameter is None:
                continue
            if id(parameter) not in cut:
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
                cut[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
            module._parameters[key] = cut[id(parameter)]
        entrance = entrances.setdefault(name.rpartition(".")[0], Entrance(group))
        entrance.layers += style in ("column", "gather", "head")
        module.forward = FORWARDS[style](module, group, entrance)


def sum_partial(params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up the gradients of small parameters that each rank used on its part of the features."""
    for parameter in params:
        if parameter.grad is not None:
            dist.all_reduce(local(parameter.grad), group=group)
