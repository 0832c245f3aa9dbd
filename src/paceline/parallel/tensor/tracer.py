"""A tracer of a forward pass: its operations, and the split dimensions that follow from split layers."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.chunked_loss import CrossEntropyHead
from paceline.parallel.op_rules import (
    ATTENTION,
    PRODUCTS,
    UNTAPED,
    VIEWS,
    Label,
    is_pointwise,
    is_random,
    propagate_split,
)


def is_linear(module: nn.Module) -> bool:
    is_plain = type(module) is nn.Linear or is_transposed(module)
    return (is_plain and not has_computed_weight(module)) or is_parametrized(module)


def is_parametrized(module: nn.Module) -> bool:
    """Return whether a linear layer computes its weight by `torch.nn.utils.parametrize`, and only its weight.

    `torch.nn.utils.parametrizations` has weight_norm and spectral_norm.
    """
    parametrizations = getattr(module, "parametrizations", None)
    return (
        type(module).__bases__ == (nn.Linear,)
        and isinstance(parametrizations, nn.ModuleDict)
        and [*parametrizations] == ["weight"]
    )


def has_computed_weight(module: nn.Module) -> bool:
    """Return whether a layer computes its weight from other parameters (weight_norm, spectral_norm)."""
    return module._parameters.get("weight") is None


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight is stored as (in, out), as in transformers' Conv1D (GPT-2)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_loss_head(module: nn.Module) -> bool:
    """Return whether a layer is a linear layer that returns the losses of its targets."""
    return type(module) is CrossEntropyHead


def is_embedding(module: nn.Module) -> bool:
    plain = type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None
    return plain and not has_computed_weight(module) and not (module.sparse or module.scale_grad_by_freq)


def linear_features(module: Any) -> tuple[int, int]:
    """Return (in_features, out_features) of a linear layer."""
    if is_parametrized(module):  # each access to the weight of spectral_norm changes its buffers
        return module.in_features, module.out_features
    rows, columns = module.weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


@dataclass
class TracedOperation:
    """An operation on the tape. A pass with the sizes of one rank must make the same operation."""

    name: str
    numbers: tuple[float, ...]  # its numeric arguments, without sizes
    shape: tuple[int, ...]  # of the result
    label: Label | None  # of the result


@dataclass
class TraceResult:
    """The result of a trace. Layers whose outputs meet in one operation form a group with a root layer."""

    model: nn.Module
    # module -> number of calls, in the order of the first calls
    calls: dict[str, int] = field(default_factory=dict)
    # linear layer -> parent in the union-find forest of groups
    parents: dict[str, str] = field(default_factory=dict)
    # linear layer -> groups whose split features are its input; None: a whole input
    inputs: dict[str, set[str | None]] = field(default_factory=dict)
    # layer -> the operation that cannot run on parts of its output
    unsplittable: dict[str, str] = field(default_factory=dict)
    # layer -> sizes of the dimensions that would be split
    sizes: dict[str, set[int]] = field(default_factory=dict)
    # layer -> parameters that are combined with its split features
    partial: dict[str, set[str]] = field(default_factory=dict)
    # parameters that are combined with tensors that are not split
    whole: set[str] = field(default_factory=set)
    # layers whose output the model returns
    heads: set[str] = field(default_factory=set)
    # modules whose parameters are used outside of their forward
    used_outside: set[str] = field(default_factory=set)
    # module that draws random numbers, and the layer whose split features it draws for
    draws: list[tuple[str, str | None]] = field(default_factory=list)
    tape: list[TracedOperation] = field(default_factory=list)

    def root(self, name: str) -> str:
        """Return the root layer of the group of `name`."""
        while self.parents[name] != name:
            name = self.parents[name]
        return name

    def unite(self, first: str, second: str) -> str:
        """Merge the groups of two layers, and return the root."""
        first, second = self.root(first), self.root(second)
        self.parents[second] = first
        return first


class LabelTracer(TorchDispatchMode):
    """A dispatch mode that propagates labels through operations and records the operations on a tape."""

    def __init__(self, result: TraceResult):
        super().__init__()
        self.result = result
        self.labels: dict[int, Label] = {}  # by id of the tensor
        self.keep_alive: list[Any] = []  # tensors, so that ids stay unique
        self.paused_depth = 0
        self.names = {id(module): name for name, module in result.model.named_modules()}
        self.module_stack = [""]  # names of running modules, the innermost last
        # id of a tensor -> the innermost module that returned it
        self.producers: dict[int, str] = {}
        # id of a labelled tensor -> number of operations that use it
        self.use_counts: dict[int, int] = {}
        self.parameter_names: dict[int, str] = {}
        for name, module in result.model.named_modules():
            for key, parameter in module._parameters.items():
                self.parameter_names.setdefault(id(parameter), f"{name}.{key}" if name else key)

    def label(self, tensor: Any) -> Label | None:
        return self.labels.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def set_label(self, tensor: Tensor, label: Label) -> None:
        self.labels[id(tensor)] = label
        self.keep_alive.append(tensor)
        self.result.sizes.setdefault(label[0], set()).add(tensor.shape[label[1]])

    def mark_unsplittable(self, tensors: list[Tensor], reason: str) -> None:
        """Record `reason`, an operation, as why the layers that `tensors` come from cannot be split."""
        for tensor in tensors:
            if label := self.label(tensor):
                self.result.unsplittable.setdefault(label[0], reason)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in this context."""
        self.paused_depth += 1
        try:
            yield
        finally:
            self.paused_depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused_depth:
            self.record(str(func), func, args, kwargs or {}, result)
        return result

    def record(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Propagate labels through one operation, and put the operation on the tape."""
        results = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        if not results:  # a query, for example of a device
            return
        leaves = tree_leaves((args, kwargs))
        tensors = [item for item in leaves if isinstance(item, Tensor)]
        labelled = [tensor for tensor in tensors if self.label(tensor)]
        for tensor in tensors:
            if parameter := self.parameter_names.get(id(tensor)):
                self.result.used_outside.add(parameter.rpartition(".")[0])
                if not labelled:
                    self.result.whole.add(parameter)
        for tensor in labelled:
            self.use_counts[id(tensor)] = self.use_counts.get(id(tensor), 0) + 1
        if labelled:
            dims = self.propagate(func, args, kwargs, tensors, results)
            if dims is None or not self.can_combine(tensors, labelled):
                self.mark_unsplittable(labelled, f"{name} in {self.module_stack[-1]}")
            else:
                root = self.result.root(self.labels[id(labelled[0])][0])
                for tensor in labelled[1:]:
                    root = self.result.unite(root, self.labels[id(tensor)][0])
                for tensor, dim in zip(results, dims, strict=True):
                    if dim is not None:
                        self.set_label(tensor, (root, dim))
        self.keep_alive += results
        if is_random(func, args, kwargs):
            label = self.label(results[0])
            self.result.draws.append((self.module_stack[-1], label[0] if label else None))
        packet = getattr(func, "overloadpacket", func)
        if packet not in UNTAPED:
            numbers = tuple(
                item
                for item in leaves
                if isinstance(item, float) or (isinstance(item, int) and is_pointwise(func))
            )
            name = "view" if packet in VIEWS else name
            self.result.tape += [
                TracedOperation(name, numbers, tuple(tensor.shape), self.label(tensor)) for tensor in results
            ]

    def propagate(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]
    ) -> list[int | None] | None:
        """Return the split dimension of each result, or None if the operation cannot run on parts."""
        return propagate_split(func, args, kwargs, tensors, results, self.label)

    def can_combine(self, tensors: list[Tensor], labelled: list[Tensor]) -> bool:
        """Return whether split tensors may be combined with the other arguments of an operation.

        An argument that needs a gradient would get only a part of it on each rank. Small parameters are
        allowed, because their gradients are summed over the ranks.
        """
        for tensor in tensors:
            if tensor.requires_grad and not self.label(tensor):
                if id(tensor) not in self.parameter_names:
                    return False
                for split in labelled:
                    layer = self.labels[id(split)][0]
                    self.result.partial.setdefault(layer, set()).add(self.parameter_names[id(tensor)])
        return True

    def __enter__(self) -> Self:
        self.hooks = [
            register_module_forward_pre_hook(
                lambda module, args: self.module_stack.append(self.names.get(id(module), ""))
            ),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self.hooks:
            hook.remove()

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self.module_stack.pop()
        if isinstance(output, Tensor) and id(module) in self.names:
            self.producers.setdefault(id(output), self.names[id(module)])
            self.keep_alive.append(output)


class WholeFunctionTracer(TorchFunctionMode):
    """A function mode that records attention and matrix products before torch decomposes them."""

    def __init__(self, tracer: LabelTracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func is not ATTENTION and func not in PRODUCTS) or self.tracer.paused_depth:
            return func(*args, **kwargs)
        self.tracer.paused_depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.tracer.paused_depth -= 1
        self.tracer.record(func.__name__, func, args, kwargs, result)
        return result


@contextlib.contextmanager
def replaced_forwards(
    model: nn.Module, wrap: Callable[..., Any], others: Collection[str] = ()
) -> Iterator[None]:
    """Replace the forwards of all linear layers, embeddings, loss heads and the modules named in `others`.

    wrap: called as wrap(name, module, forward); returns the new forward.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) or is_embedding(module) or is_loss_head(module) or name in others
    }
    previous = {name: module.__dict__.get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = wrap(name, module, module.forward)
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            if previous[name] is not None:
                module.forward = previous[name]


def find_first_difference(
    run: Callable[[], Any], tracer: LabelTracer, tape: list[TracedOperation], divisor: Callable[[Label], int]
) -> int | None:
    """Run a pass with the sizes of one rank, and return the index on `tape` of its first different operation.

    tracer: records the pass.
    tape: the operations of a whole pass.
    divisor: the number of ranks that divide the dimension of a label.
    """
    with (
        silence_fake_tensor_errors(),
        contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError),
        WholeFunctionTracer(tracer),
        tracer,
        torch.no_grad(),
    ):
        run()
    for index, whole in enumerate(tape):
        shape = whole.shape
        if whole.label is not None:
            dim = whole.label[1]
            shape = (*shape[:dim], shape[dim] // divisor(whole.label), *shape[dim + 1 :])
        part = tracer.result.tape[index] if index < len(tracer.result.tape) else None
        if part is None or (part.name, part.numbers, part.shape) != (whole.name, whole.numbers, shape):
            return index
    return None


@contextlib.contextmanager
def silence_fake_tensor_errors() -> Iterator[None]:
    """Suppress torch's log of operations that fail on tensors without values: a trial may fail."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_reject)
    try:
        yield
    finally:
        logger.removeFilter(_reject)


def _reject(record: logging.LogRecord) -> bool:
    return False
