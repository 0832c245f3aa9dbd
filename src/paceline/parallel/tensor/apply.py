"""Tensor parallelism: weights split by columns and rows over the ranks of one mesh axis.

Parameters are DTensors, so that sharding, checkpoints and export know how they are split; a layer computes on
its local part.
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

from paceline.data.fake import fake_parameters, fake_pass_error
from paceline.data.samples import Batch
from paceline.distributed.dtensor import has_no_empty_shard, local_tensor
from paceline.errors import PlanError, TaskError
from paceline.parallel.module_hooks import find_parts
from paceline.parallel.tensor.find_sequence_parallel import (
    NotSplittable,
    SequenceParallelPlan,
    find_sequence_parallel,
)
from paceline.parallel.tensor.find_splits import SplitCandidates, find_candidates, number_pattern
from paceline.parallel.tensor.linear import (
    COMPUTED_SPLIT,
    SharedEntry,
    TensorFunction,
    copy_to_split,
    sum_partials,
)
from paceline.parallel.tensor.rng import install_dropout_rng, plan_dropout_rng
from paceline.parallel.tensor.sequence_comm import SequenceCollectives, hook_block, map_marked
from paceline.parallel.tensor.styles import HUGGING_FACE, STYLES, WHOLE, can_split, split_dims, split_size
from paceline.parallel.tensor.tracer import (
    has_computed_weight,
    is_embedding,
    is_linear,
    is_loss_head,
    is_parametrized,
    linear_features,
)
from paceline.plan.plan import Plan
from paceline.spec import suggest
from paceline.task import Layout, Task, read_layout


@dataclass(frozen=True)
class Splits:
    """How layers, the activations between them and random draws are split over the ranks of a tensor axis."""

    styles: Mapping[str, str]  # split module -> its style, a key of STYLES
    sequence: SequenceParallelPlan | None  # None: activations between split layers are whole on each rank
    # parameters that are combined with a part of features or activations: the ranks sum their gradients
    partial: frozenset[str]
    draws: Mapping[str, bool]  # module that draws random numbers -> whether each rank draws for a part
    output_shape: torch.Size | None  # of what the model returns, if that is one tensor
    notes: tuple[str, ...]


def find_splits(model: nn.Module, task: Task, batch: Batch, plan: Plan) -> Splits:
    """Return how `model`, on the meta device, is split.

    The task's layout comes first, then the styles found by tracing, then the model's tp_plan.

    Raises PlanError if no layer can be split, and TaskError for a layout that names modules which do not
    exist.
    """
    from paceline.parallel.loss.forward import call_model

    outputs: list[Any] = []
    tp = plan.tp

    def run() -> Any:
        outputs[:] = [call_model(task, model, inputs)]
        return outputs[0]

    try:
        with fake_parameters(model) as imagine:
            inputs = imagine(batch)
            candidates = find_candidates(model, run, tp)
            styles = (
                _styles_from_candidates(model, candidates, tp)
                | _styles_from_tp_plan(model, candidates)
                | _styles_from_layout(model, read_layout(task).tensor, tp)
            )
            styles = {name: style for name, style in styles.items() if style != WHOLE}
            _drop_inconsistent_ties(model, styles)
            if not styles:
                raise PlanError(
                    f"tp={tp}, but {_explain_no_splits(model, tp)}; use a plan without tp, such as zero3"
                )
            columns = frozenset(name for name, style in styles.items() if style == "column")
            feature_draws = [(name, bool(layers) and layers <= columns) for name, layers in candidates.draws]
            sequence, reason = _find_sequence_plan(
                model, run, styles, candidates.called, feature_draws, read_layout(task), plan
            )
    except (PlanError, TaskError):
        raise
    # The user's code fails on tensors without values.
    except (RuntimeError, TypeError, ValueError) as error:
        raise fake_pass_error(error, f"what tp={tp} may split", "a plan without tp") from error
    partial_parameters = {name for name, layers in candidates.partial.items() if layers <= columns} | (
        sequence.partial if sequence is not None else set()
    )
    # Each rank computes the whole weight from whole parameters, and uses a part of it.
    partial_parameters |= {
        f"{name}.parametrizations.{key}"
        for name in styles
        if is_parametrized(module := model.get_submodule(name))
        for key, _ in module.get_submodule("parametrizations").named_parameters()
    }
    draws, mixed = plan_dropout_rng(feature_draws, sequence)
    whole = [
        name
        for name, module in model.named_modules()
        if (is_linear(module) or is_embedding(module) or is_loss_head(module)) and name not in styles
    ]
    notes = [*candidates.notes]
    if gathered := [name for name, style in styles.items() if style == "gather"]:
        notes.append(
            f"tp: {_format_names(gathered)} split by columns and gathered, because no layer takes their "
            "outputs in parts"
        )
    if whole:
        notes.append(f"tp: {_format_names(whole)} not split")
    if reason:
        notes.append(f"tp: activations between split layers are whole on each rank, because of {reason}")
    if mixed:
        notes.append(
            f"tp: {_format_names(mixed)} use the same dropout mask on all ranks of a tensor axis, "
            "because they drop both split and whole tensors"
        )
    shape = outputs[0].shape if isinstance(outputs[0], Tensor) else None
    return Splits(styles, sequence, frozenset(partial_parameters), draws, shape, tuple(notes))


def _explain_no_splits(model: nn.Module, tp: int) -> str:
    """Return why no layer of a model can be split."""
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
        return (
            f"{kind} computes the weight of {computed[0]} from others "
            "(weight_norm, spectral_norm or another parametrization)"
        )
    return f"{kind} has no linear layer or embedding"


def _find_sequence_plan(
    model: nn.Module,
    run: Callable[[], Any],
    styles: Mapping[str, str],
    order: Sequence[str],
    feature_draws: Sequence[tuple[str, bool]],
    layout: Layout,
    plan: Plan,
) -> tuple[SequenceParallelPlan | None, str]:
    """Return how activations between split layers are split; or None and the reason."""
    if plan.cp > 1:  # cp splits the sequence already
        return None, ""
    try:
        sequence = find_sequence_parallel(model, run, styles, find_parts(model, layout), order, plan.tp)
    except NotSplittable as error:
        return None, str(error)
    if plan.pp > 1 and not sequence.is_inside_blocks:
        return None, "operations on them between blocks, which may be on two stages"
    _, mixed = plan_dropout_rng(feature_draws, sequence)
    if dropped := [name for name, is_part in sequence.draws if is_part and name in mixed]:
        return None, f"{dropped[0]}, which drops both split and whole tensors"
    return sequence, ""


def _format_names(names: list[str]) -> str:
    """Return at most eight names, with * for numbers if there are more than four."""
    patterns = list(dict.fromkeys(map(number_pattern, names))) if len(names) > 4 else names
    return ", ".join(patterns[:8]) + (" …" if len(patterns) > 8 else "")


def _styles_from_candidates(model: nn.Module, candidates: SplitCandidates, tp: int) -> dict[str, str]:
    """Choose a style for each layer that can be split. The vocabulary is that of the largest embedding."""
    styles = {}
    embeddings = {
        name: module
        for name, module in model.named_modules()
        if name in candidates.called and is_embedding(module)
    }
    largest = max(embeddings, key=lambda name: embeddings[name].weight.numel(), default=None)
    words: Any = embeddings[largest].num_embeddings if largest is not None else 0
    heads = {name for name in candidates.heads if linear_features(model.get_submodule(name))[1] == words}
    vocabulary = {largest, *heads} if has_no_empty_shard(words, tp) else set()
    for name in candidates.called:
        module: Any = model.get_submodule(name)
        if name in candidates.columns:
            styles[name] = "column"
        elif name in candidates.rows:
            styles[name] = "row"
        elif is_linear(module) and (
            linear_features(module)[1] % tp == 0 or (name in vocabulary and can_split(module, "head"))
        ):
            styles[name] = "head" if name in candidates.heads and can_split(module, "head") else "gather"
        elif is_loss_head(module) and has_no_empty_shard(module.out_features, tp):
            styles[name] = "loss"
        elif name in vocabulary:
            styles[name] = "vocabulary"
    return styles


def _styles_from_tp_plan(model: nn.Module, candidates: SplitCandidates) -> dict[str, str]:
    """Return the styles of the model's own tp_plan for linear layers that the trace did not reach."""
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
        if name not in candidates.called and is_linear(model.get_submodule(name))
    }


def _styles_from_layout(model: nn.Module, tensor: Mapping[str, str] | None, tp: int) -> dict[str, str]:
    """Return the styles that the task's layout names.

    Raises TaskError or PlanError if they do not fit the model.
    """
    styles = {}
    known = (*STYLES, WHOLE)
    for path, style in (tensor or {}).items():
        if style not in known:
            raise TaskError(f"layout().tensor[{path!r}] is {style!r}{suggest(style, known)}")
        names = _find_matches(model, path)
        if not names:
            raise TaskError(
                f"layout().tensor: no such module: {path!r}"
                + suggest(path, [name for name, _ in model.named_modules() if name])
            )
        for name in names:
            styles[name] = style
            if style == WHOLE:
                continue
            module: Any = model.get_submodule(name)
            if not can_split(module, style):
                raise TaskError(
                    f"layout().tensor[{path!r}] is {style!r}, "
                    f"which does not apply to a {type(module).__name__}"
                )
            size = split_size(module, style)
            if size % tp and not (STYLES[style].allows_uneven and has_no_empty_shard(size, tp)):
                unit = "rows" if STYLES[style].for_embedding else "features"
                raise PlanError(f"tp={tp} does not divide the {size} {unit} of {name}")
    return styles


def _find_matches(model: nn.Module, path: str) -> list[str]:
    return [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, path)]


def _drop_inconsistent_ties(model: nn.Module, styles: dict[str, str]) -> None:
    """Remove styles of modules that share a weight but would split it along different dimensions."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if module._parameters.get("weight") is not None:
            users.setdefault(id(module.weight), []).append(name)
    for names in users.values():
        if len({split_dims(model.get_submodule(name), styles.get(name)).get("weight") for name in names}) > 1:
            for name in names:
                styles.pop(name, None)


def split_model(
    model: nn.Module, splits: Splits, mesh: DeviceMesh, stages: Sequence[Collection[str]] | None = None
) -> None:
    """Split the parameters of `model`, on the meta device, and replace the forwards of split layers.

    mesh: one-dimensional, the tensor axis.
    stages: names of the blocks of each stage of a pipeline; activations between stages are whole.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.backends.mha.set_fastpath_enabled(False)
    group = mesh.get_group()
    split: dict[int, nn.Parameter] = {}  # by id of the whole parameter, so that ties remain
    entries: dict[str, SharedEntry] = {}
    sequence = splits.sequence
    collectives = SequenceCollectives(group, sequence.dim) if sequence is not None else None
    for name, style in splits.styles.items():
        module: Any = model.get_submodule(name)
        for key, dim in split_dims(module, style).items():
            if key == "weight" and is_parametrized(module):
                setattr(module, COMPUTED_SPLIT, (dim, group))
            parameter = module._parameters.get(key)
            if parameter is None:
                continue
            if id(parameter) not in split:
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
                split[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
            module._parameters[key] = split[id(parameter)]
        entry = entries.setdefault(name.rpartition(".")[0], SharedEntry())
        enter: TensorFunction = partial(copy_to_split, group=group)
        reduce: TensorFunction = partial(sum_partials, group=group)
        if sequence is not None and collectives is not None:
            enter = collectives.gather_for_split if name in sequence.gathered_inputs else enter
            reduce = collectives.reduce_scatter if name in sequence.scattered_sums else reduce
        build_forward = STYLES[style].build_forward
        if sequence is not None and name in sequence.ready_inputs:
            module.forward = build_forward(module, group, lambda x: x, reduce)
        else:
            entry.num_layers += STYLES[style].takes_whole_input
            module.forward = build_forward(module, group, partial(entry, enter=enter), reduce)
    if sequence is not None and collectives is not None:
        install_sequence_parallel(
            model, sequence, collectives, stages if stages is not None else [sequence.blocks]
        )
    install_dropout_rng(model, splits.draws, group, mesh.device_type)


def install_sequence_parallel(
    model: nn.Module,
    sequence: SequenceParallelPlan,
    collectives: SequenceCollectives,
    stages: Sequence[Collection[str]],
) -> None:
    """Scatter and gather activations where split layers do not."""

    def append(module: nn.Module, function: TensorFunction) -> None:
        inner = module.forward
        module.forward = lambda *args, **kwargs: function(inner(*args, **kwargs))

    for name in sequence.gathered_outputs:
        append(model.get_submodule(name), collectives.gather_for_split)
    for name in sequence.scattered_outputs:
        append(model.get_submodule(name), collectives.scatter)
    for stage in stages:
        blocks = [name for name in sequence.blocks if name in stage]
        if blocks:
            first, last = sequence.blocks[blocks[0]].arguments, sequence.blocks[blocks[-1]].output
            hook_block(model.get_submodule(blocks[0]), before=partial(map_marked, collectives.scatter, first))
            hook_block(model.get_submodule(blocks[-1]), after=partial(map_marked, collectives.gather, last))


def sum_partial_gradients(params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """All-reduce the gradients of parameters that each rank used on its part, one call per dtype."""
    grads_by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in params:
        if parameter.grad is not None:
            grads_by_dtype.setdefault(parameter.grad.dtype, []).append(local_tensor(parameter.grad))
    for grads in grads_by_dtype.values():
        summed = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(summed, group=group)
        for grad, whole in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(whole.view_as(grad))
