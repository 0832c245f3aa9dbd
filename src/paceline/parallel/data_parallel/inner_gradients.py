"""Gradients that a task computes itself under `fully_shard`, such as penalties on the gradient of a critic.

torch.autograd.grad in forward() or loss() runs the backward hooks of `fully_shard`. They free the weights of
units, which the backward pass of the step then needs for derivatives of the second order (torch 2.13: the
size of their storage is 0). So from such a call to the end of that backward pass, the units stay gathered.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class InnerGradients:
    """Keeps units gathered while the task differentiates.

    `model` is sharded, and `reshards` says whether its units are freed after their forward pass.
    """

    def __init__(self, model: nn.Module, reshards: bool):
        self.reshards = reshards
        self.units: list[Any] = [module for module in model.modules() if hasattr(module, "reshard")]
        self.root: Any = model
        self.is_of_step = False  # whether the backward pass of a training step runs
        self.is_keeping = False
        for unit in self.units:
            # Before the hook of `fully_shard`, so that the tensors call this object first.
            unit.register_forward_hook(self._watch, prepend=True)
        model.register_forward_pre_hook(lambda module, args: self.end(), prepend=True)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._keep)

    def _keep(self, gradient: Tensor) -> None:
        if self.is_of_step or self.is_keeping:
            return
        self.is_keeping = True
        self._set_reshard(False)
        self.root.set_requires_gradient_sync(False)  # it would send zeros for all parameters

    def begin(self, is_last: bool) -> None:
        """Begin the backward pass of a micro-batch, the last one of a training step or not."""
        self.is_of_step = True
        if self.is_keeping:
            self.root.set_requires_gradient_sync(is_last)

    def end(self) -> None:
        """End the backward pass, and free the units."""
        self.is_of_step = False
        if self.is_keeping:
            self.is_keeping = False
            self._set_reshard(True)
            for unit in self.units:
                unit.reshard()

    def _set_reshard(self, reshards: bool) -> None:
        self.root.set_reshard_after_backward(reshards)
        if self.reshards:
            for unit in self.units:
                if unit is not self.root:
                    unit.set_reshard_after_forward(reshards, recurse=False)
