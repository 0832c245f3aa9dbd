"""Bytes of live tensors in a forward and backward pass, by the block that runs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.distributed.dtensor import storage_id


@dataclass
class LiveMemory:
    """Bytes of a block, for all samples together, without weights and their gradients.

    Both numbers are on top of what earlier blocks keep.
    """

    kept: int = 0  # from the end of its forward pass to its backward pass
    most: int = 0  # at its peak


class LiveMemoryTracer(TorchDispatchMode):
    """Traces a forward and backward pass inside a `with` block.

    `units`: the blocks of the model in order. dropped: shapes of tensors that are not counted. Tensors may be
    without values.
    """

    def __init__(self, model: nn.Module, units: list[nn.Module], dropped: Collection[tuple[int, ...]] = ()):
        super().__init__()
        self.dropped = dropped
        self.model, self.units = model, units
        self.shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self.bytes: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage
        self.live = 0
        # Live bytes when the forward pass of a block begins; first and last: of what is outside of blocks.
        self.before = [0] * (len(units) + 2)
        self.most = [0] * (len(units) + 2)
        self.at = 0

    def results(self) -> tuple[LiveMemory, list[LiveMemory], LiveMemory]:
        """Return the memory before the blocks, of each block, and after them."""
        ends = [*self.before[1:], self.before[-1]]
        parts = [
            LiveMemory(max(0, end - begin), max(0, most - begin))
            for begin, end, most in zip(self.before, ends, self.most, strict=True)
        ]
        return parts[0], parts[1:-1], parts[-1]

    def _begin(self, at: int) -> None:
        self._drop_freed()
        if at > self.at:
            self.before[at] = self.live
        self.at = at
        self.most[at] = max(self.most[at], self.live)

    def __enter__(self) -> Self:
        self.hooks: list[Any] = []
        for at, unit in enumerate(self.units, start=1):
            self.hooks.append(unit.register_forward_pre_hook(self._make_pre_hook(at)))
            self.hooks.append(unit.register_forward_hook(self._make_hook(at)))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self.hooks:
            hook.remove()

    def _make_pre_hook(self, at: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._begin_at_gradient(args, at - 1)
            self._begin(at)

        return enter

    def _make_hook(self, at: int) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._begin_at_gradient(output, at)
            self._begin(at + 1)

        return leave

    def _begin_at_gradient(self, tree: Any, at: int) -> None:
        """Begin the backward pass of a block when the gradient of its output is computed."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._begin(at))

    def _drop_freed(self) -> None:
        for key in [key for key, (storage, _) in self.bytes.items() if storage.expired()]:
            self.live -= self.bytes.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._drop_freed()
        inputs = {storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and (memory := storage_id(leaf)) not in self.bytes
                and memory not in inputs
            ):
                if self._is_weight_gradient(leaf) or tuple(leaf.shape) in self.dropped:
                    continue
                storage = leaf.untyped_storage()
                self.bytes[memory] = StorageWeakRef(storage), storage.nbytes()
                self.live += storage.nbytes()
        self.most[self.at] = max(self.most[self.at], self.live)
        return result

    def _is_weight_gradient(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has the shape of a weight, in the backward pass."""
        return (
            torch._C._current_graph_task_id() != -1
            and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & self.shapes != set()
        )


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def measure_live_memory(
    model: nn.Module,
    units: list[nn.Module],
    run: Callable[[], Tensor],
    dropped: Collection[tuple[int, ...]] = (),
) -> tuple[LiveMemory, list[LiveMemory], LiveMemory]:
    """Return the live memory before the blocks, of each block, and after them.

    `run` makes a forward pass, and returns the loss. dropped: shapes of tensors that are not counted.
    """
    tracer = LiveMemoryTracer(model, units, dropped)
    with tracer, torch.enable_grad():
        run().sum().backward()
    return tracer.results()
