"""What came of a drill, for people."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from paceline.drill.run import FaultOutcome

FIGURES = ("step", "rank", "seen", "again")
WHAT = 12  # columns at least
COLUMNS = {  # of what can be wrong in a training that came to its end: good, bad
    "weights": ("equal", "differ"),
    "samples": ("once", "not so"),
    "left": ("none", "some"),
}


def table(outcomes: Sequence[FaultOutcome]) -> Table:
    """A line a fault. seen: seconds until somebody noticed; again: until the first step of the next start."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("fault", "step", "rank", "what", "seen", "again", *COLUMNS, ""):
        wide = {"min_width": WHAT} if name == "what" else {"no_wrap": True}
        shown.add_column(name, justify="right" if name in FIGURES else "left", **wide)
    for one in outcomes:
        shown.add_row(*_row(one))
    return shown


def _row(one: FaultOutcome) -> list[str]:
    begin = [one.moment.fault.name, str(one.moment.step), str(one.moment.rank), escape(one.done)]
    if one.untried is not None:
        return [*begin, *[""] * (2 + len(COLUMNS)), "not tried"]
    seconds = [f"{figure:.1f} s" if figure is not None else "" for figure in (one.noticed_s, one.again_s)]
    wrong = {"weights" if what == "losses" else what for what in one.wrong}
    cells = [
        _red(bad) if what in wrong else good if one.starts else "" for what, (good, bad) in COLUMNS.items()
    ]
    return [*begin, *seconds, *cells, _red("fails") if one.wrong else "[bold green]holds[/]"]


def _red(word: str) -> str:
    return f"[bold red]{word}[/]"


def sentences(outcomes: Sequence[FaultOutcome]) -> list[str]:
    """What failed, and what was not tried, and why."""
    found = [
        f"{one.moment.fault.name} at step {one.moment.step} on rank {one.moment.rank}, {what}: {sentence}"
        for one in outcomes
        for what, sentence in one.wrong.items()
    ]
    reasons = {one.moment.fault.name: one.untried for one in outcomes if one.untried is not None}
    return found + [f"{name} was not tried: {why}" for name, why in reasons.items()]


def closing(outcomes: Sequence[FaultOutcome]) -> str:
    tried = [one for one in outcomes if one.untried is None]
    held = sum(not one.wrong for one in tried)
    return f"{held} of {len(tried)} faults left no trace"
