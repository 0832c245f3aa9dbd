"""ModelFacts of a task, counted in one forward pass that computes only shapes."""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

from torch import nn

from paceline.data.fake import example_batch, fake_parameters
from paceline.data.samples import Batch
from paceline.distributed.dtensor import storage_id
from paceline.errors import PlanError, TaskError
from paceline.parallel.loss.forward import call_loss, call_model
from paceline.parallel.tensor.styles import STYLES
from paceline.plan.model.facts import BlockFacts, LiveBytes, ModelFacts, TensorVolume
from paceline.plan.model.operations import Operation
from paceline.plan.model.passes import PassFacts, combine_passes
from paceline.plan.plan import Plan, ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, load_task
from paceline.training.frozen import frozen
from paceline.training.model_facts.live_memory import LiveMemory, measure_live_memory
from paceline.training.model_facts.op_counter import FIRST, LAST, BlockCount, OpCounter
from paceline.training.optimization.read_updates import assign_parameters, read_updates, task_of
from paceline.training.step.weight_operations import find_averaged_share, read_operations
from paceline.updates import Update
from paceline.user_code import UserCode

SAMPLES = 3  # BatchNorm requires more than one; a number that is rare in the shapes of weights


def describe(spec: Spec, task: Task | None = None) -> ModelFacts:
    """Return what planning knows of a model: parameters, FLOPs, activations, attention, block by block.

    The model runs without values on its first samples; no memory is allocated for it.

        facts = paceline.describe(paceline.Spec(task="digits", batch=64))
        print(facts.params, facts.blocks)

    spec: the task and its fields.
    task: an instance, instead of the task that `spec` names.

    Raises TaskError for a model that cannot run without values.
    """
    from paceline.training.model_facts.model_analysis import build_meta_model

    task = task if task is not None else load_task(spec.task, spec.set)
    updates = read_updates(task, ResolvedPlan(), spec.precision)
    batch = example_batch(spec.model_copy(update={"batch": SAMPLES}), task, ResolvedPlan())
    model = build_meta_model(spec, task).model
    averaged = find_averaged_share(read_operations(task, ResolvedPlan(), spec.optimizer), model)
    facts = (
        _describe_updates(model, task, updates, batch)
        if updates
        else describe_model(model, task, batch, SAMPLES)
    )
    return replace(facts, averaged=averaged)


def _describe_updates(model: nn.Module, task: Task, updates: Sequence[Update], batch: Batch) -> ModelFacts:
    """Return the facts of a step that runs all updates as often as the mean of many steps."""
    names = assign_parameters(updates, model)
    joint = [update for update in updates if update.loss is None]
    passes = []
    for together in [joint] * bool(joint) + [[update] for update in updates if update.loss is not None]:
        own = {name for update in together for name in names[update.name]}
        with _trains_only(model, own):
            facts = describe_model(model, task_of(task, together[0]), batch, SAMPLES)
        rate = together[0].repeat / min(update.every for update in together)
        trained = sum(parameter.numel() for name, parameter in model.named_parameters() if name in own)
        passes.append(PassFacts(facts, rate, trained))
    return combine_passes(passes)


def _trains_only(model: nn.Module, names: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which all other parameters are frozen, as in the pass of an update."""
    return frozen(
        [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in names
        ]
    )


def describe_model(model: nn.Module, task: Task, batch: Batch, samples: int) -> ModelFacts:
    """Return the facts of `model`, which is on the meta device. `batch` has `samples` samples."""
    with UserCode("the forward pass without values", task.model):
        styles = _find_styles(model, task, batch)
    with UserCode("the forward pass without values", task.model), fake_parameters(model) as make_fake:
        counter = OpCounter(model, task, styles)
        try:
            return count_facts(counter, task, make_fake(batch), samples)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            hint = "use paceline plan --measure-compute, which runs it"
            raise TaskError(
                f"{type(task).__name__} cannot be described: {counter.where} fails without values: "
                f"{reason}; {hint}"
            ) from error


def count_facts(counter: OpCounter, task: Task, batch: Batch, samples: int) -> ModelFacts:
    """Return the facts of the counter's model, by a pass with `batch`.

    Model and batch are on the same device, with or without values.
    """
    model = counter.model
    with counter:
        output = call_model(task, model, batch)
        counter.start_loss()
        call_loss(task, output, batch)
    facts = _build_facts(counter, type(task).__name__, samples)
    try:
        live = measure_live_memory(
            model,
            counter.units,
            lambda: call_loss(task, call_model(task, model, batch), batch),
            counter.chunk_shapes,
        )
    except RuntimeError:  # tensors saved for the backward pass are counted already
        return facts
    return _add_live_memory(facts, live, samples)


def _add_live_memory(
    facts: ModelFacts, live: tuple[LiveMemory, list[LiveMemory], LiveMemory], samples: int
) -> ModelFacts:
    """Return the facts with live memory: for a run of equal blocks, that of the block in its middle."""

    def add(block: BlockFacts, memory: LiveMemory) -> BlockFacts:
        return replace(block, lives=LiveBytes(memory.kept / samples, memory.most / samples))

    first, blocks, last = live
    ends = list(accumulate(count for _, count in facts.runs))
    middle = [blocks[(end - count + end) // 2] for (_, count), end in zip(facts.runs, ends, strict=True)]
    runs = tuple(
        (add(block, memory), count) for (block, count), memory in zip(facts.runs, middle, strict=True)
    )
    return replace(facts, first=add(facts.first, first), runs=runs, last=add(facts.last, last))


def _find_styles(model: nn.Module, task: Task, batch: Batch) -> Mapping[str, str]:
    """Return how tensor parallelism would split each layer; nothing if it cannot."""
    from paceline.parallel.tensor.apply import find_splits

    try:
        return find_splits(model, task, batch, Plan(dp=1, tp=2)).styles
    except (PlanError, RuntimeError):  # a failing pass is reported later, with the module in which it fails
        return {}


def _build_facts(counter: OpCounter, name: str, samples: int) -> ModelFacts:
    blocks = {index: _build_block(counter, index, samples) for index in counter.parts}
    grouped = [
        list(equal)
        for _, equal in groupby((blocks[index] for index in range(len(counter.units))), _block_signature)
    ]
    runs = tuple((equal[0], len(equal)) for equal in grouped)
    attentions = [attention for block, _ in runs for attention in block.attention]
    heads: tuple[int, ...] = ()
    if any(block.split_params for block in blocks.values()):
        attention_heads = {
            heads
            for attention in attentions
            for heads in (attention.heads, attention.kv_heads or attention.heads)
        }
        widths = {
            int(product.columns if product.cut == "columns" else product.inner)
            for block, _ in runs
            for product in block.products
            if product.cut
        }
        if attention_heads:
            heads = tuple(sorted(attention_heads))
        elif widths:
            heads = (math.gcd(*widths),)
    boundary = counter.parts[0].boundary
    sequence = boundary[1] if len(boundary) == 3 else None
    outputs = blocks[LAST].products
    return ModelFacts(
        name=name,
        first=blocks[FIRST],
        runs=runs,
        last=blocks[LAST],
        tokens=sequence or 1,
        heads=heads,
        sequence=sequence if attentions else None,
        hidden=boundary[-1] if boundary else 0,
        vocab=int(outputs[-1].columns) if outputs and sequence else 0,
        shared_params=sum(
            counter.owner[memory].numel()
            for memory, parts in counter.used.items()
            if {FIRST, LAST} <= parts and isinstance(counter.owner[memory], nn.Parameter)
        ),
        source="counted",
    )


def _build_block(counter: OpCounter, index: int, samples: int) -> BlockFacts:
    part = counter.parts[index]
    modules = dict(counter.model.named_modules())
    own = _find_parameters(counter, index)
    split = {
        id(parameter)
        for name, style in counter.styles.items()
        for key, parameter in modules[name]._parameters.items()
        if key in STYLES[style].split_dims
    }
    saved, selective = _count_saved(counter, part, samples)
    boundary = math.prod(part.boundary) / samples if part.boundary and index != LAST else 0.0
    params = sum(parameter.numel() for parameter in own)
    frozen = sum(parameter.numel() for parameter in own if not parameter.requires_grad)
    own_styles = [counter.styles[layer] for layer in part.layers if layer in counter.styles]
    return BlockFacts(
        name=part.name,
        params=params,
        frozen=frozen / params if params else 0.0,
        split_params=sum(parameter.numel() for parameter in own if id(parameter) in split),
        products=tuple(replace(product, rows=product.rows / samples) for product in part.products),
        attention=tuple(part.attention),
        saved={"none": saved}
        if index < 0
        else {
            "none": saved,
            "selective": selective._replace(stream=boundary),
            "full": TensorVolume(boundary),
        },
        traffic=TensorVolume(stream=part.moved / samples),
        boundary=boundary,
        sums=sum((STYLES[style].sums for style in own_styles), 0.0),
        kernels=part.kernels,
        operations=_count_operations(part.operations, samples),
        tensors=len(own),
        largest=max((parameter.numel() for parameter in own), default=0),
        whole=len(counter.parts[0].boundary) != 3,
    )


def _count_operations(operations: list[Operation], samples: int) -> tuple[Operation, ...]:
    """Return each distinct operation with its count. Sizes are per sample; views have none."""
    counts = Counter(operations)
    return tuple(
        replace(
            operation,
            size=operation.size if operation.kind == "view" else operation.size / samples,
            count=count,
        )
        for operation, count in counts.items()
    )


def _find_parameters(counter: OpCounter, index: int) -> list[nn.Parameter]:
    """Return the parameters of a part.

    A parameter outside of blocks belongs to the part that uses it first.
    """
    block_of = {
        id(parameter): block for block, unit in enumerate(counter.units) for parameter in unit.parameters()
    }

    def part_of(parameter: nn.Parameter) -> int:
        return block_of.get(
            id(parameter), FIRST if FIRST in counter.used.get(storage_id(parameter), ()) else LAST
        )

    return [parameter for parameter in counter.model.parameters() if part_of(parameter) == index]


def _count_saved(counter: OpCounter, part: BlockCount, samples: int) -> tuple[TensorVolume, TensorVolume]:
    """Return the volume that is saved for the backward pass, per sample.

    The first value is the whole, the second that of the outputs of products and attention.
    """
    stream = whole = split = fixed = output_whole = output_split = 0.0
    for memory, (tensor, is_of_loss) in part.saved.items():
        count = tensor.untyped_storage().nbytes() / tensor.element_size() / samples
        if not tensor.is_floating_point():
            fixed += count * tensor.element_size()
        elif is_of_loss:
            fixed += 4 * count  # in float32
        elif memory not in counter.product_dims:
            stream += count
        elif counter.product_dims[memory]:
            split += count
            output_split += count * (memory in counter.product_outputs)
        else:
            whole += count
            output_whole += count * (memory in counter.product_outputs)
    return TensorVolume(stream, whole, split, fixed), TensorVolume(0.0, output_whole, output_split)


def _block_signature(block: BlockFacts) -> Any:
    """Return a value that equal blocks share: all fields but the name."""
    return [getattr(block, name) for name in BlockFacts.__dataclass_fields__ if name != "name"]
