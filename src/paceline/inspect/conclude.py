"""The end of a training: its findings in a few lines, and its report."""

from collections.abc import Sequence

from paceline.errors import Error
from paceline.run import RunFolder


def conclude(run: RunFolder) -> Sequence[str]:
    """Write the report of a run that ends, and return lines with its most costly findings.

    A mistake in a rule or a full disk must not make a training fail that is complete, so every error becomes
    a line."""
    # Imported late: the first step of a rank does not wait for it.
    from paceline.inspect.find import find
    from paceline.inspect.read_facts import read_facts
    from paceline.inspect.text import format_closing_lines

    try:
        findings = find(read_facts(run))
        lines = format_closing_lines(findings, f"paceline doctor {run.path}")
    except Exception as error:  # of any kind, also of a rule
        return [f"no findings: {type(error).__name__}: {error}"]
    try:
        from paceline.inspect.report.write import write_closing_report

        write_closing_report(run, findings)
    except Error as error:
        lines.append(f"no report: {error}")
    except Exception as error:  # of any kind
        lines.append(f"no report: {type(error).__name__}: {error}")
    return lines
