"""Which module of a model is running, in the forward or the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class ModuleTracker:
    """Tracks the running modules of `model` inside a `with` block.

    torch's ModuleTracker leaves a module before the module's own hooks run, and tensor parallelism sends in
    these hooks.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.running: dict[str, None] = {}  # names of modules, in the order in which they were entered
        self.hooks: list[RemovableHandle] = []
        self.reset_queued = False

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
        """Return the name of the innermost running module: `""` is the model itself, None no module."""
        return max(self.running, key=lambda name: (bool(name), name.count("."), name), default=None)

    def _before(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running[name] = None
            self._call_at_gradients((args, kwargs), lambda *_: self.running.pop(name, None))

        return enter

    def _after(self, name: str) -> Any:
        def enter_backward(*_: Any) -> None:
            self.running[name] = None
            if not self.reset_queued:  # modules whose inputs need no gradient are left at the end
                self.reset_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._reset)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.running.pop(name, None)
            self._call_at_gradients(output, enter_backward)

        return leave

    def _call_at_gradients(self, tensors: Any, hook: Any) -> None:
        differentiable = [
            leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if differentiable:
            self.hooks.append(register_multi_grad_hook(differentiable, hook))

    def _reset(self) -> None:
        self.running.clear()
        self.reset_queued = False
