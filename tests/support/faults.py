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
from paceline.training.optimizer import GradientNorm, _tensor_norms, combine_norms, local_gradients, scale_
from paceline.training.step import TrainingStep


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, by: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, attribute)
    setattr(owner, attribute, by(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def _scale_gradients(factor: Callable[[TrainingStep], float]) -> Any:
    def by(original: Any) -> Any:
        def backward(self: TrainingStep, *args: Any) -> Any:
            result = original(self, *args)
            scale_(self.params, factor(self))
            return result

        return backward

    return replaced(TrainingStep, "backward", by)


def gradient_times_data_ranks() -> Any:
    """Summed over the data ranks where it should be averaged."""
    return _scale_gradients(lambda step: step.data_ranks)


def gradient_over_data_ranks() -> Any:
    return _scale_gradients(lambda step: 1 / step.data_ranks)


def gradient_times_microbatches() -> Any:
    return _scale_gradients(lambda step: step.plan.microbatches)


def gradient_doubled_on_last_rank() -> Any:
    return _scale_gradients(lambda step: 2 if dist.get_rank() == dist.get_world_size() - 1 else 1)


def gradient_times_1_001() -> Any:
    """By a part in a thousand."""
    return _scale_gradients(lambda step: 1.001)


def gradient_times_1_000001() -> Any:
    return _scale_gradients(lambda step: 1 + 1e-6)


def weights_times_1_01_on_last_rank() -> Any:
    """Behind the optimizer: each update leaves the weights of the last rank a part in a hundred apart."""

    def by(original: Any) -> Any:
        def update(self: TrainingStep, *args: Any) -> Any:
            result = original(self, *args)
            if dist.get_rank() == dist.get_world_size() - 1:
                _scale_weights_(self.params)
            return result

        return update

    return replaced(TrainingStep, "update", by)


@torch.no_grad()
def _scale_weights_(params: list[nn.Parameter]) -> None:
    for parameter in params:
        local_tensor(parameter).mul_(1.01)


def gradient_times_data_ranks_before_update() -> Any:
    """Only what the norm and the optimizer see."""

    def by(original: Any) -> Any:
        def update(self: TrainingStep, lr_factor: float) -> Any:
            scale_(self.params, self.data_ranks)
            return original(self, lr_factor)

        return update

    return replaced(TrainingStep, "update", by)


def no_sync() -> Any:
    """Gradients stay on the ranks that they come from."""

    def by(original: Any) -> Any:
        def sync_if(self: TrainingStep, last: bool) -> Any:
            if isinstance(self.model, DistributedDataParallel):
                return self.model.no_sync()
            return original(self, False)

        return sync_if

    return replaced(TrainingStep, "_sync_if", by)


def _change_model(change: Callable[[nn.Module], None]) -> Any:
    def by(original: Any) -> Any:
        def parallelize(model: nn.Module, *args: Any) -> Any:
            change(model)
            return original(model, *args)

        return parallelize

    return replaced(setup, "parallelize", by)


def block_dropped() -> Any:
    def change(model: Any) -> None:
        model.blocks[1] = nn.Identity()

    return _change_model(change)


def block_skipped() -> Any:
    """Its parameters are there, and do nothing."""

    def change(model: Any) -> None:
        model.blocks[1].forward = lambda x: x

    return _change_model(change)


def shards_with_equal_seeds() -> Any:
    """Each rank draws its shard itself, from one seed."""

    def by(original: Any) -> Any:
        def cut_like(tensor: Any, whole: Tensor) -> Any:
            cut = original(tensor, whole)
            part = cut.to_local()
            part.copy_(
                torch.randn(part.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            )
            return cut

        return cut_like

    return replaced(deferred_init, "_distribute_like", by)


def norm_of_one_shard() -> Any:
    """Also where the gradient is clipped by it."""

    def here(original: Any) -> Any:
        return lambda self: _tensor_norms(local_gradients(self.params)) if dist.get_rank() == 0 else []

    def whole(original: Any) -> Any:
        return lambda self: combine_norms(_tensor_norms(local_gradients(self.params)), self.device)

    stack = contextlib.ExitStack()
    stack.enter_context(replaced(GradientNorm, "local_norms", here))
    stack.enter_context(replaced(GradientNorm, "global_norm", whole))
    return stack


def replicated_norm_counted_on_each_rank() -> Any:
    """What all ranks hold is counted on each of them."""
    return replaced(
        GradientNorm, "local_norms", lambda original: lambda self: _tensor_norms(local_gradients(self.params))
    )


def zeros_for_missing_gradients() -> Any:
    """A parameter without a gradient is given one of zeros."""

    def by(original: Any) -> Any:
        def backward(self: TrainingStep, *args: Any) -> Any:
            result = original(self, *args)
            for parameter in self.params:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return result

        return backward

    return replaced(TrainingStep, "backward", by)


def _on_rank_1(do: Callable[[], None]) -> Any:
    def by(original: Any) -> Any:
        def update(self: TrainingStep, lr_factor: float) -> Any:
            if dist.get_rank() == 1:
                do()
            return original(self, lr_factor)

        return update

    return replaced(TrainingStep, "update", by)


def hang() -> Any:
    return _on_rank_1(lambda: time.sleep(600))


def die() -> Any:
    return _on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail() -> Any:
    return _on_rank_1(lambda: [][1])
