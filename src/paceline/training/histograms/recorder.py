"""Histograms of every N-th step, on all ranks."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.batch import find_tensors
from paceline.distributed.dtensor import is_dtensor, local_tensor
from paceline.errors import PlanError, SpecError
from paceline.parallel.module_hooks import find_parts
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import read_layout
from paceline.torch_compat import intercept_calls
from paceline.training.histograms.counts import TensorCounts
from paceline.training.setup import PreparedTraining, RankContext
from paceline.training.update_sequence import UpdateSequence

WEIGHTS, GRADIENTS, ACTIVATIONS = "weights", "gradients", "activations"
FOLDER = "histograms"  # below that of the scalars: TensorBoard follows one growing file in a folder


def check_histograms(spec: Spec, plan: ResolvedPlan) -> tuple[str, ...]:
    """Return notes on requested histograms. Raises an Error if they, or a requested graph, are impossible."""
    option = f"histograms={spec.histograms}" if spec.histograms is not None else "graph=true"
    if (spec.histograms is not None or spec.graph) and importlib.util.find_spec("tensorboard") is None:
        raise SpecError(
            f'{option} requires TensorBoard, which is not installed: pip install "paceline[tensorboard]"'
        )
    if spec.histograms is None:
        return ()
    if plan.is_asynchronous:
        raise PlanError(f"plan {plan} has other weights on each rank; leave histograms={spec.histograms} out")
    if plan.tp > 1 or plan.cp > 1:
        return ("there are no histograms of activations, which tp and cp divide over ranks",)
    return ()


class HistogramRecorder:
    """Counts weights, gradients and activations in every N-th step. All ranks call `begin` and `end`.

    first: steps done before the first of this start. That step has no histograms, because it also runs
    passes that prepare the plan.
    """

    def __init__(self, context: RankContext, prepared: PreparedTraining, first: int):
        self.context, self.prepared, self.first = context, prepared, first
        self.every = context.spec.histograms if context.run is not None else None
        self.counts: TensorCounts | None = None
        self._ends: list[Callable[[], None]] = []
        self._writer: Any = None
        if self.every is None:
            return
        self.names = [
            name for name, parameter in prepared.model.named_parameters() if parameter.requires_grad
        ]
        self.blocks = self._find_blocks()

    def _find_blocks(self) -> dict[str, nn.Module]:
        """Return the modules whose outputs are counted: those that run once, on one rank of each batch."""
        if self.context.plan.tp > 1 or self.context.plan.cp > 1:
            return {}
        parts = find_parts(self.prepared.model, read_layout(self.context.task))
        pipeline = self.prepared.step.pipeline
        repeated = pipeline.partition.replicated if pipeline is not None else frozenset()
        return {name: part for name, part in parts.items() if name not in repeated}

    def begin(self, step: int) -> None:
        """Begin a step, after `step` steps."""
        if self.every is None or (step + 1) % self.every or step == self.first:
            return
        kinds = ((WEIGHTS, self.names), (GRADIENTS, self.names), (ACTIVATIONS, self.blocks))
        names = [f"{kind}/{name}" for kind, own in kinds for name in own]
        self.counts = TensorCounts(names, self.context.device)
        update = self.prepared.update
        observed: Any = update if isinstance(update, UpdateSequence) else self.prepared.step
        before = observed.observe
        observed.observe = partial(self._observe, before)
        self._ends.append(partial(setattr, observed, "observe", before))
        for name, block in self.blocks.items():
            self._ends.append(intercept_calls(block, partial(self._call, f"{ACTIVATIONS}/{name}")))

    def end(self, step: int, wall_time: float) -> None:
        """End a step, the `step`-th, and write its histograms. A collective if the step has any."""
        if self.counts is None:
            return
        self.close()
        counts, self.counts = self.counts, None
        histograms = counts.reduce()
        if self.context.world.rank == 0:
            self._write(histograms, step, wall_time)

    def close(self) -> None:
        """Stop observing."""
        while self._ends:
            self._ends.pop()()

    def _call(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        # A pass without gradients, or one that recomputes activations, repeats another one.
        if self.counts is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            for tensor in find_tensors(output):
                if tensor.is_floating_point():
                    self.counts.add(name, local_tensor(tensor) if is_dtensor(tensor) else tensor)
        return output

    def _observe(self, before: Callable[[str, int], None] | None, what: str, step: int) -> None:
        if before is not None:
            before(what, step)
        if self.counts is None or what not in (GRADIENTS, WEIGHTS):
            return
        scale = self.prepared.step.loss_scale
        for parameter, name in self._find_counted():
            tensor: Tensor | None = parameter if what == WEIGHTS else parameter.grad
            if tensor is not None:
                divisor = scale.scale if scale is not None and what == GRADIENTS else 1.0
                self.counts.add(f"{what}/{name}", local_tensor(tensor), divisor)

    def _find_counted(self) -> list[tuple[nn.Parameter, str]]:
        """Return the parameters that this rank counts, as in the norm of the gradient."""
        names = {id(parameter): name for name, parameter in self.prepared.model.named_parameters()}
        update = self.prepared.update
        steps: Sequence[Any] = update.steps if isinstance(update, UpdateSequence) else [self.prepared.step]
        return [(parameter, names[id(parameter)]) for step in steps for parameter in step.norm.counted]

    def _write(self, histograms: Any, step: int, wall_time: float) -> None:
        from paceline.report.scalar_writer import ScalarWriter

        assert self.context.run is not None
        if self._writer is None:
            try:
                self._writer = ScalarWriter(self.context.run.tensorboard / FOLDER)
            except OSError:  # the disk is full, or the folder cannot be written
                return
        self._writer.write_histograms(histograms, step, wall_time)
