"""Traces of the passes of a pipeline, by mode and by the shapes of a batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.batch import find_leaves
from paceline.data.samples import Batch
from paceline.errors import PlanError
from paceline.parallel.pipeline.forward_trace import ForwardTrace
from paceline.parallel.pipeline.stage import StagePartition
from paceline.parallel.pipeline.stand_in_model import StandInModel
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.parallel.tensor.apply import Splits

Signature = tuple[Any, ...]  # of each leaf of the inputs: shape and dtype of a tensor, else the type


@dataclass(frozen=True)
class TracedModel:
    """A model on the meta device, and the trace of a training step."""

    task: Task
    model: nn.Module
    stand_in: StandInModel  # a copy of the model, for more traces
    trace: ForwardTrace  # of a training step with `example`
    example: Batch
    precision: str
    splits: "Splits | None" = None  # of tensor parallelism

    def find_parameters_with_grad(self) -> frozenset[str] | None:
        """Return the names of the parameters that get gradients in a plain pass; None if unknown."""
        return self.stand_in.find_parameters_with_grad(self.task, self.example, self.precision)


class PassTraces:
    """The traces of a model, which are made when a batch of new shapes comes."""

    def __init__(self, traced: TracedModel, partition: StagePartition):
        self.traced, self.partition = traced, partition
        self.step_signature = batch_signature(traced.task, traced.example)
        self.traces: dict[tuple[bool, Signature], ForwardTrace] = {(True, self.step_signature): traced.trace}

    @property
    def step_trace(self) -> ForwardTrace:
        """The trace of a training step."""
        return self.traces[True, self.step_signature]

    def key(self, training: bool, batch: Batch) -> tuple[bool, Signature]:
        return training, batch_signature(self.traced.task, batch)

    def find(self, training: bool, batch: Batch) -> ForwardTrace:
        """Return the trace of a pass with a batch of these shapes."""
        key = self.key(training, batch)
        if key not in self.traces:
            self.traces[key] = self.make(training, batch)
        return self.traces[key]

    def make(self, training: bool, batch: Batch) -> ForwardTrace:
        """Trace a pass. Raise PlanError if the stages do not fit it."""
        traced = self.traced
        trace = traced.stand_in.trace(traced.task, batch, traced.precision, training)
        if tuple(call.part for call in trace.calls) != self.partition.calls:
            raise PlanError(
                "the model calls other parts in evaluation than in training, where the pipeline is cut; "
                "use a plan without pp"
            )
        changed = {
            name
            for name, use in trace.buffers.items()
            if use.changed and len(self.partition.holders[name]) > 1
        }
        if unexpected := sorted(changed - self.partition.changed_buffers):
            raise PlanError(
                f"the model changes buffer {unexpected[0]} in evaluation, and not in training; "
                "use a plan without pp"
            )
        return trace

    def check_shapes(self, batch: Batch) -> None:
        """Raise PlanError if a micro-batch of a training step has other shapes than the example."""
        if (signature := batch_signature(self.traced.task, batch)) != self.step_signature:
            raise PlanError(
                f"a pipeline requires micro-batches of one shape, {_format_shapes(self.step_signature)}, "
                f"got {_format_shapes(signature)}; use a plan without pp"
            )


def batch_signature(task: Task, batch: Batch) -> Signature:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in find_leaves(task.inputs(batch))
    )


def _format_shapes(signature: Signature) -> str:
    return " and ".join(str(leaf[0]) for leaf in signature if isinstance(leaf, tuple))
