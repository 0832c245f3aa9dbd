"""ModelFacts of any task: counted in one forward pass, which works out shapes and computes nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.errors import PlanError, TaskError
from paceline.plan.facts import Attention, Block, Held, ModelFacts, Product
from paceline.plan.plan import Plan
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.data import Batch
from paceline.training.imagine import example, imagined
from paceline.training.labels import ATTENTION
from paceline.training.parallelize import blocks
from paceline.training.step import call

ATEN = torch.ops.aten
SAMPLES = 2  # BatchNorm takes no single one
FIRST, LAST = -1, -2  # what is computed ahead of the blocks, and behind or between them
CUTS: Mapping[str, Literal["rows", "columns", "inner"]] = {"column": "columns", "head": "columns", "gather": "columns", "row": "inner"}
VIEWS = {ATEN.view, ATEN._unsafe_view, ATEN.reshape, ATEN.t, ATEN.transpose, ATEN.permute, ATEN.expand, ATEN.unsqueeze, ATEN.squeeze}
VIEWS |= {ATEN.detach, ATEN.alias, ATEN.slice, ATEN.select, ATEN.split, ATEN.unbind, ATEN.split_with_sizes, ATEN.chunk}


def describe(spec: Spec, task: Task) -> ModelFacts:
    """Of the model of `task`, from its first samples. Raises TaskError for a model that no pass without values can be made of."""
    from paceline.training.prepare import build

    batch = example(spec.model_copy(update={"batch": SAMPLES}), task, Plan(dp=1, micro=1))
    return described(build(spec, task).model, task, batch, SAMPLES)


def described(model: nn.Module, task: Task, batch: Batch, samples: int) -> ModelFacts:
    """`model` is on the meta device; `batch` has so many samples."""
    styles = _styles(model, task, batch)
    with imagined(model) as imagine:
        watch = _Counting(model, task, styles)
        try:
            with watch:
                inputs = imagine(batch)
                output = call(task, model, inputs)
                watch.finish()
                task.loss(output, inputs)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TaskError(f"{type(task).__name__} cannot be described: {watch.where} fails without values: {reason}") from error
        return _facts(watch, type(task).__name__, samples)


def _styles(model: nn.Module, task: Task, batch: Batch) -> Mapping[str, str]:
    """How tensor parallelism would split each layer, if it can."""
    from paceline.training.tensor import find_splits

    try:
        return find_splits(model, task, batch, Plan(dp=1, tp=2)).styles
    except (PlanError, RuntimeError):  # a pass that fails is told of with the module that it fails in
        return {}


@dataclass
class _Part:
    """What is counted of a block, of all samples together."""

    name: str
    products: list[Product] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    saved: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)  # by memory: the tensor, and whether it is of the loss
    moved: float = 0.0  # elements
    kernels: int = 0
    boundary: tuple[int, ...] = ()
    layers: set[str] = field(default_factory=set)


class _Counting(TorchDispatchMode):
    """Follows a pass through the blocks of a model."""

    def __init__(self, model: nn.Module, task: Task, styles: Mapping[str, str]):
        super().__init__()
        self.model, self.styles = model, styles
        self.names = {id(module): name for name, module in model.named_modules()}
        units = blocks(model, task.layout()) or [model]
        self.unit_of = {id(unit): k for k, unit in enumerate(units)}
        self.units = units
        self.parts = {FIRST: _Part("first"), LAST: _Part("last")} | {k: _Part(self.names[id(u)] or "model") for k, u in enumerate(units)}
        self.owner = {_memory(p): p for p in (*model.parameters(), *model.buffers())}
        self.used: dict[int, set[int]] = {}  # parameter -> parts that use it
        self.running: list[str] = []
        self.where = "the model"
        self.within: list[int] = []  # blocks that run, the innermost last
        self.begun = self.of_loss = False
        self.made: dict[int, str | None] = {}  # memory of what products take and give -> dim that is cut
        self.given: set[int] = set()  # memory of what they give
        self.kept: list[Any] = []  # so that no memory is used twice
        self.whole = 0  # inside of attention

    def finish(self) -> None:
        """The model is through; what follows is the loss."""
        self.of_loss = True

    @property
    def at(self) -> int:
        return self.within[-1] if self.within else LAST if self.begun else FIRST

    def __enter__(self) -> Self:
        self.hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=False)]
        self.attention = _Attentions(self)
        self.saving = saved_tensors_hooks(self._save, lambda kept: kept)
        self.saving.__enter__()
        super().__enter__()
        self.attention.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.attention.__exit__(*raised)
        super().__exit__(*raised)
        self.saving.__exit__(*raised)
        for hook in self.hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module), "")
        self.running.append(name)
        self.where = name or "the model"
        if id(module) in self.unit_of:
            self.within.append(self.unit_of[id(module)])
            if not self.begun and args and isinstance(args[0], Tensor):
                self.parts[FIRST].boundary = tuple(args[0].shape)
            self.begun = True
        self.parts[self.at].layers.add(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        self.where = (self.running[-1] if self.running else "") or "the model"
        if id(module) in self.unit_of:
            tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            self.parts[self.within.pop()].boundary = tuple(tensor.shape) if tensor is not None else ()

    def _save(self, tensor: Tensor) -> Tensor:
        memory = _memory(tensor)
        if memory not in self.owner and not any(memory in part.saved for part in self.parts.values()):
            self.parts[self.at].saved[memory] = (tensor.detach(), self.of_loss)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.kept += results
        for tensor in tensors:
            if (memory := _memory(tensor)) in self.owner:
                self.used.setdefault(memory, set()).add(self.at)
        packet = getattr(func, "overloadpacket", func)
        part = self.parts[self.at]
        if packet in VIEWS or not results or self.whole:
            return result
        part.kernels += 1
        if found := _product(packet, args, results[0]):
            cut = CUTS.get(self.styles.get(self.running[-1], "")) if self.running else None
            part.products.append(replace(found, cut=cut))
            self.touch(tensors, results, cut if self.styles.get(self.running[-1] if self.running else "") != "gather" else None)
        else:
            part.moved += sum(tensor.numel() for tensor in (*tensors, *results) if tensor.is_floating_point())
        return result

    def touch(self, taken: list[Tensor], given: list[Tensor], cut: str | None) -> None:
        """These are of the type of products; `cut` is split on its side of the layer."""
        for tensor in taken:
            memory = _memory(tensor)
            self.made[memory] = self.made.get(memory) or ("inner" if cut == "inner" else None)
        for tensor in given:
            self.made[_memory(tensor)] = "columns" if cut == "columns" else None
            self.given.add(_memory(tensor))


class _Attentions(TorchFunctionMode):
    """Attention, seen whole."""

    def __init__(self, counting: _Counting):
        super().__init__()
        self.counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not ATTENTION:
            return func(*args, **kwargs)
        of = self.counting
        of.whole += 1
        try:
            result = func(*args, **kwargs)
        finally:
            of.whole -= 1
        query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
        causal = bool(kwargs.get("is_causal", len(args) > 5 and args[5]))
        part = of.parts[of.at]
        part.kernels += 1
        part.attention.append(Attention(query.shape[-3], query.shape[-2], key.shape[-2], query.shape[-1], causal, kv_heads=key.shape[-3]))
        split = "columns" if any(of.styles.get(layer) == "column" for layer in part.layers) else None  # those that ran before it
        of.touch([query, key, value], [result], None)
        for tensor in (query, key, value, result):
            of.made[_memory(tensor)] = split
        return result


def _memory(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _product(packet: Any, args: Any, result: Tensor) -> Product | None:
    """Of all samples together."""
    if packet in (ATEN.addmm, ATEN.mm):
        one, other = args[-2:]
        return Product(one.shape[0], other.shape[1], one.shape[1])
    if packet in (ATEN.bmm, ATEN.baddbmm):
        one, other = args[-2:]
        return Product(one.shape[1] * one.shape[0], other.shape[2], one.shape[2])
    if packet is ATEN.convolution:
        weight = args[1]
        window = math.prod(weight.shape[2:])
        small = result if not args[6] else args[0]  # a transposed one has a row for each position of its input
        rows = small.shape[0] * math.prod(small.shape[2:])
        columns, inner = (weight.shape[0], weight.shape[1] * window) if not args[6] else (weight.shape[1] * window, weight.shape[0])
        return Product(rows, columns, inner, reuse=float(window) / math.prod(args[3]))
    return None


def _facts(watch: _Counting, name: str, samples: int) -> ModelFacts:
    made = {k: _block(watch, k, samples) for k in watch.parts}
    grouped = [list(alike) for _, alike in groupby((made[k] for k in range(len(watch.units))), _key)]
    runs = tuple((alike[0], len(alike)) for alike in grouped)
    attention = [one for block, _ in runs for one in block.attention]
    heads: tuple[int, ...] = ()
    if any(block.split_params for block in made.values()):
        of_attention = {heads for one in attention for heads in (one.heads, one.kv_heads or one.heads)}
        widths = {int(p.columns if p.cut == "columns" else p.inner) for block, _ in runs for p in block.products if p.cut}
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
        shared_params=sum(watch.owner[m].numel() for m, at in watch.used.items() if {FIRST, LAST} <= at and _learns(watch, m)),
        source="counted",
    )


def _learns(watch: _Counting, memory: int) -> bool:
    return isinstance(watch.owner[memory], nn.Parameter)


def _block(watch: _Counting, at: int, samples: int) -> Block:
    part = watch.parts[at]
    modules = dict(watch.model.named_modules())
    own = _parameters(watch, at)
    styled = {id(p) for n, style in watch.styles.items() for k, p in modules[n]._parameters.items() if style != "row" or k == "weight"}
    none, given = _held(watch, part, samples)
    boundary = math.prod(part.boundary) / samples if part.boundary and at != LAST else 0.0
    own_layers = [watch.styles.get(layer) for layer in part.layers]
    return Block(
        name=part.name,
        params=sum(p.numel() for p in own),
        split_params=sum(p.numel() for p in own if id(p) in styled),
        products=tuple(replace(product, rows=product.rows / samples) for product in part.products),
        attention=tuple(part.attention),
        saved={"none": none} if at < 0 else {"none": none, "selective": given._replace(stream=boundary), "full": Held(boundary)},
        traffic=Held(stream=part.moved / samples),
        boundary=boundary,
        sums=own_layers.count("row") + own_layers.count("vocabulary") + own_layers.count("gather") / 2,
        kernels=part.kernels,
    )


def _parameters(watch: _Counting, at: int) -> list[nn.Parameter]:
    """Each parameter once: in its block, else where it is used first."""
    of_units = {id(p): k for k, unit in enumerate(watch.units) for p in unit.parameters()}

    def place(parameter: nn.Parameter) -> int:
        return of_units.get(id(parameter), FIRST if FIRST in watch.used.get(_memory(parameter), ()) else LAST)

    return [parameter for parameter in watch.model.parameters() if place(parameter) == at]


def _held(watch: _Counting, part: _Part, samples: int) -> tuple[Held, Held]:
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
    return Held(stream, whole, split, fixed), Held(0.0, given_whole, given_split)


def _key(block: Block) -> Any:
    """What makes blocks alike."""
    return [getattr(block, name) for name in Block.__dataclass_fields__ if name != "name"]
