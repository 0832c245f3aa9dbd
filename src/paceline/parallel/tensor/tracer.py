"""Watches a forward pass: which operations it makes, and where labels on the outputs of layers go in them."""

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
    return (type(module) is nn.Linear or is_transposed(module)) and not has_computed_weight(module)


def has_computed_weight(module: nn.Module) -> bool:
    """Whether the weight of a layer is no parameter of its own, but computed from others: weight_norm, spectral_norm."""
    return module._parameters.get("weight") is None


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight lies as (in, out): Conv1D of the GPT-2 of transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_embedding(module: nn.Module) -> bool:
    plain = type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None
    return plain and not has_computed_weight(module) and not (module.sparse or module.scale_grad_by_freq)


def linear_features(module: Any) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    rows, columns = module.weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


@dataclass
class TracedOperation:
    """As it should be in a pass on one rank: the same, on results of the sizes that are expected there."""

    name: str
    numbers: tuple[float, ...]  # that went in, but for sizes
    shape: tuple[int, ...]  # of its result
    label: Label | None  # of its result


@dataclass
class TraceResult:
    model: nn.Module
    calls: dict[str, int] = field(default_factory=dict)  # module -> times called, in order of the first
    root_of: dict[str, str] = field(
        default_factory=dict
    )  # linear layer -> the one that its group is named after
    inputs: dict[str, set[str | None]] = field(
        default_factory=dict
    )  # linear layer -> layers whose split features it is given
    spoiled: dict[str, str] = field(default_factory=dict)  # layer -> what cannot be done on parts of it
    sizes: dict[str, set[int]] = field(
        default_factory=dict
    )  # layer -> sizes of dimensions that would be split
    partial: dict[str, set[str]] = field(
        default_factory=dict
    )  # layer -> parameters that meet its split features
    whole: set[str] = field(default_factory=set)  # parameters that meet what is not split
    heads: set[str] = field(default_factory=set)
    looked_at: set[str] = field(default_factory=set)  # modules whose parameters are used outside of them
    draws: list[tuple[str, str | None]] = field(
        default_factory=list
    )  # module that draws at random, and the layer whose parts it is for
    tape: list[TracedOperation] = field(default_factory=list)

    def root(self, name: str) -> str:
        while self.root_of[name] != name:
            name = self.root_of[name]
        return name

    def unite(self, one: str, other: str) -> str:
        one, other = self.root(one), self.root(other)
        self.root_of[other] = one
        return one


class LabelTracer(TorchDispatchMode):
    """Follows the labels and writes the tape."""

    def __init__(self, seen: TraceResult):
        super().__init__()
        self.seen = seen
        self.labels: dict[int, Label] = {}
        self.kept: list[Any] = []  # so that ids stay unique
        self.inside = 0
        self.names = {id(module): name for name, module in seen.model.named_modules()}
        self.running = [""]  # modules, the innermost last
        self.made: dict[
            int, str
        ] = {}  # what a module returned, the innermost of those that returned the same
        self.uses: dict[int, int] = {}  # of labelled tensors by operations
        self.owners: dict[int, str] = {}
        for name, module in seen.model.named_modules():
            for key, parameter in module._parameters.items():
                self.owners.setdefault(id(parameter), f"{name}.{key}" if name else key)

    def label(self, tensor: Any) -> Label | None:
        return self.labels.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def put(self, tensor: Tensor, label: Label) -> None:
        self.labels[id(tensor)] = label
        self.kept.append(tensor)
        self.seen.sizes.setdefault(label[0], set()).add(tensor.shape[label[1]])

    def spoil(self, tensors: list[Tensor], by: str) -> None:
        for tensor in tensors:
            if label := self.label(tensor):
                self.seen.spoiled.setdefault(label[0], by)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What runs in this context is not noted."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside:
            self.note(str(func), func, args, kwargs or {}, result)
        return result

    def note(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        results = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        if not results:  # it asks for a device, say
            return
        leaves = tree_leaves((args, kwargs))
        tensors = [item for item in leaves if isinstance(item, Tensor)]
        labelled = [tensor for tensor in tensors if self.label(tensor)]
        for tensor in tensors:
            if owner := self.owners.get(id(tensor)):
                self.seen.looked_at.add(owner.rpartition(".")[0])
                if not labelled:
                    self.seen.whole.add(owner)
        for tensor in labelled:
            self.uses[id(tensor)] = self.uses.get(id(tensor), 0) + 1
        if labelled:
            dims = self.follow(func, args, kwargs, tensors, results)
            if dims is None or not self.others_are_fixed(tensors, labelled):
                self.spoil(labelled, f"{name} in {self.running[-1]}")
            else:
                root = self.seen.root(self.labels[id(labelled[0])][0])
                for tensor in labelled[1:]:
                    root = self.seen.unite(root, self.labels[id(tensor)][0])
                for tensor, dim in zip(results, dims, strict=True):
                    if dim is not None:
                        self.put(tensor, (root, dim))
        self.kept += results
        if is_random(func, args, kwargs):
            label = self.label(results[0])
            self.seen.draws.append((self.running[-1], label[0] if label else None))
        packet = getattr(func, "overloadpacket", func)
        if packet not in UNTAPED:
            numbers = tuple(
                item
                for item in leaves
                if isinstance(item, float) or (isinstance(item, int) and is_pointwise(func))
            )
            name = "view" if packet in VIEWS else name
            self.seen.tape += [
                TracedOperation(name, numbers, tuple(tensor.shape), self.label(tensor)) for tensor in results
            ]

    def follow(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]
    ) -> list[int | None] | None:
        return propagate_split(func, args, kwargs, tensors, results, self.label)

    def others_are_fixed(self, tensors: list[Tensor], labelled: list[Tensor]) -> bool:
        """Whatever else goes in must not need a gradient: each rank would have a part of it. Small parameters get theirs summed up."""
        for tensor in tensors:
            if tensor.requires_grad and not self.label(tensor):
                if id(tensor) not in self.owners:
                    return False
                for own in labelled:
                    self.seen.partial.setdefault(self.labels[id(own)][0], set()).add(self.owners[id(tensor)])
        return True

    def __enter__(self) -> Self:
        self.hooks = [
            register_module_forward_pre_hook(
                lambda module, args: self.running.append(self.names.get(id(module), ""))
            ),
            register_module_forward_hook(self._left, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self.hooks:
            hook.remove()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        if isinstance(output, Tensor) and id(module) in self.names:
            self.made.setdefault(id(output), self.names[id(module)])
            self.kept.append(output)


class WholeFunctionTracer(TorchFunctionMode):
    """Attention and products of matrices, seen whole: torch would take them apart."""

    def __init__(self, watch: LabelTracer):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func is not ATTENTION and func not in PRODUCTS) or self.watch.inside:
            return func(*args, **kwargs)
        self.watch.inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.watch.inside -= 1
        self.watch.note(func.__name__, func, args, kwargs, result)
        return result


@contextlib.contextmanager
def replaced_forwards(
    model: nn.Module, wrap: Callable[..., Any], others: Collection[str] = ()
) -> Iterator[None]:
    """All linear layers and embeddings with another forward, and these other modules."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) or is_embedding(module) or name in others
    }
    own = {name: module.__dict__.get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = wrap(name, module, module.forward)
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            if own[name] is not None:
                module.forward = own[name]


def find_first_difference(
    run: Callable[[], Any], part: LabelTracer, tape: list[TracedOperation], divided: Callable[[Label], int]
) -> int | None:
    """Make a pass as one rank would; where on the tape it does something else than the pass that is on it, if anywhere.
    `divided`: by how much the dimension that a label is of is smaller there."""
    with (
        silence_fake_tensor_errors(),
        contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError),
        WholeFunctionTracer(part),
        part,
        torch.no_grad(),
    ):
        run()
    for at, whole in enumerate(tape):
        shape = whole.shape
        if whole.label is not None:
            dim = whole.label[1]
            shape = (*shape[:dim], shape[dim] // divided(whole.label), *shape[dim + 1 :])
        here = part.seen.tape[at] if at < len(part.seen.tape) else None
        if here is None or (here.name, here.numbers, here.shape) != (whole.name, whole.numbers, shape):
            return at
    return None


@contextlib.contextmanager
def silence_fake_tensor_errors() -> Iterator[None]:
    """What fails on tensors without values is not told: it is tried."""
    speaks = logging.getLogger("torch._subclasses.fake_tensor")
    speaks.addFilter(_reject)
    try:
        yield
    finally:
        speaks.removeFilter(_reject)


def _reject(record: logging.LogRecord) -> bool:
    return False
