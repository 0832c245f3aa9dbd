"""Fake tensors: a forward pass that computes only shapes, to analyze a model before it has any memory."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from paceline.batch import map_tensors
from paceline.data.loader import batches
from paceline.data.open_samples import check_batch, open_training_samples
from paceline.data.samples import Batch, Samples
from paceline.distributed.rng import seeded_rngs
from paceline.errors import PlanError
from paceline.plan.plan import ResolvedPlan, micro_batch_size
from paceline.spec import Spec
from paceline.task import Task
from paceline.user_code import describe_exception


def example_batch(spec: Spec, task: Task, plan: ResolvedPlan, training: Samples | None = None) -> Batch:
    """Return a micro-batch of one data rank, from the first training samples. Raises DataError.

    training: the training split, if it is open already.
    """
    if training is None:
        training = open_training_samples(task, spec, plan)
    check_batch(spec.batch, training.count)
    numbers = [number % training.count for number in range(micro_batch_size(spec.batch, plan))]
    with seeded_rngs(spec.seed):
        [batch] = batches(training, [(numbers, numbers)], torch.device("cpu"), 0, 1)
    return batch


@contextlib.contextmanager
def fake_parameters(model: nn.Module) -> Iterator[Callable[[Batch], Batch]]:
    """Replace the meta tensors of `model` by fake CPU tensors in the context.

    Yields a function that returns the fake copy of a batch.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            with mode:
                new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            fakes[id(tensor)] = (
                nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            )
        return fakes[id(tensor)]

    originals = [
        (tensors, key, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
    ]
    for tensors, key, tensor in originals:
        if tensor is not None and tensor.is_meta:
            tensors[key] = fake(tensor)  # type: ignore[assignment]
    try:
        with mode:
            yield lambda batch: map_tensors(mode.from_tensor, batch)
    finally:
        for tensors, key, tensor in originals:
            tensors[key] = tensor  # type: ignore[assignment]


def fake_pass_error(error: Exception, purpose: str, instead: str) -> PlanError:
    """Return the error of a model whose forward pass on fake tensors failed.

    purpose: what the pass determines. instead: the plan or option to use.
    """
    return PlanError(
        f"the model cannot run on tensors without values, which determines {purpose}"
        f" ({describe_exception(error)}); use {instead}"
    )


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is fake, so that it has no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_close(actual: Tensor, expected: Tensor, rtol: float, equal_nan: bool = False) -> bool:
    """Return whether two tensors are equal up to roundoff, relative to the largest element of `expected`.

    Of fake tensors only the shapes are compared.
    """
    if actual.shape != expected.shape or is_fake(actual) or is_fake(expected):
        return actual.shape == expected.shape
    actual, expected = actual.detach(), expected.detach()  # a forward pass may enable gradients itself
    scale = float(expected.nan_to_num(0, 0, 0).abs().amax()) if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=0, atol=rtol * scale, equal_nan=equal_nan)
