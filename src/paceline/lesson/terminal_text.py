"""The blocks of a lesson as text for a terminal."""

import io
import itertools
import re
import textwrap
import tokenize
from typing import TYPE_CHECKING

from paceline.lesson.blocks import (
    Block,
    LessonClaim,
    LessonCode,
    LessonPicture,
    LessonPrint,
    LessonQuestion,
    LessonTable,
    LessonText,
    format_value,
)

if TYPE_CHECKING:
    from rich.text import Text

WIDTH = 80
BREAKS = ("for", "if", "else", "and", "or")  # before which code in brackets may be broken
MIN_CELL = 9  # to which a column of a wide table may shrink


def format_block(block: Block) -> str:
    """Return a block as lines, with an empty line at the end where paragraphs need it."""
    match block:
        case LessonText():
            return format_text(block.text)
        case LessonCode():
            return textwrap.indent(wrap_code(block.code), "    ") + "\n\n"
        case LessonPrint():
            return block.text.rstrip("\n") + "\n\n"
        case LessonTable():
            return format_table(block)
        case LessonClaim():
            return f"✓ {block.claim}\n"
        case LessonQuestion():
            return _wrap(f"Question: {block.question}") + "\n"
        case LessonPicture():
            return f"[picture: {block.title}]\n\n"


def style_block(block: Block) -> "Text":
    """Return the same text as `format_block`, in the colours of a terminal."""
    from rich.syntax import Syntax
    from rich.text import Text

    text = format_block(block)
    match block:
        case LessonCode():
            styled = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(text)
            return styled if styled.plain == text else Text(text)
        case LessonClaim():
            return Text(text, "green")
        case LessonQuestion():
            return Text(text, "bold")
        case LessonTable():
            return Text.assemble((block.title, "bold"), text.removeprefix(block.title))
    styled = Text(text)
    styled.highlight_regex(r"(?m)^.+\n-+$", "bold")  # headings
    return styled


def format_text(text: str) -> str:
    """Return Markdown as wrapped lines: headings are underlined, lists keep their lines."""
    parts = []
    for paragraph in text.strip().split("\n\n"):
        if heading := re.match(r"#+ (.*)", paragraph):
            title, _, rest = paragraph.partition("\n")
            title = heading[1]
            parts.append(f"{title}\n{'-' * len(title)}\n")
            paragraph = rest
        if not paragraph.strip():
            continue
        items = re.split(r"\n(?=- )", paragraph)
        parts.append("".join(map(_wrap, items)) + "\n")
    return "".join(parts)


def _wrap(paragraph: str) -> str:
    indent = "  " if paragraph.startswith("- ") else ""
    words = " ".join(paragraph.replace("**", "").split())
    return (
        textwrap.fill(words, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        + "\n"
    )


def wrap_code(code: str) -> str:
    """Return code with lines that fit into the indented block where brackets allow a break.

    The result is the same program. Long strings and comments stay as they are.
    """
    places: dict[int, list[tuple[int, int]]] = {}  # depth, and column before which a line may be broken
    depth = strings = 0
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if depth and not strings and (before == "," or token.string in BREAKS):
            places.setdefault(token.start[0], []).append((depth, token.start[1]))
        kind, before = tokenize.tok_name[token.type], token.string
        strings += (kind == "FSTRING_START") - (kind == "FSTRING_END")  # since Python 3.12
        if kind == "OP":
            depth += (before in "([{") - (before in ")]}")
    lines = code.splitlines()
    return "\n".join(_break(line, places.get(number, [])) for number, line in enumerate(lines, 1))


def _break(line: str, places: list[tuple[int, int]]) -> str:
    """Return the line with breaks in the outermost brackets, and there as late as possible."""
    indent = len(line) - len(line.lstrip()) + 4
    parts, begin, room = [], 0, WIDTH - 4  # of the indent of the block
    while len(line) - begin > room and (left := [place for place in places if place[1] > begin]):
        fitting = [place for place in left if len(line[begin : place[1]].rstrip()) <= room]
        _, place = min(fitting, key=lambda place: (place[0], -place[1])) if fitting else left[0]
        parts.append(line[begin:place].rstrip())
        begin, room = place, WIDTH - 4 - indent
    return f"\n{' ' * indent}".join([*parts, line[begin:]])


def format_table(shown: LessonTable) -> str:
    """Return a table with its title; numbers are aligned on the right, and long cells are wrapped."""
    texts = [list(shown.headers), *(list(map(format_value, row)) for row in shown.rows)]
    widths = _fit([max(map(len, column)) for column in zip(*texts, strict=True)])
    is_text = [
        any(
            isinstance(row[at], str) or len(cells[at]) > width
            for row, cells in zip(shown.rows, texts[1:], strict=True)
        )
        for at, width in enumerate(widths)
    ]
    lines = [line for cells in texts for line in _format_row(cells, widths, is_text)]
    height = len(_format_row(texts[0], widths, is_text))
    lines.insert(height, "  ".join("─" * width for width in widths))
    return "\n".join([shown.title, *(f"  {line}" for line in lines)]) + "\n\n"


def _fit(widths: list[int]) -> list[int]:
    """Return the widths of columns, of which the widest are reduced until a line fits into WIDTH."""
    widths = list(widths)
    while sum(widths) + 2 * len(widths) > WIDTH and max(widths) > MIN_CELL:
        widths[widths.index(max(widths))] -= 1
    return widths


def _format_row(cells: list[str], widths: list[int], is_text: list[bool]) -> list[str]:
    """Return the lines of a row: as many as its longest cell needs."""
    wrapped = [
        textwrap.wrap(cell, width, break_long_words=len(cell) > width) or [""]
        for cell, width in zip(cells, widths, strict=True)
    ]
    return [
        "  ".join(
            part.ljust(width) if text else part.rjust(width)
            for part, width, text in zip(parts, widths, is_text, strict=True)
        ).rstrip()
        for parts in itertools.zip_longest(*wrapped, fillvalue="")
    ]
