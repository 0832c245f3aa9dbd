"""What tensor parallelism can split in a model, found by watching one forward pass on the meta device.

The output of each linear layer is labelled as "split along its last dimension", and the labels are followed through the operations
that the model makes of it: elementwise ones keep them, a view moves them to the heads, attention keeps the heads apart. Where
all that becomes of a label ends in the input of other linear layers, the first may be split by columns and the others by rows, with one
sum at the end (Shoeybi et al., Megatron-LM, 2019). Then the pass is made again with the sizes that one rank would see: a forward that
says its sizes itself (`view(B, T, 12, 64)`) would do something else there, and is not split.
"""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.errors import PlanError

Label = tuple[str, int]  # the linear layer that a group is named after, and the dimension that would be split
ATEN = torch.ops.aten
LIKE_ITS_INPUT = {  # beside those that torch tags as elementwise
    ATEN.clone,
    ATEN._to_copy,
    ATEN.detach,
    ATEN.alias,
    ATEN.native_dropout,
    ATEN.bernoulli_,
    ATEN.empty_like,
    ATEN.zeros_like,
    ATEN.ones_like,
    ATEN.lift_fresh,
}
VIEWS = {ATEN.view, ATEN._unsafe_view, ATEN.reshape, ATEN._reshape_alias}
SILENT = {ATEN.detach, ATEN.alias, ATEN.clone}  # come and go with gradients and the layout of memory
ALONG_ONE = {ATEN.slice, ATEN.split, ATEN.split_with_sizes, ATEN._softmax, ATEN._log_softmax}  # (tensor, …, dim): not that one
NORMS = {ATEN.native_layer_norm, ATEN._fused_rms_norm}
ATTENTION = F.scaled_dot_product_attention
PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}


@dataclass(frozen=True)
class Found:
    """Names of modules by what is to be done with them, and names of small parameters that see only a part of the split."""

    columns: frozenset[str]
    rows: frozenset[str]
    heads: frozenset[str]  # what the model returns is split along its last dimension
    called: frozenset[str]  # linear layers and embeddings that are run as modules, and whose parameters nobody else looks at
    partial: frozenset[str]
    notes: tuple[str, ...]


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


def discover(model: nn.Module, run: Callable[[], Any], tp: int) -> Found:
    """`run` calls the model, which is on the meta device. Raises PlanError for heads or hidden sizes that tp does not divide."""
    seen = _watch(model, run)
    rejected: set[str] = set()
    while True:
        columns, rows, groups = _pairs(seen, rejected)
        _check_divisible(seen, columns, tp, groups)
        wrong = _differs(model, run, seen, columns, rows, groups, tp) if columns else None
        if wrong is None:
            break
        rejected |= {root for root in groups if pattern(root) == pattern(wrong)}
    own = sorted({pattern(name) for name, root in seen.root_of.items() if root in rejected})
    notes = (f"tp: {', '.join(own)} cannot be split in pairs, because the forward says their sizes itself",) if own else ()
    partial = frozenset(name for one, names in seen.partial.items() if seen.root(one) in groups for name in names)
    called = frozenset(seen.calls) - seen.looked_at
    return Found(frozenset(columns), frozenset(rows), frozenset(seen.heads - rows), called, partial, notes)


def pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


@dataclass
class _Seen:
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


class _Watch(TorchDispatchMode):
    """Follows the labels. With `tp` the layers behave as on one rank and nothing but the tape is written."""

    def __init__(self, seen: _Seen):
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
            dims = _follow(func, args, kwargs, tensors, results, self.label)
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


class _Functions(TorchFunctionMode):
    """Attention and products of matrices, seen whole: torch would take them apart."""

    def __init__(self, watch: _Watch):
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


def _follow(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor], label: Any) -> list[int | None] | None:
    """The split dimension of each result; None where the operation cannot be done on parts."""
    if func is ATTENTION:
        return _attention(args, kwargs, results, label)
    if func in PRODUCTS:
        return _from_right(tensors, results, label, least=3)
    packet = func.overloadpacket
    first = tensors[0]
    dim = label(first)[1] if label(first) else None
    if packet in VIEWS and dim is not None:
        return _one(_view(tuple(first.shape), tuple(results[0].shape), dim))
    if torch.Tag.pointwise in func.tags or packet in LIKE_ITS_INPUT:
        return _from_right(tensors, results, label, least=1)
    if packet is ATEN.cat:
        along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % first.dim()
        dims = {label(tensor)[1] if label(tensor) else None for tensor in tensors}
        return [dim] if len(dims) == 1 and dim != along else None
    if dim is None:
        return None
    if packet in NORMS:
        ends = first.dim() - len(args[1])
        return [dim if dim < min(ends, result.dim()) else None for result in results] if dim < ends else None
    return _moved(packet, args, kwargs, first, results, dim)


def _moved(packet: Any, args: Any, kwargs: Any, first: Tensor, results: list[Tensor], dim: int) -> list[int | None] | None:
    rank = first.dim()
    if packet is ATEN.transpose:
        one, other = args[1] % rank, args[2] % rank
        return [other if dim == one else one if dim == other else dim]
    if packet is ATEN.t:
        return [1 - dim]
    if packet is ATEN.permute:
        return [[at % rank for at in args[1]].index(dim)]
    if packet is ATEN.unsqueeze:
        return [dim + (dim >= args[1] % (rank + 1))]
    if packet is ATEN.squeeze:
        gone = [at % rank for at in ([args[1]] if isinstance(args[1], int) else args[1])] if len(args) > 1 else range(rank)
        gone = [at for at in gone if first.shape[at] == 1]
        return [dim - sum(at < dim for at in gone)] if dim not in gone else None
    if packet is ATEN.expand:
        return [dim + results[0].dim() - rank]
    if packet in (ATEN.select, ATEN.unbind):
        along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % rank
        return [dim - (along < dim)] * len(results) if along != dim else None
    if packet in ALONG_ONE:
        at = 2 if packet in (ATEN.split, ATEN.split_with_sizes) else 1
        along = (args[at] if len(args) > at else kwargs.get("dim", 0)) % rank
        return [dim] * len(results) if along != dim else None
    if packet in (ATEN.sum, ATEN.mean) and len(args) > 1 and args[1]:
        gone = [at % rank for at in ([args[1]] if isinstance(args[1], int) else args[1])]
        keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        return [dim - (0 if keep else sum(at < dim for at in gone))] if dim not in gone else None
    return None


def _one(dim: int | None) -> list[int | None] | None:
    return None if dim is None else [dim]


def _attention(args: Any, kwargs: Any, results: list[Tensor], label: Any) -> list[int | None] | None:
    """(…, heads, positions, size) of queries, keys and values, all split along the heads."""
    q, k, v = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("query", "key", "value")))
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    split = {label(tensor)[1] - tensor.dim() if label(tensor) else None for tensor in (q, k, v)}
    if split != {-3} or (mask is not None and mask.dim() >= 3 and mask.shape[-3] != 1):
        return None
    return [results[0].dim() - 3]


def _from_right(tensors: list[Tensor], results: list[Tensor], label: Any, least: int) -> list[int | None] | None:
    """Elementwise with broadcasting, from dimension -least on to the left."""
    from_right = {tensor.dim() - label(tensor)[1] for tensor in tensors if label(tensor)}
    if len(from_right) != 1 or (back := from_right.pop()) < least:
        return None
    if any(tensor.dim() >= back and tensor.shape[-back] != 1 for tensor in tensors if not label(tensor)):
        return None
    return [result.dim() - back if result.dim() >= back else None for result in results]


def _view(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Where a dimension goes in a view. It must be the outermost of those that are merged or cut."""
    ahead = math.prod(before[:dim])
    at, product = 0, 1
    while at < len(after) and (product < ahead or (after[at] == 1 and before[dim] != 1)):
        product *= after[at]
        at += 1
    if product != ahead or at == len(after):
        return None
    inner, new = math.prod(before[dim:]), math.prod(after[at:])
    return at if inner == new and (after[at] % before[dim] == 0 or before[dim] % after[at] == 0) else None


def _watch(model: nn.Module, run: Callable[[], Any]) -> _Seen:
    seen = _Seen(model)
    watch = _Watch(seen)

    def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.calls[name] = seen.calls.get(name, 0) + 1
            watch.inside += 1
            y = inner(x, *args, **kwargs)
            watch.inside -= 1
            watch.kept.append(y)
            if is_linear(module):
                label = watch.label(x)
                if label is not None and label[1] != x.dim() - 1:
                    watch.spoil([x])
                seen.inputs.setdefault(name, set()).add(label[0] if label else None)
                seen.root_of.setdefault(name, name)
                watch.put(y, (name, y.dim() - 1))
            return y

        return forward

    with _forwards(model, wrap), _Functions(watch), watch:
        output = run()
    for tensor in tree_leaves(output):
        if label := watch.label(tensor):
            seen.spoiled.add(label[0])
            if label[1] == tensor.dim() - 1:
                seen.heads.add(label[0])
    return seen


@contextlib.contextmanager
def _forwards(model: nn.Module, wrap: Callable[..., Any]) -> Iterator[None]:
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


def _pairs(seen: _Seen, rejected: set[str]) -> tuple[set[str], set[str], set[str]]:
    """Columns, rows, and the names of their groups: those whose every use ends in a row."""
    members: dict[str, list[str]] = {}
    for name in seen.root_of:
        members.setdefault(seen.root(name), []).append(name)
    spoiled = {seen.root(name) for name in seen.spoiled} | rejected
    columns: set[str] = set()
    rows: set[str] = set()
    groups: set[str] = set()
    ends_of = {root: [name for name, given in seen.inputs.items() if root in {seen.root(one) for one in given if one}] for root in members}
    for root in sorted(members, key=lambda root: (len(ends_of[root]), -len(members[root]))):  # a sum costs most: first where there are few
        names, ends = {*members[root]}, {*ends_of[root]}
        alike = all({seen.root(one) if one is not None else None for one in seen.inputs[name]} == {root} for name in ends)
        free = not (names & rows or ends & columns or (names | ends) & seen.looked_at or names & ends)
        if root not in spoiled and ends and alike and free:
            columns |= names
            rows |= ends
            groups.add(root)
    return columns, rows, groups


def _check_divisible(seen: _Seen, columns: set[str], tp: int, groups: set[str]) -> None:
    for name in (name for name in seen.calls if name in columns):
        hidden = features(seen.model.get_submodule(name))[1]
        for size in sorted(seen.sizes[name] | {hidden}):
            if size % tp:
                what = f"{size} heads" if size != hidden else f"{size} features"
                fitting = [str(n) for n in range(2, size + 1) if not any(s % n for s in seen.sizes[name] | {hidden})]
                way_out = f"use tp={' or '.join(fitting[:3])}" if fitting else "use pp or zero3 in place of tp"
                raise PlanError(f"tp={tp} does not divide the {what} of {name}; {way_out}")


def _quiet(record: logging.LogRecord) -> bool:
    return False


def _differs(
    model: nn.Module, run: Callable[[], Any], seen: _Seen, columns: set[str], rows: set[str], groups: set[str], tp: int
) -> str | None:
    """Make the pass as one rank would; the group where it does something else than the whole pass, if there is one."""
    part = _Seen(model)
    watch = _Watch(part)

    def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            watch.inside += 1
            try:
                if name in rows:
                    taken, out = features(module)
                    if x.shape[-1] * tp != taken:
                        raise RuntimeError(f"{name} was given {x.shape[-1]} features")
                    return x.new_empty(*x.shape[:-1], out)
                y = inner(x, *args, **kwargs)
                return y.narrow(-1, 0, y.shape[-1] // tp).clone() if name in columns else y
            finally:
                watch.inside -= 1

        return forward

    def expected(shape: tuple[int, ...], label: Label | None) -> tuple[int, ...]:
        if label is None or seen.root(label[0]) not in groups:
            return shape
        return (*shape[: label[1]], shape[label[1]] // tp, *shape[label[1] + 1 :])

    speaks = logging.getLogger("torch._subclasses.fake_tensor")  # of what fails
    speaks.addFilter(_quiet)
    with (
        contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError),
        _forwards(model, wrap),
        _Functions(watch),
        watch,
        torch.no_grad(),
    ):
        run()
    speaks.removeFilter(_quiet)
    last = next(iter(groups))
    wanted = [(name, expected(shape, label), label) for name, shape, label in seen.tape]
    for at, (name, shape, label) in enumerate(wanted):
        if label is not None and seen.root(label[0]) in groups:
            last = seen.root(label[0])
        if at >= len(part.tape) or part.tape[at][:2] != (name, shape):
            return last
    return None
