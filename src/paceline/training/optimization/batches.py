"""Trainings whose batch grows: what they require of task and plan."""

from paceline.errors import PlanError, SpecError
from paceline.parallel.loss.global_loss import has_global_loss
from paceline.plan.plan import ResolvedPlan, micro_batch_size
from paceline.spec import Spec, StepBatches
from paceline.spec.batch_schedule import list_batches
from paceline.task import Task


def changing_batches(spec: Spec) -> StepBatches | None:
    """Return the batch of each step, or None if all steps have the same."""
    return None if spec.batches.is_constant else spec.batches


def check_batches_end(spec: Spec, steps: int) -> list[str]:
    """Return a note if a training with this number of steps ends before its batch has grown to `batch`."""
    batches = spec.batches
    if batches.first_steps[-1] < steps or batches.is_constant:
        return []
    return [
        f"{_option(spec)} reaches batch {spec.batch} after {batches.first_samples[-1]:,} samples, but the "
        f"training ends after {batches.samples_before(steps):,}, with batch {batches.batch_of(steps - 1)}"
    ]


def _option(spec: Spec) -> str:
    """Return the option by which the batch grows."""
    return "batch_schedule" if spec.batch_schedule is not None else "batch_warmup"


def check_batches(spec: Spec, task: Task, plan: ResolvedPlan) -> None:
    """Raise PlanError or SpecError if a plan cannot divide a batch, or if a task requires one batch."""
    for batch in list_batches(spec.batches):
        micro_batch_size(batch, plan)
    if spec.batches.is_constant:
        return
    option = _option(spec)
    if plan.servers is not None or plan.uneven or plan.pp > 1:  # stages exchange tensors of one shape
        raise PlanError(f"plan {plan} requires one batch; leave {option} out")
    if has_global_loss(task) or type(task).updates is not Task.updates:
        raise SpecError(
            f"{option} requires a loss that is a mean over samples and one optimizer; leave it out"
        )
