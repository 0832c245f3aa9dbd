"""The findings of a preflight as text and JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from paceline.preflight.finding import CheckFinding
from paceline.units import several

STYLES = {"passes": "green", "warns": "yellow", "fails": "bold red", "skipped": "dim"}


def build_table(findings: Sequence[CheckFinding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    previous = None
    for finding in findings:
        table.add_row(
            finding.check if finding.check != previous else "",
            Text(finding.verdict, STYLES[finding.verdict]),
            Text(finding.message),
        )
        previous = finding.check
    return table


def build_summary(findings: Sequence[CheckFinding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    if counts["fails"]:
        skipped = f", {counts['skipped']} were skipped" if counts["skipped"] else ""
        return f"the training would fail: {counts['fails']} of {len(findings)} findings are failures{skipped}"
    return "no failure found" + (f"; {several(counts['warns'], 'warning')}" if counts["warns"] else "")


def to_json(findings: Sequence[CheckFinding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=1) + "\n"
