"""What a preflight found, as text and JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from paceline.preflight.finding import Finding
from paceline.units import several

STYLES = {"passes": "green", "warns": "yellow", "fails": "bold red", "skipped": "dim"}


def table(found: Sequence[Finding]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(no_wrap=True, style="bold")
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    before = None
    for one in found:
        shown.add_row(
            one.check if one.check != before else "",
            Text(one.verdict, STYLES[one.verdict]),
            Text(one.message),
        )
        before = one.check
    return shown


def verdict(found: Sequence[Finding]) -> str:
    count = Counter(one.verdict for one in found)
    if count["fails"]:
        skipped = f", and {count['skipped']} could not be looked at" if count["skipped"] else ""
        return f"it would fail: {count['fails']} of {len(found)} findings say why{skipped}"
    return "nothing speaks against it" + (f"; {several(count['warns'], 'warning')}" if count["warns"] else "")


def as_json(found: Sequence[Finding]) -> str:
    return json.dumps([asdict(one) for one in found], indent=1) + "\n"
