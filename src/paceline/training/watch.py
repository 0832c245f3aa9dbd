"""Watches a forward pass: which operations it makes, and where labels on the outputs of layers go in them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.training.labels import ATTENTION, PRODUCTS, SILENT, VIEWS, Label, follow


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight lies as (in, out): Conv1D of the GPT-2 of transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_embedding(module: nn.Module) -> bool:
    plain = type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None
    return plain and not (module.sparse or module.scale_grad_by_freq)


def features(module: Any) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    rows, columns = module.weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


@dataclass
class Seen:
    model: nn.Module
    calls: dict[str, int] = field(default_factory=dict)  # module -> times called, in order of the first
    root_of: dict[str, str] = field(default_factory=dict)  # linear layer -> the one that its group is named after
    inputs: dict[str, set[str | None]] = field(default_factory=dict)  # linear layer -> layers whose split features it is given
    spoiled: set[str] = field(default_factory=set)
    sizes: dict[str, set[int]] = field(default_factory=dict)  # layer -> sizes of dimensions that would be split
    partial: dict[str, set[str]] = field(default_factory=dict)  # layer -> parameters that meet its split features
    heads: set[str] = field(default_factory=set)
    looked_at: set[str] = field(default_factory=set)  # modules whose parameters are used outside of them
    tape: list[tuple[str, tuple[int, ...], Label | None]] = field(default_factory=list)  # operation, shape of its result, label

    def root(self, name: str) -> str:
        while self.root_of[name] != name:
            name = self.root_of[name]
        return name

    def unite(self, one: str, other: str) -> str:
        one, other = self.root(one), self.root(other)
        self.root_of[other] = one
        return one


class Watch(TorchDispatchMode):
    """Follows the labels. With `tp` the layers behave as on one rank and nothing but the tape is written."""

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen = seen
        self.labels: dict[int, Label] = {}
        self.kept: list[Any] = []  # so that ids stay unique
        self.inside = 0
        self.owners = {
            id(p): f"{name}.{key}" if name else key for name, m in seen.model.named_modules() for key, p in m._parameters.items()
        }

    def label(self, tensor: Any) -> Label | None:
        return self.labels.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def put(self, tensor: Tensor, label: Label) -> None:
        self.labels[id(tensor)] = label
        self.kept.append(tensor)
        self.seen.sizes.setdefault(label[0], set()).add(tensor.shape[label[1]])

    def spoil(self, tensors: list[Tensor]) -> None:
        self.seen.spoiled |= {label[0] for tensor in tensors if (label := self.label(tensor))}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside:
            self.note(str(func), func, args, kwargs or {}, result)
        return result

    def note(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        results = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        for tensor in tensors:
            if owner := self.owners.get(id(tensor)):
                self.seen.looked_at.add(owner.rpartition(".")[0])
        labelled = [tensor for tensor in tensors if self.label(tensor)]
        if labelled and results:
            dims = follow(func, args, kwargs, tensors, results, self.label)
            if dims is None or not self.others_are_fixed(tensors, labelled):
                self.spoil(labelled)
            else:
                root = self.seen.root(self.labels[id(labelled[0])][0])
                for tensor in labelled[1:]:
                    root = self.seen.unite(root, self.labels[id(tensor)][0])
                for tensor, dim in zip(results, dims, strict=True):
                    if dim is not None:
                        self.put(tensor, (root, dim))
        self.kept += results
        packet = getattr(func, "overloadpacket", func)
        if packet not in SILENT:
            name = "view" if packet in VIEWS else name
            self.seen.tape += [(name, tuple(tensor.shape), self.label(tensor)) for tensor in results]

    def others_are_fixed(self, tensors: list[Tensor], labelled: list[Tensor]) -> bool:
        """Whatever else goes in must not need a gradient: each rank would have a part of it. Small parameters get theirs summed up."""
        for tensor in tensors:
            if tensor.requires_grad and not self.label(tensor):
                if id(tensor) not in self.owners:
                    return False
                for own in labelled:
                    self.seen.partial.setdefault(self.labels[id(own)][0], set()).add(self.owners[id(tensor)])
        return True


class Functions(TorchFunctionMode):
    """Attention and products of matrices, seen whole: torch would take them apart."""

    def __init__(self, watch: Watch):
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
def forwards(model: nn.Module, wrap: Callable[..., Any]) -> Iterator[None]:
    """All linear layers and embeddings with another forward."""
    modules = {name: module for name, module in model.named_modules() if is_linear(module) or is_embedding(module)}
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
