"""Steps whose loss or gradient is not finite: what a run reports, and the error that ends it."""

import math

from paceline.errors import DivergedError
from paceline.events import Noted
from paceline.run import RunFolder
from paceline.training.step.step_metrics import StepMetrics
from paceline.units import several


def describe_skipped(step: int, metrics: StepMetrics) -> Noted:
    """Return the note about a step that changed nothing, by `optimizer.on_nan=skip`."""
    what = f"{_describe(metrics)}, so the update is skipped (optimizer.on_nan=skip)"
    return Noted(step=step, message=f"step {step}: {what}")


def diverged_error(
    step: int, metrics: StepMetrics, skipped: int, last_loss: float | None, run: RunFolder | None
) -> DivergedError:
    """Return the error that ends a training at this step, with the checkpoint to which a user can go back.

    skipped: steps in a row whose loss or gradient was not finite, with this step.
    """
    where = f"at step {step}"
    if skipped > 1:
        where += f", after {several(skipped - 1, 'update')} in a row that were skipped"
    before = (
        f"the last finite loss was {last_loss:.6g}"
        if last_loss is not None
        else "there was no finite loss before"
    )
    steps = run.checkpoints() if run is not None else []
    if steps and run is not None:
        hint = f"go back to step {steps[-1]} with: paceline resume {run.path} --lr SMALLER"
    else:
        hint = (
            "no checkpoint was written yet; try a smaller --lr, --set schedule.warmup=SAMPLES or --clip NORM"
        )
    return DivergedError(f"{_describe(metrics)} {where}; {before}; {hint}")


def _describe(metrics: StepMetrics) -> str:
    if not math.isfinite(metrics.loss):
        return f"the loss is {metrics.loss}"
    return f"the norm of the gradient is {metrics.grad_norm}"
