"""Sizes of the whole outputs of blocks, where tensor or context parallelism may divide them over ranks."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from paceline.batch import find_tensors, map_tensors
from paceline.data.fake import example_batch, fake_parameters
from paceline.data.samples import Batch, Samples
from paceline.distributed.rng import seeded_rngs
from paceline.errors import Error
from paceline.parallel.loss.forward import forward
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.model_facts.model_analysis import build_meta_model
from paceline.user_code import describe_exception

# Elements of the tensors that each call of a block returns, by its name, in the order of calls.
OutputSizes = dict[str, list[list[int]]]


class WholeSizes:
    """Finds the sizes by a forward pass of the undivided model that computes only shapes.

    training: the training split. Raises Error if the model cannot run on tensors without values.
    """

    def __init__(
        self, spec: Spec, task: Task, plan: ResolvedPlan, training: Samples, blocks: Collection[str]
    ):
        self._seed, self._task, self._blocks = spec.seed, task, blocks
        self._known: dict[Any, OutputSizes] = {}  # by the shapes of a batch
        with seeded_rngs(spec.seed):
            self._model = build_meta_model(spec, task).model
            batch = example_batch(spec, task, plan, training)
        self.find(batch)

    def find(self, batch: Batch) -> OutputSizes:
        """Return the sizes for a micro-batch. Raises Error as above."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in find_tensors(batch))
        if shapes not in self._known:
            try:
                self._known[shapes] = self._run(map_tensors(torch.Tensor.cpu, batch))
            except (RuntimeError, TypeError, ValueError) as error:  # the model's code fails without values
                raise Error(describe_exception(error)) from error
        return self._known[shapes]

    def _run(self, batch: Batch) -> OutputSizes:
        sizes: OutputSizes = {name: [] for name in self._blocks}

        def observe(name: str) -> Any:
            def add(module: nn.Module, args: Any, output: Any) -> None:
                sizes[name].append([tensor.numel() for tensor in find_floats(output)])

            return add

        hooks = [self._model.get_submodule(name).register_forward_hook(observe(name)) for name in sizes]
        try:
            with seeded_rngs(self._seed), fake_parameters(self._model) as make_fake:
                forward(self._task, self._model, make_fake(batch))
        finally:
            for hook in hooks:
                hook.remove()
        return sizes


def find_floats(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output whose values are counted."""
    return [tensor for tensor in find_tensors(output) if tensor.is_floating_point()]
