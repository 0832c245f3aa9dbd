"""Which module of a model runs, in the forward or the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class ModuleTracker:
    """Follows the modules of `model` while it is entered. (torch's ModuleTracker leaves a module before its own hooks run, and what
    tensor parallelism sends is sent there.)"""

    def __init__(self, model: nn.Module):
        self.model = model
        self.now: dict[str, None] = {}  # names of modules, in the order in which they were entered
        self.hooks: list[RemovableHandle] = []
        self.resets = False

    def __enter__(self) -> "ModuleTracker":
        for name, module in self.model.named_modules():
            self.hooks.append(
                module.register_forward_pre_hook(self._before(name), prepend=True, with_kwargs=True)
            )
            self.hooks.append(
                module.register_forward_hook(self._after(name), with_kwargs=True, always_call=True)
            )
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    @property
    def in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def innermost(self) -> str | None:
        """`""` is the model itself, None nothing of it."""
        return max(self.now, key=lambda name: (bool(name), name.count("."), name), default=None)

    def _before(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.now[name] = None
            self._at_gradients((args, kwargs), lambda *_: self.now.pop(name, None))

        return enter

    def _after(self, name: str) -> Any:
        def enter_backward(*_: Any) -> None:
            self.now[name] = None
            if not self.resets:  # modules whose inputs need no gradient are left at the end
                self.resets = True
                torch.autograd.Variable._execution_engine.queue_callback(self._reset)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.now.pop(name, None)
            self._at_gradients(output, enter_backward)

        return leave

    def _at_gradients(self, tensors: Any, call: Any) -> None:
        differentiable = [
            leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if differentiable:
            self.hooks.append(register_multi_grad_hook(differentiable, call))

    def _reset(self) -> None:
        self.now.clear()
        self.resets = False
