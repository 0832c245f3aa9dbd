"""A forward pass that works out shapes and computes nothing: to look at a model before it has any memory."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.data.loader import Batch, Samples, batches, check_batch, open_dataset
from paceline.distributed.rng import seeded_rngs
from paceline.errors import PlanError
from paceline.plan.plan import ResolvedPlan, micro_batch_size
from paceline.spec import Spec
from paceline.task import Task
from paceline.user_code import describe_exception


def example(spec: Spec, task: Task, plan: ResolvedPlan, training: Samples | None = None) -> Batch:
    """A micro-batch of one data rank, of the first samples there are. `training`: the split, if it is open."""
    if training is None:
        dataset = open_dataset(task, "train")
        assert dataset is not None
        training = Samples(dataset, "train", spec.seed, torch.float64 if spec.precision == "fp64" else None)
    check_batch(spec.batch, training.count)
    numbers = [number % training.count for number in range(micro_batch_size(spec.batch, plan))]
    with seeded_rngs(spec.seed):
        [batch] = batches(training, [(numbers, numbers)], torch.device("cpu"), 0, 1)
    return batch


@contextlib.contextmanager
def imagined(model: nn.Module) -> Iterator[Callable[[Batch], Batch]]:
    """`model`, which is on the meta device, with tensors that pretend to lie on the CPU. Yields what makes a batch such as well."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}

    def pretend(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            made[id(tensor)] = (
                nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            )
        return made[id(tensor)]

    kept = [
        (of, key, tensor)
        for m in model.modules()
        for of in (m._parameters, m._buffers)
        for key, tensor in of.items()
    ]
    for of, key, tensor in kept:
        if tensor is not None and tensor.is_meta:
            of[key] = pretend(tensor)  # type: ignore[assignment]
    try:
        with mode:
            yield lambda batch: tree_map(
                lambda item: mode.from_tensor(item) if isinstance(item, Tensor) else item, batch
            )
    finally:
        for of, key, tensor in kept:
            of[key] = tensor  # type: ignore[assignment]


def without_values(error: Exception, tells: str, instead: str) -> PlanError:
    """The error of a model that met tensors without values in a pass that `tells` something."""
    return PlanError(
        f"the model cannot be run on tensors without values, which tells {tells} ({describe_exception(error)}); use {instead}"
    )


def is_imagined(tensor: Tensor) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def near(one: Tensor, other: Tensor, rtol: float, equal_nan: bool = False) -> bool:
    """Whether two tensors are the same but for roundoff, by the largest element. Of imagined ones only shapes can tell."""
    if one.shape != other.shape or is_imagined(one) or is_imagined(other):
        return one.shape == other.shape
    scale = float(other.nan_to_num(0, 0, 0).abs().amax()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=rtol * scale, equal_nan=equal_nan)
