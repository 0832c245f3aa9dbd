"""A replayed step as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.debug.replay import ReplayedStep


def format_step(step: "ReplayedStep") -> "Iterator[RenderableType]":
    """Yield the sentences and the table of gradient norms of a replayed step."""
    origin = f"the checkpoint of step {step.begin}" if step.begin else "the initial weights"
    yield f"step {step.step} on one process, from {origin}"
    yield from step.notes
    for at, indices in enumerate(step.indices, 1):
        which = f" of micro-batch {at}" if len(step.indices) > 1 else ""
        yield f"samples{which}: {' '.join(map(str, indices))}"
    yield from step.findings
    for name, value, of_run in (
        ("loss", step.loss, step.run_loss),
        ("gradient norm", step.grad_norm, step.run_grad_norm),
    ):
        if value is not None:
            yield f"{name}: {value:.9g}" + (f" (in the run: {of_run:.9g})" if of_run is not None else "")
    for name, value in step.losses.items():
        yield f"loss {name}: {value:.9g}"
    yield f"learning rate: {step.lr:.9g}"
    if step.gradients:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("module")
        table.add_column("gradient norm", justify="right")
        table.add_column("not finite", justify="right")
        for entry in step.gradients:
            table.add_row(Text(entry.module or "(model)"), f"{entry.norm:.6g}", str(entry.not_finite or ""))
        yield table
