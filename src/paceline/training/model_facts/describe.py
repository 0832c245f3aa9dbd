"""ModelFacts of any task: counted in one forward pass, which works out shapes and computes nothing."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

from torch import nn

from paceline.data.fake import example_batch, fake_parameters
from paceline.data.loader import Batch
from paceline.distributed.dtensor import storage_id
from paceline.errors import PlanError, TaskError
from paceline.parallel.forward import call_model
from paceline.parallel.tensor.styles import STYLES
from paceline.plan.model.facts import BlockFacts, LiveBytes, ModelFacts, TensorVolume
from paceline.plan.model.operations import Operation
from paceline.plan.plan import Plan, ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, load_task
from paceline.training.model_facts.live_memory import LiveMemory, lived
from paceline.training.model_facts.op_counter import FIRST, LAST, BlockCount, OpCounter
from paceline.user_code import UserCode

SAMPLES = 3  # BatchNorm takes no single one; a number that shapes of weights seldom have


def describe(spec: Spec, task: Task | None = None) -> ModelFacts:
    """Return what planning knows of a model: parameters, FLOPs, activations, attention, block by block.

    The model runs without values on its first samples; no memory is allocated for it.

        facts = paceline.describe(paceline.Spec(task="digits", batch=64))
        print(facts.parameters, facts.blocks)

    spec: the task and its fields. task: an instance, instead of the task that `spec` names.
    Raises TaskError for a model that cannot run without values.
    """
    from paceline.training.setup import build

    task = task if task is not None else load_task(spec.task, spec.set)
    batch = example_batch(spec.model_copy(update={"batch": SAMPLES}), task, ResolvedPlan())
    return described(build(spec, task).model, task, batch, SAMPLES)


def described(model: nn.Module, task: Task, batch: Batch, samples: int) -> ModelFacts:
    """`model` is on the meta device; `batch` has so many samples."""
    with UserCode("the forward pass without values", task.model):
        styles = _styles(model, task, batch)
    with UserCode("the forward pass without values", task.model), fake_parameters(model) as imagine:
        watch = OpCounter(model, task, styles)
        try:
            return watched(watch, task, imagine(batch), samples)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            hint = "paceline plan --measure runs it"
            raise TaskError(
                f"{type(task).__name__} cannot be described: {watch.where} fails without values: {reason}; {hint}"
            ) from error


def watched(watch: OpCounter, task: Task, batch: Batch, samples: int) -> ModelFacts:
    """Of a model on the device of `batch`, whether or not they have values."""
    model = watch.model
    with watch:
        output = call_model(task, model, batch)
        watch.finish()
        task.loss(output, batch)
    facts = _facts(watch, type(task).__name__, samples)
    try:
        found = lived(model, watch.units, lambda: task.loss(call_model(task, model, batch), batch))
    except RuntimeError:  # what is kept for the backward pass is counted already
        return facts
    return _with_lives(facts, found, samples)


def _with_lives(
    facts: ModelFacts, found: tuple[LiveMemory, list[LiveMemory], LiveMemory], samples: int
) -> ModelFacts:
    """Of blocks that are alike the one in the middle, which is neither the first nor the last."""

    def of(block: BlockFacts, one: LiveMemory) -> BlockFacts:
        return replace(block, lives=LiveBytes(one.kept / samples, one.most / samples))

    first, each, last = found
    ends = list(accumulate(count for _, count in facts.runs))
    middle = [each[(end - count + end) // 2] for (_, count), end in zip(facts.runs, ends, strict=True)]
    runs = tuple((of(block, one), count) for (block, count), one in zip(facts.runs, middle, strict=True))
    return replace(facts, first=of(facts.first, first), runs=runs, last=of(facts.last, last))


def _styles(model: nn.Module, task: Task, batch: Batch) -> Mapping[str, str]:
    """How tensor parallelism would split each layer, if it can."""
    from paceline.parallel.tensor.apply import find_splits

    try:
        return find_splits(model, task, batch, Plan(dp=1, tp=2)).styles
    except (PlanError, RuntimeError):  # a pass that fails is told of with the module that it fails in
        return {}


def _facts(watch: OpCounter, name: str, samples: int) -> ModelFacts:
    made = {k: _block(watch, k, samples) for k in watch.parts}
    grouped = [list(alike) for _, alike in groupby((made[k] for k in range(len(watch.units))), _key)]
    runs = tuple((alike[0], len(alike)) for alike in grouped)
    attention = [one for block, _ in runs for one in block.attention]
    heads: tuple[int, ...] = ()
    if any(block.split_params for block in made.values()):
        of_attention = {heads for one in attention for heads in (one.heads, one.kv_heads or one.heads)}
        widths = {
            int(p.columns if p.cut == "columns" else p.inner)
            for block, _ in runs
            for p in block.products
            if p.cut
        }
        heads = tuple(sorted(of_attention)) if of_attention else (math.gcd(*widths),) if widths else ()
    boundary = watch.parts[0].boundary
    sequence = boundary[1] if len(boundary) == 3 else None
    outputs = made[LAST].products
    return ModelFacts(
        name=name,
        first=made[FIRST],
        runs=runs,
        last=made[LAST],
        tokens=sequence or 1,
        heads=heads,
        sequence=sequence if attention else None,
        hidden=boundary[-1] if boundary else 0,
        vocab=int(outputs[-1].columns) if outputs and sequence else 0,
        shared_params=sum(
            watch.owner[m].numel()
            for m, at in watch.used.items()
            if {FIRST, LAST} <= at and _learns(watch, m)
        ),
        source="counted",
    )


def _learns(watch: OpCounter, memory: int) -> bool:
    return isinstance(watch.owner[memory], nn.Parameter)


def _block(watch: OpCounter, at: int, samples: int) -> BlockFacts:
    part = watch.parts[at]
    modules = dict(watch.model.named_modules())
    own = _parameters(watch, at)
    styled = {
        id(p)
        for n, style in watch.styles.items()
        for k, p in modules[n]._parameters.items()
        if k in STYLES[style].split_dims
    }
    none, given = _held(watch, part, samples)
    boundary = math.prod(part.boundary) / samples if part.boundary and at != LAST else 0.0
    own_styles = [watch.styles[layer] for layer in part.layers if layer in watch.styles]
    return BlockFacts(
        name=part.name,
        params=sum(p.numel() for p in own),
        split_params=sum(p.numel() for p in own if id(p) in styled),
        products=tuple(replace(product, rows=product.rows / samples) for product in part.products),
        attention=tuple(part.attention),
        saved={"none": none}
        if at < 0
        else {"none": none, "selective": given._replace(stream=boundary), "full": TensorVolume(boundary)},
        traffic=TensorVolume(stream=part.moved / samples),
        boundary=boundary,
        sums=sum((STYLES[style].sums for style in own_styles), 0.0),
        kernels=part.kernels,
        operations=_counted(part.operations, samples),
        tensors=len(own),
        largest=max((p.numel() for p in own), default=0),
        whole=len(watch.parts[0].boundary) != 3,
    )


def _counted(operations: list[Operation], samples: int) -> tuple[Operation, ...]:
    """Those that are alike together; sizes of one sample, but for views, which have none."""
    alike = Counter(operations)
    return tuple(
        replace(one, size=one.size if one.kind == "view" else one.size / samples, count=n)
        for one, n in alike.items()
    )


def _parameters(watch: OpCounter, at: int) -> list[nn.Parameter]:
    """Each parameter once: in its block, else where it is used first."""
    of_units = {id(p): k for k, unit in enumerate(watch.units) for p in unit.parameters()}

    def place(parameter: nn.Parameter) -> int:
        return of_units.get(
            id(parameter), FIRST if FIRST in watch.used.get(storage_id(parameter), ()) else LAST
        )

    return [parameter for parameter in watch.model.parameters() if place(parameter) == at]


def _held(watch: OpCounter, part: BlockCount, samples: int) -> tuple[TensorVolume, TensorVolume]:
    """What is kept of a sample: all, and only what products and attention gave."""
    stream = whole = split = fixed = given_whole = given_split = 0.0
    for memory, (tensor, of_loss) in part.saved.items():
        count = tensor.untyped_storage().nbytes() / tensor.element_size() / samples
        if not tensor.is_floating_point():
            fixed += count * tensor.element_size()
        elif of_loss:
            fixed += 4 * count  # in float32
        elif memory not in watch.made:
            stream += count
        elif watch.made[memory]:
            split += count
            given_split += count * (memory in watch.given)
        else:
            whole += count
            given_whole += count * (memory in watch.given)
    return TensorVolume(stream, whole, split, fixed), TensorVolume(0.0, given_whole, given_split)


def _key(block: BlockFacts) -> Any:
    """What makes blocks alike."""
    return [getattr(block, name) for name in BlockFacts.__dataclass_fields__ if name != "name"]
