"""How many bytes of tensors live at once in a forward and backward pass, by the block that runs."""

from collections.abc import Callable
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
    """Bytes of a block, of all samples together. kept: from the end of its forward pass to its backward pass, above what the blocks before
    it keep; `most`: at its worst moment, likewise. Weights and their gradients are left out."""

    kept: int = 0
    most: int = 0


class LiveMemoryTracer(TorchDispatchMode):
    """Enter it for a pass through a model and back; `units` are its blocks in order. Tensors may have no values."""

    def __init__(self, model: nn.Module, units: list[nn.Module]):
        super().__init__()
        self.model, self.units = model, units
        self.shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self.bytes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.live = 0
        self.before = [0] * (
            len(units) + 2
        )  # live where a block's forward pass begins; ahead of the blocks, and behind them
        self.most = [0] * (len(units) + 2)
        self.at = 0

    def lived(self) -> tuple[LiveMemory, list[LiveMemory], LiveMemory]:
        """Ahead of the blocks, of each, and behind them."""
        ends = [*self.before[1:], self.before[-1]]
        found = [
            LiveMemory(max(0, end - begin), max(0, most - begin))
            for begin, end, most in zip(self.before, ends, self.most, strict=True)
        ]
        return found[0], found[1:-1], found[-1]

    def _begin(self, at: int) -> None:
        self._count()
        if at > self.at:
            self.before[at] = self.live
        self.at = at
        self.most[at] = max(self.most[at], self.live)

    def __enter__(self) -> Self:
        self.hooks: list[Any] = []
        for at, unit in enumerate(self.units, start=1):
            self.hooks.append(unit.register_forward_pre_hook(self._entering(at)))
            self.hooks.append(unit.register_forward_hook(self._leaving(at)))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(_forget))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self.hooks:
            hook.remove()

    def _entering(self, at: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._on_gradient(args, at - 1)
            self._begin(at)

        return enter

    def _leaving(self, at: int) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._on_gradient(output, at)
            self._begin(at + 1)

        return leave

    def _on_gradient(self, tree: Any, at: int) -> None:
        """When the gradient of a block's output is there, its backward pass begins."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._begin(at))

    def _count(self) -> None:
        for key in [key for key, (storage, _) in self.bytes.items() if storage.expired()]:
            self.live -= self.bytes.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count()
        given = {storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and (memory := storage_id(leaf)) not in self.bytes
                and memory not in given
            ):
                if self._is_of_weights(leaf):
                    continue
                storage = leaf.untyped_storage()
                self.bytes[memory] = StorageWeakRef(storage), storage.nbytes()
                self.live += storage.nbytes()
        self.most[self.at] = max(self.most[self.at], self.live)
        return result

    def _is_of_weights(self, made: Tensor) -> bool:
        """In the backward pass, whether it looks like a weight's gradient."""
        return (
            torch._C._current_graph_task_id() != -1
            and {tuple(made.shape), tuple(made.shape[::-1])} & self.shapes != set()
        )


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def lived(
    model: nn.Module, units: list[nn.Module], run: Callable[[], Tensor]
) -> tuple[LiveMemory, list[LiveMemory], LiveMemory]:
    """`run` returns the loss of a pass forward."""
    watch = LiveMemoryTracer(model, units)
    with watch, torch.enable_grad():
        run().sum().backward()
    return watch.lived()
