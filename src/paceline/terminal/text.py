"""Parts of a screen: lines of text with styles of a terminal with 16 colours, readable without colours."""

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from paceline.terminal.braille import Plot
from paceline.units import format_count, without_controls

Lines = list[Text]
ELLIPSIS = "…"


def fit(text: str, width: int) -> str:
    """Return the text in exactly `width` cells of a terminal; a longer text ends with an ellipsis."""
    text = without_controls(text).replace("\n", " ").replace("\t", " ")
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + ELLIPSIS if width > 0 else ""


def shorten(text: str, width: int) -> str:
    """Return the text in at most `width` cells."""
    return fit(text, width).rstrip()


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Return the words of a text in lines of at most `width` cells. Lines after the first are indented."""
    lines: list[str] = []
    line = ""
    for word in without_controls(text).split():
        lead = indent if lines else ""
        if line and cell_len(lead + line) + 1 + cell_len(word) > width:
            lines.append(lead + line)
            line = ""
        line = f"{line} {word}" if line else word
        while cell_len((lead := indent if lines else "") + line) > width > cell_len(lead):
            piece = set_cell_size(line, width - cell_len(lead)).rstrip()
            lines.append(lead + piece)
            line = line[len(piece) :]
    return [*lines, (indent if lines else "") + line] if line or not lines else lines


def plain(lines: Sequence[str], style: str = "") -> Lines:
    return [Text(line, style, no_wrap=True) for line in lines]


def title(text: str, width: int, note: str = "") -> Text:
    """Return the heading of a section, with a rule to the right edge."""
    head = Text(no_wrap=True)
    head.append(shorten(text, width), "bold")
    if note:
        head.append(shorten(f"  {note}", max(0, width - head.cell_len)), "dim")
    head.append(" " + "─" * (width - head.cell_len - 1) if width > head.cell_len + 1 else "", "dim")
    return head


def beside(blocks: Sequence[Lines], widths: Sequence[int], gap: int = 2) -> Lines:
    """Return blocks of lines beside each other, each padded to its width."""
    lines = []
    for row in range(max(map(len, blocks), default=0)):
        line = Text(no_wrap=True)
        for at, (block, width) in enumerate(zip(blocks, widths, strict=True)):
            cell = block[row] if row < len(block) else Text()
            line.append_text(cell)
            if at < len(blocks) - 1:
                line.append(" " * (width - cell.cell_len + gap))
        lines.append(line)
    return lines


def table(
    rows: Sequence[Sequence[str]], heads: Sequence[str], width: int, left: Sequence[int] = (0,)
) -> list[str]:
    """Return a table with its heads in the first line. Columns not in `left` are aligned to the right.

    A last column that does not fit is shortened."""
    if not heads:
        return []
    columns = [[head, *(row[at] for row in rows)] for at, head in enumerate(heads)]
    widths = [max(map(cell_len, column)) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        cells = [
            fit(cell, size) if at in left else " " * (size - cell_len(cell)) + cell
            for at, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(shorten("  ".join(cells), width))
    return lines


def format_value(value: Any) -> str:
    """Return a number with four digits; a dash if it is unknown."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e5 else format_count(value)


def format_edge(value: float) -> str:
    """Return a number in at most seven characters, for the edge of a plot."""
    text = f"{value:.3g}" if abs(value) < 1e5 else format_count(value)
    return text if len(text) <= 7 else f"{value:.0e}"


def format_energy(joules: float) -> str:
    return f"{format_count(joules)}J" if joules >= 1000 else f"{joules:.4g} J"


def style_plot(plot: Plot) -> Lines:
    """Return the rows of a curve: the line in the colour of the terminal's text, its band dim."""
    lines = []
    for row, of_band in zip(plot.rows, plot.is_band, strict=True):
        line = Text(row, no_wrap=True)
        for at, is_band in enumerate(of_band):
            if is_band:
                line.stylize("dim", at, at + 1)
        lines.append(line)
    return lines
