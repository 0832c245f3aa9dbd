"""What a forward pass does, counted by block: products, attention, what is kept for the backward pass, traffic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.distributed.dtensor import storage_id
from paceline.parallel.blocks import find_blocks
from paceline.parallel.op_rules import ATTENTION, attention_inputs
from paceline.parallel.tensor.styles import STYLES
from paceline.plan.model.facts import Attention, Product
from paceline.plan.model.operations import Operation
from paceline.task import Task, read_layout

ATEN = torch.ops.aten
FIRST, LAST = -1, -2  # what is computed ahead of the blocks, and behind or between them

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
        "function": "gelu silu mish exp log sin cos tanh sigmoid erf pow sqrt rsqrt softplus elu hardswish _softmax _log_softmax logsumexp",
        "norm": "native_layer_norm native_batch_norm _native_batch_norm_legit native_group_norm _fused_rms_norm",
        "pool": "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d",
        "gather": "embedding index gather index_select nll_loss_forward nll_loss2d_forward",
        "draw": "bernoulli bernoulli_ native_dropout normal_ uniform_ rand randn rand_like randn_like",
    }.items()
    for name in names.split()
    if hasattr(ATEN, name)
}


@dataclass
class BlockCount:
    """What is counted of a block, of all samples together."""

    name: str
    products: list[Product] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    saved: dict[int, tuple[Tensor, bool]] = field(
        default_factory=dict
    )  # by memory: the tensor, and whether it is of the loss
    moved: float = 0.0  # elements
    kernels: int = 0
    operations: list[Operation] = field(default_factory=list)
    boundary: tuple[int, ...] = ()
    layers: set[str] = field(default_factory=set)


class OpCounter(TorchDispatchMode):
    """Follows a pass through the blocks of a model."""

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
        self.within: list[int] = []  # blocks that run, the innermost last
        self.before = FIRST  # the part before the one that runs
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
        self.hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=False),
        ]
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
            if not self.within and args and isinstance(args[0], Tensor):
                self.parts[self.before].boundary = tuple(
                    args[0].shape
                )  # what lies between blocks may make it smaller
            self.within.append(self.unit_of[id(module)])
            self.begun = True
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
            self.parts[self.at].saved[memory] = (tensor.detach(), self.of_loss)
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
        if not results or self.whole:
            return result
        back = any(tensor.requires_grad for tensor in tensors)
        if packet in VIEWS:
            part.operations.append(Operation("view", 1.0, back))
            return result
        part.kernels += 1
        if found := _product(packet, args, results[0]):
            found = replace(
                found, first=not tensors[-2 if packet is not ATEN.convolution else 0].requires_grad
            )
            name = self.styles.get(self.running[-1]) if self.running else None
            cut = STYLES[name].product_split if name is not None else None
            part.products.append(replace(found, cut=cut))
            self.touch(tensors, results, cut if name != "gather" else None)
        else:
            moved = sum(tensor.numel() for tensor in (*tensors, *results) if tensor.is_floating_point())
            part.moved += moved
            if packet is ATEN.embedding:  # of the table it reads no more than it gives
                moved = 2 * results[0].numel()
            part.operations.append(Operation(KIND_OF.get(packet, "move"), float(moved), back))
        return result

    def touch(self, taken: list[Tensor], given: list[Tensor], cut: str | None) -> None:
        """These are of the type of products; `cut` is split on its side of the layer."""
        for tensor in taken:
            memory = storage_id(tensor)
            self.made[memory] = self.made.get(memory) or ("inner" if cut == "inner" else None)
        for tensor in given:
            self.made[storage_id(tensor)] = "columns" if cut == "columns" else None
            self.given.add(storage_id(tensor))


class _Attentions(TorchFunctionMode):
    """Attention, seen whole."""

    def __init__(self, counting: OpCounter):
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
        query, key, value = attention_inputs(args, kwargs)
        causal = bool(kwargs.get("is_causal", len(args) > 5 and args[5]))
        part = of.parts[of.at]
        part.kernels += 1
        part.attention.append(
            Attention(
                query.shape[-3],
                query.shape[-2],
                key.shape[-2],
                query.shape[-1],
                causal,
                kv_heads=key.shape[-3],
            )
        )
        split = (
            "columns" if any(of.styles.get(layer) == "column" for layer in part.layers) else None
        )  # those that ran before it
        of.touch([query, key, value], [result], None)
        for tensor in (query, key, value, result):
            of.made[storage_id(tensor)] = split
        return result


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
        small = (
            result if not args[6] else args[0]
        )  # a transposed one has a row for each position of its input
        rows = small.shape[0] * math.prod(small.shape[2:])
        columns, inner = (
            (weight.shape[0], weight.shape[1] * window)
            if not args[6]
            else (weight.shape[1] * window, weight.shape[0])
        )
        return Product(rows, columns, inner, reuse=float(window) / math.prod(args[3]), convolution=True)
    return None
