"""Findings as text and JSON."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from paceline.events import nan_to_null
from paceline.inspect.finding import Finding, Findings
from paceline.units import format_seconds

MAX_AT_END = 2  # findings at the end of a training


def format_findings(result: Findings) -> Iterator[str]:
    """Yield the lines of all findings, of what was checked and of what could not be checked."""
    for finding in result.findings:
        yield format_finding(finding)
        if finding.fix:
            yield f"    fix: {finding.fix}"
    if not result.findings:
        yield "nothing found"
    if result.checked:
        yield f"checked: {', '.join(result.checked)}"
    by_reason = defaultdict(list)
    for what, reason in result.missing.items():
        by_reason[reason].append(what)
    for reason, names in by_reason.items():
        yield f"not checked: {', '.join(names)}: {reason}"
    yield from result.notes


def format_finding(finding: Finding) -> str:
    """Return a finding with its cost in a line: `- 41 % of the time (3.2 h to the end): …`."""
    cost = format_cost(finding.cost_share, finding.lost_s, finding.to_end_s)
    details = "; ".join(filter(None, (cost, "simulated" if finding.simulated else "")))
    return f"- {finding.sentence}" + (f" ({details})" if details else "")


def format_cost(share: float | None, lost_s: float | None, to_end_s: float | None) -> str:
    """Return the cost of a finding: `costs 41% of the time, 3.2 h to the end`; empty if it is unknown."""
    if share is None:
        return ""
    cost = f"costs {share:.0%} of the time"
    if to_end_s:
        return f"{cost}, {_format_hours(to_end_s)} to the end"
    return f"{cost}, {_format_hours(lost_s)} of this run" if lost_s else cost


def _format_hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else format_seconds(seconds)


def format_closing_lines(result: Findings, command: str) -> list[str]:
    """Return a line for each of the most costly findings, for the end of a training."""
    lines = [
        f"finding: {format_finding(finding).removeprefix('- ')}" for finding in result.findings[:MAX_AT_END]
    ]
    more = len(result.findings) - len(lines)
    if lines:
        lines.append(f"{f'{more} more, and how' if more else 'how'} to change it: {command}")
    return lines


def to_json(result: Findings) -> dict[str, Any]:
    """Return the findings as values of JSON."""
    tree: dict[str, Any] = nan_to_null(
        {
            "findings": [vars(finding) for finding in result.findings],
            "checked": list(result.checked),
            "not_checked": dict(result.missing),
            "notes": list(result.notes),
        }
    )
    return tree
