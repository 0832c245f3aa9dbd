"""The findings at the end of a training, in a few lines."""

from collections.abc import Sequence

from paceline.run import RunFolder


def conclude(run: RunFolder) -> Sequence[str]:
    """Return lines with the most costly findings of a run that ends; none if there is nothing to report.

    A mistake in a rule must not make a training fail that is complete, so every error becomes a line."""
    # Imported late: the first step of a rank does not wait for it.
    from paceline.inspect.find import find
    from paceline.inspect.read_facts import read_facts
    from paceline.inspect.text import format_closing_lines

    try:
        return format_closing_lines(find(read_facts(run)), f"paceline doctor {run.path}")
    except Exception as error:  # of any kind, also of a rule
        return [f"no findings: {type(error).__name__}: {error}"]
