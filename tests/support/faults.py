"""Faults to inject into a distributed training, as context managers that ranks can import."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.dtensor import local_tensor
from paceline.training import setup
from paceline.training.init import deferred_init
from paceline.training.optimization.gradient_norm import (
    GradientNorm,
    _tensor_norms,
    combine_norms,
    local_gradients,
    scale_,
)
from paceline.training.step.step import TrainingStep


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, patch: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by `patch(original)` inside the context."""
    original = getattr(owner, attribute)
    setattr(owner, attribute, patch(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def _scale_gradients(factor: Callable[[TrainingStep], float]) -> Any:
    def patch(original: Any) -> Any:
        def backward(self: TrainingStep, *args: Any) -> Any:
            result = original(self, *args)
            scale_(self.params, factor(self))
            return result

        return backward

    return replaced(TrainingStep, "backward", patch)


def gradient_times_data_ranks() -> Any:
    """Sum the gradient over the data ranks instead of averaging it."""
    return _scale_gradients(lambda step: step.data_ranks)


def gradient_over_data_ranks() -> Any:
    return _scale_gradients(lambda step: 1 / step.data_ranks)


def gradient_times_microbatches() -> Any:
    return _scale_gradients(lambda step: step.plan.microbatches)


def gradient_doubled_on_last_rank() -> Any:
    return _scale_gradients(lambda step: 2 if dist.get_rank() == dist.get_world_size() - 1 else 1)


def gradient_times_1_001() -> Any:
    """Change the gradient by one part in a thousand."""
    return _scale_gradients(lambda step: 1.001)


def gradient_times_1_000001() -> Any:
    return _scale_gradients(lambda step: 1 + 1e-6)


def weights_times_1_01_on_last_rank() -> Any:
    """After each update, change the weights of the last rank by one part in a hundred."""

    def patch(original: Any) -> Any:
        def update(self: TrainingStep, *args: Any) -> Any:
            result = original(self, *args)
            if dist.get_rank() == dist.get_world_size() - 1:
                _scale_weights_(self.params)
            return result

        return update

    return replaced(TrainingStep, "update", patch)


@torch.no_grad()
def _scale_weights_(params: list[nn.Parameter]) -> None:
    for parameter in params:
        local_tensor(parameter).mul_(1.01)


def gradient_times_data_ranks_before_update() -> Any:
    """Scale the gradient after the backward pass, so that only its norm and the optimizer are affected."""

    def patch(original: Any) -> Any:
        def update(self: TrainingStep, *args: Any) -> Any:
            scale_(self.params, self.data_ranks)
            return original(self, *args)

        return update

    return replaced(TrainingStep, "update", patch)


def no_sync() -> Any:
    """Do not synchronize gradients between ranks."""

    def patch(original: Any) -> Any:
        def sync_if(self: TrainingStep, last: bool) -> Any:
            if isinstance(self.model, DistributedDataParallel):
                return self.model.no_sync()
            return original(self, False)

        return sync_if

    return replaced(TrainingStep, "_sync_if", patch)


def _change_model(change: Callable[[nn.Module], None]) -> Any:
    def patch(original: Any) -> Any:
        def parallelize(model: nn.Module, *args: Any) -> Any:
            change(model)
            return original(model, *args)

        return parallelize

    return replaced(setup, "parallelize", patch)


def block_dropped() -> Any:
    """Replace a block, with its parameters, by the identity."""

    def change(model: Any) -> None:
        model.blocks[1] = nn.Identity()

    return _change_model(change)


def block_skipped() -> Any:
    """Keep the parameters of a block, but do not use them."""

    def change(model: Any) -> None:
        model.blocks[1].forward = lambda x: x

    return _change_model(change)


def shards_with_equal_seeds() -> Any:
    """Draw the shard of each rank from the same seed."""

    def patch(original: Any) -> Any:
        def distribute_like(tensor: Any, whole: Tensor) -> Any:
            sharded = original(tensor, whole)
            local = sharded.to_local()
            local.copy_(
                torch.randn(local.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            )
            return sharded

        return distribute_like

    return replaced(deferred_init, "_distribute_like", patch)


def norm_of_one_shard() -> Any:
    """Use the norm of the shard of each rank, also for clipping."""

    def patch_local(original: Any) -> Any:
        return lambda self: _tensor_norms(local_gradients(self.params)) if dist.get_rank() == 0 else []

    def patch_global(original: Any) -> Any:
        return lambda self: combine_norms(_tensor_norms(local_gradients(self.params)), self.device)

    stack = contextlib.ExitStack()
    stack.enter_context(replaced(GradientNorm, "local_norms", patch_local))
    stack.enter_context(replaced(GradientNorm, "global_norm", patch_global))
    return stack


def replicated_norm_counted_on_each_rank() -> Any:
    """Count replicated gradients in the norm once per rank."""
    return replaced(
        GradientNorm, "local_norms", lambda original: lambda self: _tensor_norms(local_gradients(self.params))
    )


def zeros_for_missing_gradients() -> Any:
    """Give parameters without a gradient a gradient of zeros."""

    def patch(original: Any) -> Any:
        def backward(self: TrainingStep, *args: Any) -> Any:
            result = original(self, *args)
            for parameter in self.params:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return result

        return backward

    return replaced(TrainingStep, "backward", patch)


def _before_update_of_rank_1(action: Callable[[], None]) -> Any:
    def patch(original: Any) -> Any:
        def update(self: TrainingStep, *args: Any) -> Any:
            if dist.get_rank() == 1:
                action()
            return original(self, *args)

        return update

    return replaced(TrainingStep, "update", patch)


def hang() -> Any:
    return _before_update_of_rank_1(lambda: time.sleep(600))


def die() -> Any:
    return _before_update_of_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail() -> Any:
    return _before_update_of_rank_1(lambda: [][1])
