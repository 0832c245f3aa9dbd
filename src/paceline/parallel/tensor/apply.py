"""Tensor parallelism: weights split by column and row over the ranks of one mesh axis.

Parameters are DTensors, so that sharding, checkpoints and export know how they are cut; a layer computes on what lies here.
"""

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.data.fake import imagined, without_values
from paceline.data.loader import Batch
from paceline.distributed.dtensor import has_no_empty_shard, local_tensor
from paceline.errors import PlanError, TaskError
from paceline.parallel.module_hooks import find_parts
from paceline.parallel.tensor.find_sequence_parallel import (
    GATHERING,
    NotSplittable,
    SequenceParallelPlan,
    find_sequence_parallel,
)
from paceline.parallel.tensor.find_splits import SplitCandidates, find_candidates, number_pattern
from paceline.parallel.tensor.linear import FORWARDS, SharedEntry, TensorFunction, copy_to_split, sum_partials
from paceline.parallel.tensor.rng import install_dropout_rng, plan_dropout_rng
from paceline.parallel.tensor.sequence_comm import SequenceCollectives, hook_block, map_marked
from paceline.parallel.tensor.tracer import (
    has_computed_weight,
    is_embedding,
    is_linear,
    is_transposed,
    linear_features,
)
from paceline.plan.plan import Plan
from paceline.spec import nearest
from paceline.task import Layout, Task, read_layout

STYLES = ("column", "row", "gather", "head", "vocabulary", "whole")
UNEVEN = ("head", "vocabulary")  # styles whose last part may be smaller: vocabularies are seldom round
HUGGING_FACE = {  # styles of transformers' tp_plan
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
}


@dataclass(frozen=True)
class Splits:
    """What is done with each module that is split, with activations between them, and with what draws at random."""

    styles: Mapping[str, str]
    between: SequenceParallelPlan | None
    partial: frozenset[
        str
    ]  # parameters that see a part of features or activations: their gradients are summed over the axis
    draws: Mapping[str, bool]  # module -> whether each rank draws for a part of its own
    output: torch.Size | None  # shape of what the model returns, where that is one tensor
    notes: tuple[str, ...]


def find_splits(model: nn.Module, task: Task, batch: Batch, plan: Plan) -> Splits:
    """How `model`, on the meta device, is split: as the task's layout says, as the model itself does (tp_plan), or as found.
    Raises PlanError where it cannot be, TaskError for a layout that names what is not there."""
    from paceline.parallel.forward import call_model

    outputs: list[Any] = []
    tp = plan.tp

    def run() -> Any:
        outputs[:] = [call_model(task, model, inputs)]
        return outputs[0]

    try:
        with imagined(model) as imagine:
            inputs = imagine(batch)
            found = find_candidates(model, run, tp)
            styles = (
                _styles_from_candidates(model, found, tp)
                | _styles_from_tp_plan(model, found)
                | _styles_from_layout(model, read_layout(task).tensor, tp)
            )
            styles = {name: style for name, style in styles.items() if style != "whole"}
            _drop_inconsistent_ties(model, styles)
            if not styles:
                raise PlanError(f"tp={tp}, but {_explain_no_splits(model, tp)}; use pp or zero3")
            columns = frozenset(name for name, style in styles.items() if style == "column")
            of_features = [(name, bool(of) and of <= columns) for name, of in found.draws]
            between, why = _find_sequence_plan(
                model, run, styles, found.called, of_features, read_layout(task), plan
            )
    except (PlanError, TaskError):
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # the user's code, which meets tensors without values
        raise without_values(error, f"what tp={tp} may split", "a plan without tp") from error
    small = {name for name, of in found.partial.items() if of <= columns} | (
        between.partial if between is not None else set()
    )
    draws, alike = plan_dropout_rng(of_features, between)
    whole = [
        name
        for name, module in model.named_modules()
        if (is_linear(module) or is_embedding(module)) and name not in styles
    ]
    notes = [*found.notes]
    if gathered := [name for name, style in styles.items() if style == "gather"]:
        notes.append(
            f"tp: {_format_names(gathered)} split by columns and gathered, because no layer takes their outputs in parts"
        )
    if whole:
        notes.append(f"tp: {_format_names(whole)} not split")
    if why:
        notes.append(f"tp: activations between split layers are whole on each rank, because of {why}")
    if alike:
        notes.append(
            f"tp: {_format_names(alike)} drop alike on the ranks that share features, because they also drop of what each rank has whole"
        )
    shape = outputs[0].shape if isinstance(outputs[0], Tensor) else None
    return Splits(styles, between, frozenset(small), draws, shape, tuple(notes))


def _explain_no_splits(model: nn.Module, tp: int) -> str:
    """Why no layer of a model is split."""
    kind = type(model).__name__
    modules = list(model.modules())
    if any(is_linear(module) or is_embedding(module) for module in modules):
        return f"{kind} has no linear layer or embedding whose size {tp} divides"
    computed = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding)) and has_computed_weight(module)
    ]
    if computed:
        return f"{kind} computes the weight of {computed[0]} from others (weight_norm, spectral_norm or another parametrization)"
    return f"{kind} has no linear layer or embedding"


def _find_sequence_plan(
    model: nn.Module,
    run: Callable[[], Any],
    styles: Mapping[str, str],
    order: Sequence[str],
    of_features: Sequence[tuple[str, bool]],
    layout: Layout,
    plan: Plan,
) -> tuple[SequenceParallelPlan | None, str]:
    """What is done with activations between split layers, or why nothing is."""
    if plan.cp > 1:  # along which the sequence is cut already
        return None, ""
    try:
        between = find_sequence_parallel(model, run, styles, find_parts(model, layout), order, plan.tp)
    except NotSplittable as error:
        return None, str(error)
    if plan.pp > 1 and not between.closed:
        return None, "what is done with them between blocks, which may lie on two stages"
    _, alike = plan_dropout_rng(of_features, between)
    if mixed := [name for name, of_activations in between.draws if of_activations and name in alike]:
        return None, f"{mixed[0]}, which drops of them and of what is whole"
    return between, ""


def _format_names(names: list[str]) -> str:
    patterns = list(dict.fromkeys(map(number_pattern, names))) if len(names) > 4 else names
    return ", ".join(patterns[:8]) + (" …" if len(patterns) > 8 else "")


def _styles_from_candidates(model: nn.Module, found: SplitCandidates, tp: int) -> dict[str, str]:
    styles = {}
    embeddings = {
        name: module
        for name, module in model.named_modules()
        if name in found.called and is_embedding(module)
    }
    largest = max(embeddings, key=lambda name: embeddings[name].weight.numel(), default=None)
    words: Any = embeddings[largest].num_embeddings if largest is not None else 0
    heads = {name for name in found.heads if linear_features(model.get_submodule(name))[1] == words}
    vocabulary = {largest, *heads} if has_no_empty_shard(words, tp) else set()
    for name in found.called:
        module: Any = model.get_submodule(name)
        if name in found.columns:
            styles[name] = "column"
        elif name in found.rows:
            styles[name] = "row"
        elif is_linear(module) and (name in vocabulary or linear_features(module)[1] % tp == 0):
            styles[name] = "head" if name in found.heads else "gather"
        elif name in vocabulary:
            styles[name] = "vocabulary"
    return styles


def _styles_from_tp_plan(model: nn.Module, found: SplitCandidates) -> dict[str, str]:
    """Of the model's own plan what was not found: the watching cannot see as far as its author."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    styles = {
        name: HUGGING_FACE[style]
        for names, style in plan.items()
        if style in HUGGING_FACE
        for name in _find_matches(model, names)
    }
    return {
        name: style
        for name, style in styles.items()
        if name not in found.called and is_linear(model.get_submodule(name))
    }


def _styles_from_layout(model: nn.Module, tensor: Mapping[str, str] | None, tp: int) -> dict[str, str]:
    styles = {}
    for path, style in (tensor or {}).items():
        if style not in STYLES:
            raise TaskError(f"layout().tensor[{path!r}] is {style!r}{nearest(style, STYLES)}")
        names = _find_matches(model, path)
        if not names:
            raise TaskError(
                f"layout().tensor names {path!r}, which the model has not{nearest(path, [n for n, _ in model.named_modules() if n])}"
            )
        for name in names:
            module: Any = model.get_submodule(name)
            able = is_embedding(module) if style == "vocabulary" else is_linear(module)
            if style != "whole" and not able:
                raise TaskError(
                    f"layout().tensor[{path!r}] is {style!r}, which a {type(module).__name__} cannot be"
                )
            size = (
                module.num_embeddings
                if style == "vocabulary"
                else linear_features(module)[0 if style == "row" else 1]
                if able
                else 0
            )
            if size % tp and not (style in UNEVEN and has_no_empty_shard(size, tp)):
                raise PlanError(
                    f"tp={tp} does not divide the {size} {'rows' if style == 'vocabulary' else 'features'} of {name}"
                )
            styles[name] = style
    return styles


def _find_matches(model: nn.Module, path: str) -> list[str]:
    return [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, path)]


def _drop_inconsistent_ties(model: nn.Module, styles: dict[str, str]) -> None:
    """A weight that several modules share is split only where all of them split it alike."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if module._parameters.get("weight") is not None:
            users.setdefault(id(module.weight), []).append(name)
    for names in users.values():
        if (
            len({_split_dims(model.get_submodule(name), styles.get(name)).get("weight") for name in names})
            > 1
        ):
            for name in names:
                styles.pop(name, None)


def _split_dims(module: nn.Module, style: str | None) -> dict[str, int]:
    """Parameter -> the dimension that is cut."""
    if style in (None, "whole"):
        return {}
    if style == "vocabulary":
        return {"weight": 0}
    if style == "row":
        return {"weight": 0 if is_transposed(module) else 1}
    return {"weight": 1 if is_transposed(module) else 0, "bias": 0}


def split_model(
    model: nn.Module, splits: Splits, mesh: DeviceMesh, stages: Sequence[Collection[str]] | None = None
) -> None:
    """Cut the parameters of `model`, on the meta device, over the one axis of `mesh`, and let the layers compute on their parts.
    `stages`: the blocks of each stage of a pipeline; what goes from one to the next is whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.backends.mha.set_fastpath_enabled(False)
    group = mesh.get_group()
    cut: dict[int, nn.Parameter] = {}
    entrances: dict[str, SharedEntry] = {}
    between = splits.between
    pieces = SequenceCollectives(group, between.dim) if between is not None else None
    for name, style in splits.styles.items():
        module: Any = model.get_submodule(name)
        for key, dim in _split_dims(module, style).items():
            parameter = module._parameters[key]
            if parameter is None:
                continue
            if id(parameter) not in cut:
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
                cut[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
            module._parameters[key] = cut[id(parameter)]
        entrance = entrances.setdefault(name.rpartition(".")[0], SharedEntry())
        enters: TensorFunction = partial(copy_to_split, group=group)
        adds: TensorFunction = partial(sum_partials, group=group)
        if between is not None and pieces is not None:
            enters = pieces.enter if name in between.entrances else enters
            adds = pieces.add if name in between.exits else adds
        if between is not None and name in between.fed:
            module.forward = FORWARDS[style](module, group, lambda x: x, adds)
        else:
            entrance.layers += style in GATHERING
            module.forward = FORWARDS[style](module, group, partial(entrance, enter=enters), adds)
    if between is not None and pieces is not None:
        install_sequence_parallel(model, between, pieces, stages if stages is not None else [between.blocks])
    install_dropout_rng(model, splits.draws, group, mesh.device_type)


def install_sequence_parallel(
    model: nn.Module,
    between: SequenceParallelPlan,
    pieces: SequenceCollectives,
    stages: Sequence[Collection[str]],
) -> None:
    """Cut and gather the activations where split layers do not."""

    def then(module: nn.Module, change: TensorFunction) -> None:
        inner = module.forward
        module.forward = lambda *args, **kwargs: change(inner(*args, **kwargs))

    for name in between.gathers:
        then(model.get_submodule(name), pieces.enter)
    for name in between.scatters:
        then(model.get_submodule(name), pieces.cut)
    for stage in stages:
        blocks = [name for name in between.blocks if name in stage]
        if blocks:
            first, last = between.blocks[blocks[0]].arguments, between.blocks[blocks[-1]].output
            hook_block(model.get_submodule(blocks[0]), before=partial(map_marked, pieces.cut, first))
            hook_block(model.get_submodule(blocks[-1]), after=partial(map_marked, pieces.gather, last))


def sum_partial_gradients(params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up the gradients of small parameters that each rank used on its part, those of one kind together."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for parameter in params:
        if parameter.grad is not None:
            kinds.setdefault(parameter.grad.dtype, []).append(local_tensor(parameter.grad))
    for grads in kinds.values():
        summed = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(summed, group=group)
        for grad, whole in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(whole.view_as(grad))
