"""What came of a verification, for people."""

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

COLUMNS = {"loss": "of_loss", "norm": "of_norm", "gradients": "of_gradients", "parameters": "of_parameters"}
NO_FACTOR = 1e-3  # of the difference: a factor nearer to 1 does not explain it
SHOWN = 4  # names, before "and so many more"


def conditions(reference: Reference) -> list[str]:
    """What was done to the task so that it can be compared."""
    found = []
    if off := reference.switched_off:
        more = f" and {len(off) - SHOWN} more" if len(off) > SHOWN else ""
        found.append(f"dropout is switched off: {', '.join(off[:SHOWN])}{more}")
    if reference.has_batch_norm:
        found.append(
            "BatchNorm takes its statistics over all ranks, of one micro-batch; the one process runs as many micro-batches"
        )
    if reference.no_float64 is not None:
        found.append(f"float64 cannot be computed ({reference.no_float64.rstrip('.')}): compared in float32")
    elif reference.computes_in != "float64":
        found.append(f"the model computes in {reference.computes_in} inside of float64")
    if reference.is_random:
        found.append(
            "the model draws random numbers all the same, by rank and micro-batch: a difference may come from that alone"
        )
    return found


def table(verdict: Verdict) -> Table:
    """Step by step."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("step", "loss", "norm", *(f"Δ {name}" for name in COLUMNS)):
        shown.add_column(name, justify="right")
    for row in verdict.rows:
        figures = (_shown(getattr(row, of), verdict) for of in COLUMNS.values())
        shown.add_row(str(row.step), f"{row.loss:.6f}", f"{row.norm:.6f}", *figures)
    return shown


def _shown(relative: float, verdict: Verdict) -> str:
    text = "0" if not relative else f"{relative:.1e}"
    return text if relative <= verdict.tolerance or verdict.same else f"[bold red]{text}[/]"


def sentence(verdict: Verdict) -> str:
    """The verdict, without the plan's name."""
    if verdict.cannot_be is not None:
        return f"cannot be: {verdict.cannot_be}"
    if verdict.failed is not None:
        return f"failed: {verdict.failed}"
    one = (
        "one process"
        if verdict.microbatches == 1
        else f"one process with microbatches={verdict.microbatches}"
    )
    if verdict.of_whole is not None and verdict.same:
        one += f" (not as one process on whole batches: its loss differs by {verdict.of_whole:.1e})"
    if verdict.first is None:
        grown = verdict.grown is not None and furthest(verdict) > verdict.tolerance
        return f"the same training as {one}, to {furthest(verdict):.0e}" + (
            ", which rounding grows to in one process, too" if grown else ""
        )
    return f"not the same training as {one}: {told(verdict)}"


def furthest(verdict: Verdict) -> float:
    return max(verdict.furthest(of) for of in COLUMNS.values())


def told(verdict: Verdict) -> str:
    """Which number differs first, when, where, and by what factor."""
    first, axis = verdict.first, verdict.axis
    assert first is not None
    subject = f"the {first.what}{f' {first.name}' if first.what in ('parameter', 'buffer') else f' of {first.name}' if first.name else ''}"
    if verdict.only_on:
        subject += f" on {numbered('rank', verdict.only_on)}"
    when = "before the first step" if first.step == 0 else f"from step {first.step} on"
    if first.structure is not None:
        return f"{subject} {first.structure}, {when}"
    if first.factor is not None and abs(first.factor - 1) < NO_FACTOR * first.relative:  # most elements agree
        return f"{subject} differs in some elements from that of one process {when}, by {first.relative:.2g} of its largest element"
    if not first.uniform or first.factor is None:
        return f"{subject} differs from that of one process {when}, by {first.relative:.2g} of its largest element, and not by one factor"
    if first.factor == 0:
        return f"{subject} is 0 {when}, and with one process it is not"
    by = (
        f"{first.factor:.3f}"
        if abs(first.factor - 1) > 5e-4
        else f"1 {'+' if first.factor > 1 else '-'} {abs(first.factor - 1):.1e}"
    )
    meant = f": {_degree(axis)}" if axis is not None else ""
    return f"{subject} is {by} times that of one process {when}{meant}"


def _degree(axis: str) -> str:
    names = axis.replace("1 / ", "").replace("√", "").replace("ranks", "the number of ranks")
    of = names if names == "the number of ranks" else f"the degree of {names}"
    of = f"the root of {of}" if "√" in axis else of
    return f"one over {of}" if axis.startswith("1 / ") else of


def measure(reference: Reference) -> str:
    return (
        f"Δ: largest difference ÷ largest element of the tensor (at least {FLOOR:g} × that of all tensors); "
        f"same: at most {reference.tolerance:g}"
    )


def reason(verdict: Verdict) -> str:
    """Why a plan cannot be, where its name is said already."""
    return re.sub(r"^plan \S+:? ", "", verdict.cannot_be or "").removesuffix(".")


class Overview:
    """A line a plan, as they come. Where the terminal is too narrow, a plan has a line of its own: its name is never broken."""

    FIGURES = ("loss", "gradients", "parameters")

    def __init__(self, console: Console, plans: Iterable[Plan]):
        self.console = console
        self.plan_width = max([len("plan"), *(len(str(plan)) for plan in plans)])
        figures = [len("differs"), *[len("Δ parameters")] * len(self.FIGURES)]
        self.is_beside = self.plan_width + sum(2 + width for width in figures) <= console.width
        self._print("plan", "", [f"Δ {name}" for name in self.FIGURES], style="bold")

    def add(self, verdict: Verdict) -> None:
        if verdict.cannot_be is not None:
            self._print_wide(str(verdict.plan), f"cannot be: {reason(verdict)}", "dim")
        elif verdict.failed is not None:
            self._print_wide(str(verdict.plan), f"failed: {verdict.failed}", "red")
        else:
            of_gradients = max(verdict.furthest("of_gradients"), verdict.furthest("of_norm"))
            figures = [verdict.furthest("of_loss"), of_gradients, verdict.furthest("of_parameters")]
            self._print(
                str(verdict.plan),
                "same" if verdict.same else "[bold red]differs[/]",
                [_shown(figure, verdict) for figure in figures],
            )
            if verdict.first is not None:
                self._print_wide("", told(verdict), "red")

    def _print(self, plan: str, verdict: str, figures: list[str], style: str = "") -> None:
        row = self._row(plan, style)
        row.add_column(width=len("differs"))
        for _ in figures:
            row.add_column(width=len("Δ parameters"), justify="right")
        row.add_row(plan if self.is_beside else "", verdict, *figures, style=style)
        self.console.print(row)

    def _print_wide(self, plan: str, text: str, style: str) -> None:
        row = self._row(plan, style)
        row.add_column()
        row.add_row(plan if self.is_beside else "", escape(text), style=style)
        self.console.print(row)

    def _row(self, plan: str, style: str) -> Table:
        """A table with a column for the plan, or for the indentation below it."""
        if plan and not self.is_beside:
            self.console.print(plan, style=style, soft_wrap=True, markup=False)
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(width=self.plan_width if self.is_beside else 0)
        return row


def closing(verdicts: list[Verdict]) -> str:
    tried = [verdict for verdict in verdicts if verdict.cannot_be is None]
    same = sum(verdict.same for verdict in tried)
    refused = f"; {len(verdicts) - len(tried)} cannot be" if len(tried) < len(verdicts) else ""
    return f"{same} of {len(tried)} plans are the same training as one process{refused}"
