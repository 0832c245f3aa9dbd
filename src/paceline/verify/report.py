"""Verdicts as text for people."""

import re
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.plan.plan import Plan
from paceline.units import numbered
from paceline.verify.capture import Reference
from paceline.verify.compare import FLOOR
from paceline.verify.run import Verdict

COLUMNS = {
    "loss": "loss_difference",
    "norm": "norm_difference",
    "gradients": "gradient_difference",
    "parameters": "parameter_difference",
}
# A factor whose distance from 1 is below this share of the difference does not explain it.
NO_FACTOR = 1e-3
MAX_NAMES = 4  # before "and N more"


def describe_conditions(reference: Reference) -> list[str]:
    """Return sentences on how the task was changed to compare it, and on the limits of the comparison."""
    sentences = []
    if names := reference.disabled_dropout:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        sentences.append(f"dropout is switched off: {', '.join(names[:MAX_NAMES])}{more}")
    if reference.has_batch_norm:
        sentences.append(
            "BatchNorm computes its statistics over all ranks, for each micro-batch; "
            "the single process runs the same micro-batches"
        )
    if reference.float64_error is not None:
        sentences.append(
            f"float64 cannot be computed ({reference.float64_error.rstrip('.')}): compared in float32"
        )
    elif reference.narrowest_dtype != "float64":
        sentences.append(f"the model casts to {reference.narrowest_dtype} inside of float64")
    if reference.is_random:
        sentences.append(
            "the model draws random numbers without dropout, by rank and micro-batch: "
            "they alone may cause a difference, and plans are equal only in distribution; draws through "
            "the rng of inputs() and loss() are equal (docs/tasks.md)"
        )
    return sentences


def build_table(verdict: Verdict) -> Table:
    """Return a table with a row per step."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("step", "loss", "norm", *(f"Δ {name}" for name in COLUMNS)):
        table.add_column(name, justify="right")
    for row in verdict.rows:
        differences = (_format_difference(getattr(row, name), verdict) for name in COLUMNS.values())
        table.add_row(str(row.step), f"{row.loss:.6f}", f"{row.norm:.6f}", *differences)
    return table


def _format_difference(relative: float, verdict: Verdict) -> str:
    text = "0" if not relative else f"{relative:.1e}"
    return text if relative <= verdict.tolerance or verdict.same else f"[bold red]{text}[/]"


def format_verdict(verdict: Verdict) -> str:
    """Return the verdict as a sentence without the name of the plan."""
    if verdict.cannot_be is not None:
        return f"not possible: {verdict.cannot_be}"
    if verdict.failed is not None:
        return f"failed: {verdict.failed}"
    reference = "one process"
    if verdict.microbatches > 1:
        reference += f" with microbatches={verdict.microbatches}"
    if verdict.whole_batch_difference is not None and verdict.same:
        reference += (
            " (not as one process on whole batches: "
            f"its loss differs by {verdict.whole_batch_difference:.1e})"
        )
    if verdict.first is not None:
        return f"not the same training as {reference}: {describe_difference(verdict)}"
    largest = max_difference(verdict)
    is_amplified = verdict.amplified is not None and largest > verdict.tolerance
    rounding = ", to which one process amplifies rounding too" if is_amplified else ""
    return f"the same training as {reference}, to {largest:.0e}{rounding}"


def max_difference(verdict: Verdict) -> float:
    """Return the largest relative difference of all steps and columns."""
    return max(verdict.max_difference(name) for name in COLUMNS.values())


def describe_difference(verdict: Verdict) -> str:
    """Return which number differs first, in which step, on which ranks, and by what factor."""
    first, axis = verdict.first, verdict.axis
    assert first is not None
    subject = f"the {first.what}"
    if first.what in ("parameter", "buffer"):
        subject += f" {first.name}"
    elif first.name:
        subject += f" of {first.name}"
    if verdict.only_on:
        subject += f" on {numbered('rank', verdict.only_on)}"
    when = "before the first step" if first.step == 0 else f"from step {first.step} on"
    if first.structure is not None:
        return f"{subject} {first.structure}, {when}"
    size = f"by {first.relative:.2g} of its largest element"
    if first.factor is not None and abs(first.factor - 1) < NO_FACTOR * first.relative:  # most elements agree
        return f"{subject} differs in some elements from that of one process {when}, {size}"
    if not first.uniform or first.factor is None:
        return f"{subject} differs from that of one process {when}, {size}, and not by one factor"
    if first.factor == 0:
        return f"{subject} is 0 {when}, and with one process it is not"
    factor = f"{first.factor:.3f}"
    if abs(first.factor - 1) <= 5e-4:
        factor = f"1 {'+' if first.factor > 1 else '-'} {abs(first.factor - 1):.1e}"
    degree = f": {_describe_degree(axis)}" if axis is not None else ""
    return f"{subject} is {factor} times that of one process {when}{degree}"


def _describe_degree(axis: str) -> str:
    names = axis.replace("1 / ", "").replace("√", "").replace("ranks", "the number of ranks")
    degree = names if names == "the number of ranks" else f"the degree of {names}"
    degree = f"the root of {degree}" if "√" in axis else degree
    return f"one over {degree}" if axis.startswith("1 / ") else degree


def describe_measure(reference: Reference) -> str:
    """Return a sentence that defines the differences and the tolerance."""
    return (
        f"Δ: largest difference ÷ largest element of the tensor (at least {FLOOR:g} × that of all tensors); "
        f"same: at most {reference.tolerance:g}"
    )


def format_reason(verdict: Verdict) -> str:
    """Return why a plan is not possible, without the name of the plan."""
    return re.sub(r"^plan \S+:? ", "", verdict.cannot_be or "").removesuffix(".")


class Overview:
    """A table that is printed row by row, one row per plan.

    In a narrow terminal, the name of a plan has a line of its own, so that it is never broken."""

    NAMES = ("loss", "gradients", "parameters")

    def __init__(self, console: Console, plans: Iterable[Plan]):
        self.console = console
        self.plan_width = max([len("plan"), *(len(str(plan)) for plan in plans)])
        widths = [len("differs"), *[len("Δ parameters")] * len(self.NAMES)]
        self.fits = self.plan_width + sum(2 + width for width in widths) <= console.width
        self._print("plan", "", [f"Δ {name}" for name in self.NAMES], style="bold")

    def add(self, verdict: Verdict) -> None:
        if verdict.cannot_be is not None:
            self._print_wide(str(verdict.plan), f"not possible: {format_reason(verdict)}", "dim")
        elif verdict.failed is not None:
            self._print_wide(str(verdict.plan), f"failed: {verdict.failed}", "red")
        else:
            gradient_difference = max(
                verdict.max_difference("gradient_difference"), verdict.max_difference("norm_difference")
            )
            differences = [
                verdict.max_difference("loss_difference"),
                gradient_difference,
                verdict.max_difference("parameter_difference"),
            ]
            self._print(
                str(verdict.plan),
                "same" if verdict.same else "[bold red]differs[/]",
                [_format_difference(difference, verdict) for difference in differences],
            )
            if verdict.first is not None:
                self._print_wide("", describe_difference(verdict), "red")

    def _print(self, plan: str, verdict: str, differences: list[str], style: str = "") -> None:
        row = self._row(plan, style)
        row.add_column(width=len("differs"))
        for _ in differences:
            row.add_column(width=len("Δ parameters"), justify="right")
        row.add_row(plan if self.fits else "", verdict, *differences, style=style)
        self.console.print(row)

    def _print_wide(self, plan: str, text: str, style: str) -> None:
        row = self._row(plan, style)
        row.add_column()
        row.add_row(plan if self.fits else "", escape(text), style=style)
        self.console.print(row)

    def _row(self, plan: str, style: str) -> Table:
        """Return a table with a column for the plan, or for the indentation below it."""
        if plan and not self.fits:
            self.console.print(plan, style=style, soft_wrap=True, markup=False)
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(width=self.plan_width if self.fits else 0)
        return row


def build_summary(verdicts: list[Verdict]) -> str:
    possible = [verdict for verdict in verdicts if verdict.cannot_be is None]
    same = sum(verdict.same for verdict in possible)
    count = len(verdicts) - len(possible)
    impossible = f"; {count} are not possible" if count else ""
    return f"{same} of {len(possible)} plans are the same training as one process{impossible}"
