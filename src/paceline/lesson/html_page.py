"""A lesson as one HTML file that needs no network, with its code highlighted and its pictures inside."""

import base64
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files

from paceline.inspect.report.html_head import build_head, read_asset
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
from paceline.lesson.terminal_text import wrap_code

NUMBER = ' class="number"'


@cache
def _read_style() -> str:
    """Return the style sheet: that of reports, that of lessons, and the colours of code."""
    from pygments.formatters import HtmlFormatter

    report = read_asset("report.css")
    own = files("paceline.lesson").joinpath("lesson.css").read_text(encoding="utf-8")
    light, dark = (
        "\n".join(
            line
            for line in HtmlFormatter(style=style).get_style_defs("pre.code").splitlines()
            if line.startswith("pre.code .")
        )
        for style in ("default", "monokai")
    )
    return f"{report}{own}{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n"


def build_page(title: str, subtitle: str, blocks: Sequence[Block]) -> str:
    """Return a lesson as HTML. Texts are escaped, and the page may neither load anything nor run scripts."""
    head = build_head(f"{title} – Paceline lesson", _read_style(), has_images=True)
    return f"""{head}
<body class="lesson">
<header>
<h1>{escape(title)}</h1>
<p class="dim">{escape(subtitle)}</p>
</header>
<main>
{"".join(map(_build_block, blocks))}</main>
</body>
</html>
"""


def _build_block(block: Block) -> str:
    match block:
        case LessonText():
            return build_text(block.text)
        case LessonCode():
            return _highlight(wrap_code(block.code))
        case LessonPrint():
            return f'<pre class="printed">{escape(block.text)}</pre>\n'
        case LessonTable():
            return _build_table(block)
        case LessonClaim():
            return f'<p class="claim">✓ {_build_inline(block.claim)}</p>\n'
        case LessonQuestion():
            return (
                f'<div class="question"><p><strong>Question.</strong> {_build_inline(block.question)}</p>'
                f"<details><summary>Answer</summary><p>{_build_inline(block.answer)}</p></details></div>\n"
            )
        case LessonPicture():
            data = base64.b64encode(block.svg.encode()).decode()
            name = escape(block.title)
            return (
                f'<figure class="drawn"><img alt="{name}" src="data:image/svg+xml;base64,{data}">'
                f"<figcaption>{name}</figcaption></figure>\n"
            )


def _highlight(code: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return f'<pre class="code">{highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))}</pre>\n'


def _build_inline(text: str) -> str:
    """Return text with `code` and **bold** as HTML."""
    parts = re.split(r"(`[^`]+`|\*\*[^*]+\*\*)", text)
    return "".join(
        f"<code>{escape(part[1:-1])}</code>"
        if len(part) > 2 and part.startswith("`")
        else f"<strong>{escape(part[2:-2])}</strong>"
        if len(part) > 4 and part.startswith("**")
        else escape(part)
        for part in parts
    )


def build_text(text: str) -> str:
    """Return Markdown as HTML: headings, paragraphs, lists, `code` and **bold**."""
    parts = []
    for paragraph in filter(None, text.strip().split("\n\n")):
        if heading := re.match(r"#+ (.*)", paragraph):
            parts.append(f"<h2>{_build_inline(heading[1])}</h2>\n")
            paragraph = paragraph.partition("\n")[2]
        if paragraph.startswith("- "):
            items = re.split(r"(?:^|\n)- ", paragraph)[1:]
            parts.append(f"<ul>{''.join(f'<li>{_build_inline(item)}</li>' for item in items)}</ul>\n")
        elif paragraph.strip():
            parts.append(f"<p>{_build_inline(paragraph)}</p>\n")
    return "".join(parts)


def _build_table(shown: LessonTable) -> str:
    is_text = [any(isinstance(row[at], str) for row in shown.rows) for at in range(len(shown.headers))]
    head = "".join(
        f"<th{'' if text else NUMBER}>{escape(header)}</th>"
        for header, text in zip(shown.headers, is_text, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{NUMBER if not isinstance(value, str) else ''}>{escape(format_value(value))}</td>"
            for value in row
        )
        + "</tr>\n"
        for row in shown.rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(shown.title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )
