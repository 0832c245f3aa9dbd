"""The blocks of a lesson as text for a terminal."""

import re
import textwrap

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

WIDTH = 96


def format_block(block: Block) -> str:
    """Return a block as lines, with an empty line at the end where paragraphs need it."""
    match block:
        case LessonText():
            return format_text(block.text)
        case LessonCode():
            return textwrap.indent(block.code, "    ") + "\n\n"
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


def format_table(shown: LessonTable) -> str:
    """Return a table with its title; numbers are aligned on the right."""
    cells = [list(map(format_value, row)) for row in shown.rows]
    widths = [max(map(len, column)) for column in zip(shown.headers, *cells, strict=True)]
    is_text = [any(isinstance(row[at], str) for row in shown.rows) for at in range(len(widths))]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, is_text, strict=True)
        ).rstrip()
        for row in (list(shown.headers), *cells)
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join([shown.title, *(f"  {line}" for line in lines)]) + "\n\n"
