"""Histograms of every N-th step, on all ranks."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.samples import Batch, Samples
from paceline.distributed.dtensor import is_dtensor, local_tensor
from paceline.errors import Error, PlanError, SpecError
from paceline.parallel.module_hooks import find_parts
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import read_layout
from paceline.torch_compat import intercept_calls
from paceline.training.histograms.counts import TensorCounts
from paceline.training.histograms.whole_sizes import WholeSizes, find_floats
from paceline.training.prepared import PreparedTraining, RankContext
from paceline.training.step.update_sequence import UpdateSequence

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
    if not _can_count_activations(plan):
        return ("there are no histograms of activations, which more than one of pp, tp and cp divide",)
    return ()


def _divides_activations(plan: ResolvedPlan) -> bool:
    """Return whether blocks may have a part of their output on each of several ranks."""
    return plan.tp > 1 or plan.cp > 1


def _can_count_activations(plan: ResolvedPlan) -> bool:
    return not _divides_activations(plan) or sum(degree > 1 for degree in (plan.pp, plan.tp, plan.cp)) == 1


class HistogramRecorder:
    """Counts weights, gradients and activations in every N-th step. All ranks call `begin` and `end`.

    first: steps done before the first of this start. That step has no histograms, because it also runs
    passes that prepare the plan. training: the training split. notes: what is left out, and why.
    """

    def __init__(self, context: RankContext, prepared: PreparedTraining, first: int, training: Samples):
        self.context, self.prepared, self.first = context, prepared, first
        self.every = context.spec.histograms if context.run is not None else None
        self.counts: TensorCounts | None = None
        self._ends: list[Callable[[], None]] = []
        self._writer: Any = None
        self.notes: tuple[str, ...] = ()
        self._sizes: WholeSizes | None = None
        self._expected: dict[str, list[list[int]]] = {}  # sizes of the calls of this step that remain
        if self.every is None:
            return
        self.names = [
            name for name, parameter in prepared.model.named_parameters() if parameter.requires_grad
        ]
        self.blocks = self._find_blocks()
        if self.blocks and _divides_activations(context.plan):
            try:
                self._sizes = WholeSizes(context.spec, context.task, context.plan, training, self.blocks)
            except Error as error:
                self.blocks = {}
                self.notes = (f"there are no histograms of activations: {error}",)

    def _find_blocks(self) -> dict[str, nn.Module]:
        """Return the modules whose outputs are counted: those that run once, on one rank of each batch."""
        plan = self.context.plan
        if not _can_count_activations(plan):
            return {}
        if _divides_activations(plan) and isinstance(self.prepared.update, UpdateSequence):
            self.notes = (
                f"there are no histograms of activations under {plan}: the task has several updates",
            )
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

    def expect(self, micro_batches: Sequence[Batch]) -> None:
        """Prepare for the forward passes of the micro-batches of the step that has begun."""
        if self.counts is None or self._sizes is None:
            return
        self._expected = {name: [] for name in self.blocks}
        for batch in micro_batches:
            try:
                sizes = self._sizes.find(batch)
            except Error:  # unlike the first batch; calls without an expected size are not counted
                continue
            for name, calls in sizes.items():
                self._expected[name] += calls

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
            tensors = [
                local_tensor(tensor) if is_dtensor(tensor) else tensor for tensor in find_floats(output)
            ]
            if self._sizes is None:
                for tensor in tensors:
                    self.counts.add(name, tensor)
            else:
                self._add_parts(self.counts, name, tensors)
        return output

    def _add_parts(self, counts: TensorCounts, name: str, tensors: Sequence[Tensor]) -> None:
        """Count tensors that are whole on each rank of the tensor or context axis once, and parts on all."""
        expected = self._expected.get(name.partition("/")[2])
        sizes = expected.pop(0) if expected else []
        if len(sizes) != len(tensors) or any(
            tensor.numel() > size for tensor, size in zip(tensors, sizes, strict=True)
        ):
            counts.discard(name)
            return
        place = self.context.plan.place(self.context.world.rank)
        is_first = place.tp == 0 and place.cp == 0
        for tensor, size in zip(tensors, sizes, strict=True):
            if is_first or tensor.numel() < size:
                counts.add(name, tensor)

    def _observe(self, before: Callable[[str, int], None] | None, what: str, step: int) -> None:
        if before is not None:
            before(what, step)
        if self.counts is None or what not in (GRADIENTS, WEIGHTS):
            return
        divisor = self.prepared.step.gradient_scale if what == GRADIENTS else 1.0
        found = ((name, own if what == WEIGHTS else own.grad) for own, name in self._find_counted())
        self.counts.add_all(
            ((f"{what}/{name}", local_tensor(tensor)) for name, tensor in found if tensor is not None),
            divisor,
        )

    def _find_counted(self) -> list[tuple[nn.Parameter, str]]:
        """Return the parameters that this rank counts, as in the norm of the gradient."""
        names = {id(parameter): name for name, parameter in self.prepared.model.named_parameters()}
        update = self.prepared.update
        steps: Sequence[Any] = update.steps if isinstance(update, UpdateSequence) else [self.prepared.step]
        return [(parameter, names[id(parameter)]) for step in steps for parameter in step.norm.counted]

    def _write(self, histograms: Any, step: int, wall_time: float) -> None:
        from paceline.report.tensorboard.scalar_writer import ScalarWriter

        assert self.context.run is not None
        if self._writer is None:
            try:
                self._writer = ScalarWriter(self.context.run.tensorboard / FOLDER)
            except OSError:  # the disk is full, or the folder cannot be written
                return
        self._writer.write_histograms(histograms, step, wall_time)
