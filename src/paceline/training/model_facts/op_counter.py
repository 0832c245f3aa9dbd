"""Counts of a forward pass by block: products, attention, saved tensors, memory traffic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.chunked_loss import CHUNK_ELEMENTS, chunked_cross_entropy, count_chunk_rows
from paceline.distributed.dtensor import storage_id
from paceline.parallel.blocks import find_blocks
from paceline.parallel.op_rules import ATTENTION, attention_inputs
from paceline.parallel.tensor.styles import STYLES
from paceline.plan.model.facts import Attention, Product
from paceline.plan.model.operations import Operation
from paceline.task import Task, read_layout

ATEN = torch.ops.aten
FIRST, LAST = -1, -2  # parts: before the blocks, and after or between them

VIEWS = {
    ATEN.view,
    ATEN._unsafe_view,
    ATEN.reshape,
    ATEN.t,
    ATEN.transpose,
    ATEN.permute,
    ATEN.expand,
    ATEN.unsqueeze,
    ATEN.squeeze,
}
VIEWS |= {
    ATEN.detach,
    ATEN.alias,
    ATEN.slice,
    ATEN.select,
    ATEN.split,
    ATEN.unbind,
    ATEN.split_with_sizes,
    ATEN.chunk,
}
KIND_OF = {
    getattr(ATEN, name): kind
    for kind, names in {
        "function": "gelu silu mish exp log sin cos tanh sigmoid erf "
        "pow sqrt rsqrt softplus elu hardswish _softmax _log_softmax logsumexp",
        "norm": "native_layer_norm native_batch_norm _native_batch_norm_legit "
        "native_group_norm _fused_rms_norm",
        "pool": "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d",
        "gather": "embedding index gather index_select nll_loss_forward nll_loss2d_forward",
        "draw": "bernoulli bernoulli_ native_dropout normal_ uniform_ rand randn rand_like randn_like",
    }.items()
    for name in names.split()
    if hasattr(ATEN, name)
}


@dataclass
class BlockCount:
    """Counts of a block, for all samples together."""

    name: str
    products: list[Product] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    # By memory: the tensor, and whether the loss saves it.
    saved: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)
    moved: float = 0.0  # elements
    kernels: int = 0
    operations: list[Operation] = field(default_factory=list)
    boundary: tuple[int, ...] = ()
    layers: set[str] = field(default_factory=set)


class OpCounter(TorchDispatchMode):
    """Counts the operations of a pass through the blocks of a model."""

    def __init__(self, model: nn.Module, task: Task, styles: Mapping[str, str]):
        super().__init__()
        self.model, self.styles = model, styles
        self.names = {id(module): name for name, module in model.named_modules()}
        units = find_blocks(model, read_layout(task)) or [model]
        self.unit_of = {id(unit): k for k, unit in enumerate(units)}
        self.units = units
        self.parts = {FIRST: BlockCount("first"), LAST: BlockCount("last")} | {
            k: BlockCount(self.names[id(u)] or "model") for k, u in enumerate(units)
        }
        self.owner = {storage_id(p): p for p in (*model.parameters(), *model.buffers())}
        self.used: dict[int, set[int]] = {}  # parameter -> parts that use it
        self.running: list[str] = []
        self.where = "the model"
        self.within: list[int] = []  # running blocks, innermost last
        self.before = FIRST  # the part before the running part
        self.has_begun = self.in_loss = False
        self.product_dims: dict[int, str | None] = {}  # memory of inputs and outputs of products -> split dim
        self.product_outputs: set[int] = set()  # memory of outputs of products
        self.kept: list[Any] = []  # keeps tensors alive, so that no memory is reused
        self.function_depth = 0  # operations inside of a function that counts as one are not counted
        self.chunk_shapes: set[tuple[int, ...]] = set()  # of logits that a chunked cross entropy drops

    def start_loss(self) -> None:
        """Attribute what follows to the loss."""
        self.in_loss = True

    @property
    def at(self) -> int:
        return self.within[-1] if self.within else LAST if self.has_begun else FIRST

    def __enter__(self) -> Self:
        self.hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=False),
        ]
        self.functions = _FunctionCounter(self)
        self.saving = saved_tensors_hooks(self._save, lambda kept: kept)
        self.saving.__enter__()
        super().__enter__()
        self.functions.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.functions.__exit__(*raised)
        super().__exit__(*raised)
        self.saving.__exit__(*raised)
        for hook in self.hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module), "")
        self.running.append(name)
        self.where = name or "the model"
        if id(module) in self.unit_of:
            if not self.within and args and isinstance(args[0], Tensor):
                # The input of this block: operations between blocks may shrink the previous output.
                self.parts[self.before].boundary = tuple(args[0].shape)
            self.within.append(self.unit_of[id(module)])
            self.has_begun = True
        self.parts[self.at].layers.add(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        self.where = (self.running[-1] if self.running else "") or "the model"
        if id(module) in self.unit_of:
            tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            self.before = self.within.pop()
            self.parts[self.before].boundary = tuple(tensor.shape) if tensor is not None else ()

    def _save(self, tensor: Tensor) -> Tensor:
        memory = storage_id(tensor)
        if memory not in self.owner and not any(memory in part.saved for part in self.parts.values()):
            self.parts[self.at].saved[memory] = (tensor.detach(), self.in_loss)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.kept += results
        for tensor in tensors:
            if (memory := storage_id(tensor)) in self.owner:
                self.used.setdefault(memory, set()).add(self.at)
        packet = getattr(func, "overloadpacket", func)
        part = self.parts[self.at]
        if not results or self.function_depth:
            return result
        back = any(tensor.requires_grad for tensor in tensors)
        if packet in VIEWS:
            part.operations.append(Operation("view", 1.0, back))
            return result
        part.kernels += 1
        if product := _find_product(packet, args, results[0]):
            inputs, weight = tensors[:2] if packet is ATEN.convolution else tensors[-2:]
            style, cut = self.add_product(product, inputs, weight)
            self.note_product(tensors, results, cut if style != "gather" else None)
        else:
            moved = sum(tensor.numel() for tensor in (*tensors, *results) if tensor.is_floating_point())
            part.moved += moved
            if packet is ATEN.embedding:  # it reads only as much of the table as it returns
                moved = 2 * results[0].numel()
            part.operations.append(Operation(KIND_OF.get(packet, "move"), float(moved), back))
        return result

    def add_product(
        self, product: Product, inputs: Tensor, weight: Tensor
    ) -> tuple[str | None, Literal["columns", "inner"] | None]:
        """Count a product. Return how tp splits its layer: the style, and the dimension of the product."""
        is_frozen = storage_id(weight) in self.owner and not (
            weight.requires_grad and torch.is_grad_enabled()
        )
        style = self.styles.get(self.running[-1]) if self.running else None
        cut = STYLES[style].product_split if style is not None else None
        self.parts[self.at].products.append(
            replace(product, first=not inputs.requires_grad, frozen=is_frozen, cut=cut)
        )
        return style, cut

    def note_product(self, inputs: list[Tensor], outputs: list[Tensor], cut: str | None) -> None:
        """Note inputs and outputs of a product. `cut`: "inner" splits the inputs, "columns" the outputs."""
        for tensor in inputs:
            memory = storage_id(tensor)
            self.product_dims[memory] = self.product_dims.get(memory) or ("inner" if cut == "inner" else None)
        for tensor in outputs:
            self.product_dims[storage_id(tensor)] = "columns" if cut == "columns" else None
            self.product_outputs.add(storage_id(tensor))


class _FunctionCounter(TorchFunctionMode):
    """Counts each attention, and each chunked cross entropy, as one operation."""

    def __init__(self, counter: OpCounter):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = {ATTENTION: self._count_attention, chunked_cross_entropy: self._count_chunked_loss}.get(func)
        if count is None:
            return func(*args, **kwargs)
        self.counter.function_depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.counter.function_depth -= 1
        count(args, kwargs, result)
        return result

    def _count_chunked_loss(self, args: Any, kwargs: Any, result: Tensor) -> None:
        hidden, weight = args[:2]
        counter, (classes, width) = self.counter, weight.shape
        part, rows = counter.parts[counter.at], result.numel()
        of_chunk = min(rows, count_chunk_rows(classes))
        counter.chunk_shapes |= {(of_chunk, classes), (rows % of_chunk, classes)}
        counter.add_product(Product(rows, classes, width, chunk=CHUNK_ELEMENTS), hidden, weight)
        counter.note_product([hidden], [], None)
        part.kernels += 1
        moved = 2 * rows * classes  # as a softmax of all logits
        part.moved += moved
        part.operations.append(Operation("function", float(moved), hidden.requires_grad))

    def _count_attention(self, args: Any, kwargs: Any, result: Tensor) -> None:
        counter = self.counter
        query, key, value = attention_inputs(args, kwargs)
        causal = bool(kwargs.get("is_causal", len(args) > 5 and args[5]))
        part = counter.parts[counter.at]
        part.kernels += 1
        part.attention.append(
            Attention(
                query.shape[-3],
                query.shape[-2],
                key.shape[-2],
                query.shape[-1],
                causal,
                kv_heads=key.shape[-3],
                masked=_is_masked(query, key, args, kwargs),
            )
        )
        # `part.layers` are the layers that ran before.
        split = "columns" if any(counter.styles.get(layer) == "column" for layer in part.layers) else None
        counter.note_product([query, key, value], [result], None)
        for tensor in (query, key, value, result):
            counter.product_dims[storage_id(tensor)] = split


def _is_masked(query: Tensor, key: Tensor, args: Any, kwargs: Any) -> bool:
    """Return whether attention has dropout, or a mask that cannot be causal.

    A mask of queries and keys that is the same for all samples and heads may be causal; its values are not
    known here.
    """
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if mask is None:
        return bool(dropout)
    return bool(dropout) or mask.requires_grad or mask.numel() != query.shape[-2] * key.shape[-2]


def _find_product(packet: Any, args: Any, result: Tensor) -> Product | None:
    """Return the matrix product that an operation makes, for all samples together; None if it makes none."""
    if packet in (ATEN.addmm, ATEN.mm):
        left, right = args[-2:]
        return Product(left.shape[0], right.shape[1], left.shape[1])
    if packet in (ATEN.bmm, ATEN.baddbmm):
        left, right = args[-2:]
        return Product(left.shape[1] * left.shape[0], right.shape[2], left.shape[2])
    if packet is ATEN.convolution:
        weight = args[1]
        window = math.prod(weight.shape[2:])
        is_transposed = args[6]
        # A transposed convolution has a row for each position of its input.
        positions = args[0] if is_transposed else result
        rows = positions.shape[0] * math.prod(positions.shape[2:])
        columns, inner = (
            (weight.shape[0], weight.shape[1] * window)
            if not is_transposed
            else (weight.shape[1] * window, weight.shape[0])
        )
        return Product(rows, columns, inner, reuse=float(window) / math.prod(args[3]), convolution=True)
    return None
