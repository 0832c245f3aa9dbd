"""The outcomes of a drill as text for people."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from paceline.drill.run import FaultOutcome
from paceline.units import several

NUMBERS = ("step", "rank", "seen", "again")
WHAT_WIDTH = 12  # minimum number of columns
CHECKS = {  # of a training that ended as expected: cell if right, cell if wrong
    "weights": ("equal", "differ"),
    "samples": ("once", "not so"),
    "left": ("none", "some"),
}


def build_table(outcomes: Sequence[FaultOutcome]) -> Table:
    """Return a row per fault.

    seen: seconds until the run reports the fault; again: until the first step of the next start."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("fault", "step", "rank", "what", "seen", "again", *CHECKS, ""):
        width = {"min_width": WHAT_WIDTH} if name == "what" else {"no_wrap": True}
        table.add_column(name, justify="right" if name in NUMBERS else "left", **width)
    for outcome in outcomes:
        table.add_row(*_build_row(outcome))
    return table


def _build_row(outcome: FaultOutcome) -> list[str]:
    moment = outcome.moment
    cells = [moment.fault.name, str(moment.step), str(moment.rank), escape(outcome.done)]
    if outcome.untried is not None:
        return [*cells, *[""] * (2 + len(CHECKS)), "not tried"]
    cells += [
        f"{seconds:.1f} s" if seconds is not None else "" for seconds in (outcome.noticed_s, outcome.again_s)
    ]
    wrong = {"weights" if check == "losses" else check for check in outcome.wrong}
    cells += [
        _red(if_wrong) if check in wrong else if_right if outcome.starts and outcome.escaped is None else ""
        for check, (if_right, if_wrong) in CHECKS.items()
    ]
    if outcome.escaped is not None:
        return [*cells, "[bold yellow]not found[/]"]
    return [*cells, _red("fails") if outcome.wrong else "[bold green]holds[/]"]


def _red(word: str) -> str:
    return f"[bold red]{word}[/]"


def build_sentences(outcomes: Sequence[FaultOutcome]) -> list[str]:
    """Return a sentence for each failed check, and the reason for each fault that was not tried."""
    failures = [
        f"{outcome.moment.fault.name} at step {outcome.moment.step} on rank {outcome.moment.rank}, "
        f"{check}: {sentence}"
        for outcome in outcomes
        for check, sentence in outcome.wrong.items()
    ]
    reasons = {
        outcome.moment.fault.name: outcome.untried for outcome in outcomes if outcome.untried is not None
    }
    escaped = [
        f"{outcome.moment.fault.name} at step {outcome.moment.step} on rank {outcome.moment.rank} was not "
        f"found, as no other rank computes the same; its effect: {outcome.escaped}"
        for outcome in outcomes
        if outcome.escaped is not None
    ]
    return failures + escaped + [f"{name} was not tried: {reason}" for name, reason in reasons.items()]


def build_summary(outcomes: Sequence[FaultOutcome]) -> str:
    tried = [outcome for outcome in outcomes if outcome.untried is None]
    escaped = sum(outcome.escaped is not None for outcome in tried)
    passed = sum(not outcome.wrong for outcome in tried) - escaped
    summary = f"{passed} of {len(tried)} faults left no trace"
    return f"{summary}, {several(escaped, 'flipped bit')} could not be found" if escaped else summary
