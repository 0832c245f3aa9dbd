"""Steps of two small trainings, compared with the sum of their operations, which were measured alone.

In a step, an operation finds its data in memory rather than in a cache, and Python code runs between
operations.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.bench.timer import WALL, Budget, Timing, measure
from paceline.data.fake import example_batch
from paceline.data.samples import Batch
from paceline.parallel.loss.forward import call_loss, call_model
from paceline.plan.cost_model.cpu_compute_time import step_operations_s
from paceline.plan.cost_model.op_times import OpTimeTable
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, load_task
from paceline.training.model_facts.describe import describe

MIN_STEPS = 5


class ReferenceTraining(NamedTuple):
    """A built-in task with its fields, and the samples of a step."""

    task: str
    fields: dict[str, Any]
    batch: int


# A transformer, most of which is products, and a CNN, most of which is the start of small operations.
REFERENCES = (
    ReferenceTraining("text", {"width": 96, "heads": 4, "depth": 2, "context": 96}, 16),
    ReferenceTraining("digits", {"width": 24}, 48),
)


def measure_reference_steps(op_times: OpTimeTable, budget_s: float) -> Iterator[tuple[float, Timing]]:
    """Yield the seconds of a step's operations according to `op_times`, and the time of the step."""
    each_s = budget_s / len(REFERENCES)
    for reference in REFERENCES:
        spec = Spec(task=reference.task, set=reference.fields, batch=reference.batch)
        task = load_task(spec.task, spec.set)
        alone_s = step_operations_s(op_times, describe(spec, task), reference.batch)
        step = _build_step(task, example_batch(spec, task, ResolvedPlan()))
        yield alone_s, measure(step, Budget(each_s * 0.7, each_s * 0.2, min_count=MIN_STEPS), WALL)


def _build_step(task: Task, batch: Batch) -> Callable[[], None]:
    """Return a function that makes a step of a plain training in float32."""
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return partial(_make_step, task, model, optimizer, batch)


def _make_step(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    loss = call_loss(task, call_model(task, model, batch), batch)
    loss.mean().backward()
    gradients: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_norm(gradients)
    optimizer.step()
    optimizer.zero_grad()
