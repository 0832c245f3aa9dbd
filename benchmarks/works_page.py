"""The page of `works.py`: tables of models and plans, with the reasons of refusals below them."""

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zoo.catalog import CATALOG, ENTRIES

WIDTH = 100
FLOAT64 = 1e-10  # the tolerance of models that compute in float64
HEAD = (
    "`{command}` writes this page. It [verifies](verify.md) each plan on each model: it compares the plan "
    "with one process, for {steps} in float64 over gloo. The models are as small as possible: they have the "
    "layers of the models whose names they have, with few features, random weights and random samples. "
    "`benchmarks/zoo` contains them."
)
SAME = (
    "✓: loss, gradient norm, and all gradients, parameters and buffers equal those of one process to "
    "rounding: to 1e-10, to 1e-4 if the model casts to float32, and to more where one process amplifies "
    "rounding"
)
REFUSED = "a number: the plan is refused; the reason is below the tables"
# Names of classes in reasons, which would make one reason many.
NAMED = re.compile(r"(?<=and )\w+(?= calls no F\.)|(?<=but )\w+(?= has no linear layer)")
OF_TASK = re.compile(r"(?<=global_loss\(\)) of \w+")
WRONG = "✗: the result differs, or the ranks failed"


@dataclass(frozen=True)
class Cell:
    """The result of one plan on one model. outcome: same, refused, differs or failed."""

    model: str  # name in the catalog
    task: str  # reference and fields
    ranks: int
    steps: int
    plan: str
    outcome: str
    reason: str = ""
    difference: float = 0.0  # the largest relative difference
    tolerance: float = 0.0

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.task, self.ranks, self.steps, self.plan

    @property
    def is_wrong(self) -> bool:
        return self.outcome in ("differs", "failed")


def format_page(cells: Sequence[Cell], arguments: Sequence[str]) -> str:
    """Return the page. arguments: of the command that wrote it.

    Models are rows if there are more models than plans, and columns if not.
    """
    models, plans = dict.fromkeys(cell.model for cell in cells), {cell.plan for cell in cells}
    by_model = len(models) > len(plans)
    ranks = sorted({cell.ranks for cell in cells})
    few = sorted({cell.steps for cell in cells})
    command = shlex.join(["python", "benchmarks/works.py", *arguments]) if len(arguments) < 12 else ""
    head = HEAD.format(
        command=command or "python benchmarks/works.py",
        steps=" or ".join(str(steps) for steps in few) + " steps",
    )
    marks = [SAME + _furthest(cells), REFUSED] + [WRONG] * any(cell.is_wrong for cell in cells)
    lines = [f"# {'What works for which model' if by_model else 'All plans on some models'}", ""]
    lines += [*_wrap(head), "", *(line for mark in marks for line in _wrap(mark, "- ")), ""]
    lines += [f"The torch version is {torch.__version__.partition('+')[0]}.", ""]
    if not by_model:
        lines += [f"- *{name}*: {ENTRIES[name].text}" for name in models] + [""]
    for size in ranks:
        lines += [f"## {size} ranks", ""]
        of_size = [cell for cell in cells if cell.ranks == size]
        lines += _tables_by_model(of_size) if by_model else _table_by_plan(of_size)
    return "\n".join(lines).rstrip() + "\n"


def _wrap(text: str, mark: str = "") -> list[str]:
    """Return the lines of a paragraph, or of an item of a list that begins with `mark`."""
    return textwrap.wrap(
        mark + text,
        WIDTH,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _furthest(cells: Sequence[Cell]) -> str:
    """Return the largest differences, by the precision of the models."""
    same = [cell for cell in cells if cell.outcome == "same"]
    parts = [
        f"{max(cell.difference for cell in of_kind):.0e}{name}"
        for name, of_kind in (
            ("", [cell for cell in same if cell.tolerance <= FLOAT64]),
            (" with float32", [cell for cell in same if cell.tolerance > FLOAT64]),
        )
        if of_kind
    ]
    return f"; the largest difference is {' and '.join(parts)}" if parts else ""


class _Reasons:
    """Numbers of reasons, in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, cell: Cell | None) -> str:
        if cell is None:
            return ""
        if cell.outcome == "refused":
            reason = OF_TASK.sub("", NAMED.sub("the model", cell.reason))
            return str(self.numbers.setdefault(reason, len(self.numbers) + 1))
        return "✓" if cell.outcome == "same" else "✗"

    def lines(self) -> list[str]:
        width = len(str(len(self.numbers)))
        items = [_wrap(_escape(text), f"{number:0{width}d}. ") for text, number in self.numbers.items()]
        return [line for item in items for line in item] + [""] * bool(items)


def _escape(text: str) -> str:
    """Return the text for Markdown, as mdformat writes it."""
    return re.sub(r"(?<!\w)_(?=\w)", r"\_", text.replace("*", "\\*"))


def _tables_by_model(cells: Sequence[Cell]) -> list[str]:
    plans = list(dict.fromkeys(cell.plan for cell in cells))
    found = {(cell.model, cell.plan): cell for cell in cells}
    reasons, lines = _Reasons(), []
    for kind, entries in CATALOG.items():
        rows = [
            f"| {entry.name} | {entry.text} | "
            + " | ".join(reasons.mark(found.get((entry.name, plan))) for plan in plans)
            + " |"
            for entry in entries
            if any((entry.name, plan) in found for plan in plans)
        ]
        if rows:
            plan_names = " | ".join(f"`{plan}`" for plan in plans)
            lines += [
                f"### {kind}",
                "",
                f"| model | features | {plan_names} |",
                "| -- | -- |" + " :-: |" * len(plans),
            ]
            lines += [*rows, ""]
    numbered = reasons.lines()
    return [*lines, *(["### Reasons", "", *numbered] if numbered else []), *_wrong(cells)]


def _table_by_plan(cells: Sequence[Cell]) -> list[str]:
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = {(cell.plan, cell.model): cell for cell in cells}
    reasons = _Reasons()
    lines = ["| plan | " + " | ".join(models) + " |", "| -- |" + " :-: |" * len(models)]
    for plan in dict.fromkeys(cell.plan for cell in cells):
        marks = (reasons.mark(found.get((plan, model))) for model in models)
        lines.append(f"| `{plan}` | {' | '.join(marks)} |")
    return [*lines, "", *reasons.lines(), *_wrong(cells)]


def _wrong(cells: Sequence[Cell]) -> list[str]:
    return [
        line
        for cell in cells
        if cell.is_wrong
        for line in (*_wrap(f"✗ {cell.model}, `{cell.plan}`: {cell.reason.partition(chr(10))[0]}"), "")
    ]
