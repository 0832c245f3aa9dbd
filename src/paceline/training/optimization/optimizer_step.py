"""OptimizerStep: a step of an optimizer, in less time for a fused AdamW."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class OptimizerStep:
    """Calls `optimizer.step()`, or computes the same bits in less time.

    torch 2.13: `AdamW.step` collects its tensors in each step, and looks for a profiler, hooks and its
    compiler. For a small model that takes longer than the update. So this class collects the tensors of a
    fused AdamW once. It calls torch's `step` for other optimizers, if there are hooks, and in steps in which
    a parameter has no gradient. Call it without grad mode.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._is_fused_adamw = type(optimizer) is torch.optim.AdamW and all(
            map(_is_fused, optimizer.param_groups)
        )
        # The state whose tensors were collected. A state that is loaded is another object.
        self._state: object = None
        self._groups: list[_GroupTensors] = []

    def __call__(self) -> None:
        optimizer = self.optimizer
        if not self._is_fused_adamw or optimizer.state is not self._state or _is_hooked(optimizer):
            optimizer.step()
            if self._is_fused_adamw:
                self._collect()
            return
        grads = [
            [grad for parameter in tensors.params if (grad := parameter.grad) is not None]
            for tensors in self._groups
        ]
        if [len(group["params"]) for group in optimizer.param_groups] != [
            len(group_grads) for group_grads in grads
        ]:
            optimizer.step()  # a parameter has no gradient, or was added
            return
        for tensors, group_grads in zip(self._groups, grads, strict=True):
            group = tensors.group
            torch._foreach_add_(tensors.steps, 1)
            torch._fused_adamw_(
                tensors.params,
                group_grads,
                tensors.exp_avgs,
                tensors.exp_avg_sqs,
                [],
                tensors.steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _collect(self) -> None:
        """Collect the tensors of all groups. Call after a step of torch, which creates missing state."""
        state = self.optimizer.state
        groups = self.optimizer.param_groups
        if not all(parameter in state for group in groups for parameter in group["params"]):
            return
        self._state = state
        self._groups = [
            _GroupTensors(
                group,
                list(group["params"]),
                *([state[p][key] for p in group["params"]] for key in ("step", "exp_avg", "exp_avg_sq")),
            )
            for group in groups
        ]


@dataclass
class _GroupTensors:
    """The tensors of a parameter group."""

    group: dict[str, Any]
    params: list[Tensor]
    steps: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


def _is_fused(group: Mapping[str, Any]) -> bool:
    """Return whether one kernel call with plain numbers updates this parameter group of AdamW."""
    params = group["params"]
    is_plain = all(type(parameter.data) is Tensor for parameter in params)
    are_numbers = not any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
    options = any(group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
    return (
        group["fused"]
        and is_plain
        and are_numbers
        and not options
        and len({(p.device, p.dtype) for p in params}) == 1
    )


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step has hooks, or `step` is replaced, as torch's schedulers do."""
    return bool(
        _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or "step" in vars(optimizer)
    )
