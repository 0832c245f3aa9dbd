"""paceline lesson: the list, pages, notebooks, and bad input."""

import ast
import functools
import io
import json
import re

import pytest
from rich.console import Console

from browser import find_chromium, start_browser
from command import paceline, succeed
from lesson_tables import play_lesson
from paceline import SpecError
from paceline.lesson.blocks import (
    LessonClaim,
    LessonCode,
    LessonPicture,
    LessonQuestion,
    LessonTable,
    LessonText,
    format_value,
)
from paceline.lesson.catalogue import CHAPTERS, ORDER, SHORT_NAMES, find_exercise, find_lesson
from paceline.lesson.exercise import read_cell
from paceline.lesson.html_page import build_page
from paceline.lesson.notebook import build_notebook
from paceline.lesson.outputs import check, shown_by
from paceline.lesson.terminal_text import format_block, style_block, wrap_code
from pages import ROOT, read_blocks

PAGE = read_blocks("docs/lessons.md")
EXERCISES = tuple(name for name in ORDER if find_exercise(name) is not None)


def test_list_names_every_lesson_in_order(tmp_path):
    text = succeed("lesson", at=tmp_path).out
    numbered = re.findall(r"^ +(\d+) ([* ]) (\S+) +(\S.*)$", text, re.M)
    assert [name for _, _, name, _ in numbered] == [*ORDER]
    assert [int(number) for number, *_ in numbered] == list(range(1, len(ORDER) + 1))
    assert {name for _, mark, name, _ in numbered if mark == "*"} == {*EXERCISES}
    assert "* has an exercise" in text
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    for chapter in CHAPTERS:
        first = lines.index(chapter.title) + 1
        listed = lines[first : first + len(chapter.names) + 1]
        assert [line[7:].split()[0] for line in listed[:-1]] == [*chapter.names]
        assert listed[-1] == ""


def test_a_number_of_the_list_names_a_lesson():
    assert [find_lesson(str(number)).name for number in range(1, len(ORDER) + 1)] == [*ORDER]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("0",), "no such lesson: '0'; run: paceline lesson"),
        ((f"{len(ORDER) + 1}",), f"no such lesson: '{len(ORDER) + 1}'; run: paceline lesson"),
        (("1" * 5000,), "run: paceline lesson"),
        (("colectives",), "no such lesson: 'colectives'; did you mean collectives?"),
        (("../secret",), "no such lesson: '../secret'; run: paceline lesson"),
        (("ranks", "--ranks", "0"), "--ranks must be at least 1, got 0"),
        (("ranks", "--ranks", "5"), "lessons run on 1, 2, 3, 4 or 8 ranks, got 5; use --ranks 4"),
        (("ranks", "--ranks", "5", "--html", "a.html"), "lessons run on 1, 2, 3, 4 or 8 ranks, got 5"),
        (("--html", "a.html"), "--html needs the name of a lesson; run: paceline lesson"),
        (
            ("ranks", "--html", "a.html", "--check", "my.py"),
            "--html and --check do different things; give only one",
        ),
        (("growth", "--exercise", "my.py"), "the lesson growth has no exercise; lessons with an exercise: "),
        (("zero", "--html", "absent/a.html"), "absent"),
        (("ring-all-reduce", "--check", "absent.py"), "cannot read absent.py: No such file or directory"),
        (("ring-all-reduce", "--exercise", "broken.py"), "broken.py exists already; specify another file"),
    ],
)
def test_bad_input(words, message, tmp_path):
    (tmp_path / "broken.py").write_text("def")
    refused = paceline("lesson", *words, at=tmp_path)
    assert (refused.status, refused.err.count("\n")) == (2, 1), refused.all
    assert message in refused.err
    assert refused.out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"broken.py"}


@pytest.mark.processes
@pytest.mark.slow
def test_commands_of_the_page(tmp_path):
    lessons = [line.split("#")[0].split()[1:] for line in PAGE["lessons"].splitlines()]
    assert len(lessons) == 4
    printed = succeed(*lessons[1], at=tmp_path).out
    for block in play_lesson("collectives", 4):
        assert format_block(block) in printed
    assert printed.index("Answers") > printed.index("Question")
    succeed(*lessons[2], at=tmp_path)
    assert "<svg" not in (page := (tmp_path / "lesson.html").read_text())
    assert page.count("data:image/svg+xml") == 1
    assert page.count('class="claim"') == printed.count("✓")
    succeed(*lessons[3], at=tmp_path)
    assert json.loads((tmp_path / "lesson.ipynb").read_text())["nbformat"] == 4
    exercise = [line.split()[1:] for line in PAGE["exercise"].splitlines()]
    succeed(*exercise[0], at=tmp_path)
    unfinished = paceline(*exercise[1], at=tmp_path)
    assert (unfinished.status, unfinished.out) == (
        1,
        "✗ not written yet: my.py, line 16 raises NotImplementedError\n",
    )
    (tmp_path / "my.py").write_text(read_cell(find_exercise("ring-all-reduce"), "solution").code)
    assert succeed(*exercise[1], at=tmp_path).out.endswith("my.py is right.\n")


def test_readers_do_not_see_the_answers_in_the_code():
    for name in ORDER:
        lesson = find_lesson(name)
        questions = [question for cell in lesson.cells for question in cell.questions]
        assert questions, name
        assert re.search(r"^ask\(", lesson.path.read_text(), re.M)
        for cell in lesson.cells:
            assert not re.search(r"^ask\(", f"{cell.shown_code}\n{cell.notebook_code}", re.M)
            assert "@picture" not in cell.shown_code
            assert ("@picture" in cell.notebook_code) == ("@picture" in cell.code)
        for question, answer in questions:
            assert f"**Question.** {question}" in notebook_text(name)
            assert f"</summary>\n\n{answer}" in notebook_text(name)


@functools.cache
def notebook_text(name):
    cells = json.loads(build_notebook(find_lesson(name), 2))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def test_outline_of_a_course_names_every_lesson():
    page = (ROOT / "docs/teach.md").read_text()
    rows = re.findall(r"^\| \d\d:\d\d \| (.*?) \|", page, re.M)
    names = [
        name for row in rows for name in re.findall(r"`([^`]+)`", row) if not name.startswith("paceline ")
    ]
    assert sorted(names) == sorted(ORDER)


def test_false_claims_raise():
    shown = []
    with shown_by(shown.append, has_pictures=False):
        check("a sum", [6, 10], [6, 10])
        with pytest.raises(AssertionError, match=r"a sum: this is false; expected \[6, 10\], got \[6, 11\]"):
            check("a sum", [6, 11], [6, 10])
        for got, expected in ((1.0, None), ([1], [1, 1]), ({"a": 1}, {"b": 1}), (1.1, 1.0), ("a", 1.0)):
            with pytest.raises(AssertionError):
                check("equal", got, expected, 0.01)
        check("close", {"a": [1.001]}, {"a": [1.0]}, 0.01)
    assert [block.claim for block in shown] == ["a sum", "close"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([6.0, 10.5], "[6, 10.5]"),
        (12345, "12,345"),
        (None, "-"),
        (True, "yes"),
        (0.123456, "0.1235"),
        (3.14e23, "3.14e+23"),
    ],
)
def test_values_as_text(value, text):
    assert format_value(value) == text


BLOCKS = [
    LessonText("# <b>a</b>\n\n- `<x>`\n- two\n\n**bold** & text"),
    LessonCode("x = '<script>'"),
    LessonTable("<t>", ("<h>",), (("<cell>",),)),
    LessonClaim("<claim>"),
    LessonQuestion("<q>", "<answer>"),
    LessonPicture("<p>", "<svg><script>alert(1)</script></svg>"),
]


def test_pages_escape_text():
    page = build_page("<title>", "<subtitle>", BLOCKS)
    body = page.partition("</head>")[2]
    assert re.findall(r"<(?:script|x|t|h|cell|claim|q|answer|p|b|subtitle)>", body) == ["<p>", "<p>", "<p>"]
    assert "<li><code>&lt;x&gt;</code></li><li>two</li>" in body
    assert "<strong>bold</strong> &amp; text" in body


def test_colors_in_a_terminal_change_no_text():
    blocks = [*BLOCKS, LessonText("[bold]not a mark[/] :smile:"), LessonCode("\n  if x:\n\n    y = 1  ")]
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, no_color=False, width=20, highlight=False)
        for block in blocks:
            console.print(style_block(block), end="", soft_wrap=True)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
        assert plain == "".join(map(format_block, blocks))
        assert (plain != out.getvalue()) == is_terminal


def test_plans_name_their_lessons():
    for short, name in SHORT_NAMES.items():
        assert find_lesson(short).path == find_lesson(name).path


def test_wide_tables_wrap_their_cells():
    table = LessonTable("wide", ("rank", "values"), ((0, [1000.5 + i for i in range(30)]), (1, 2.0)))
    lines = format_block(table).splitlines()
    assert max(map(len, lines)) <= 80
    values = re.findall(r"[\d,]+\.?\d*", " ".join(line[8:] for line in lines[3:-2]))
    assert len(values) == 30
    assert lines[-2].split() == ["1", "2"]


def test_tables_of_many_columns_fit():
    row = (0, *[[0, 24, 120, 360]] * 6)
    table = LessonTable("reductions", ("rank", "before", "SUM", "MIN", "MAX", "PRODUCT", "AVG"), (row,))
    assert max(map(len, format_block(table).splitlines())) <= 80


@pytest.mark.parametrize("name", ORDER)
def test_long_code_is_broken_without_a_change(name):
    for cell in find_lesson(name).cells:
        broken = wrap_code(cell.code)
        assert ast.dump(ast.parse(broken)) == ast.dump(ast.parse(cell.code))
        assert len(broken) >= len(cell.code.rstrip("\n"))


def test_code_is_broken_in_brackets_only():
    line = "x, whole = torch.zeros(2), torch.tensor([[10.0 * part, 10.0 * part + 1] for part in range(size)])"
    assert wrap_code(line).splitlines() == [
        "x, whole = torch.zeros(2), torch.tensor([[10.0 * part, 10.0 * part + 1]",
        "    for part in range(size)])",
    ]
    line = (
        'table("First row", {"one process": [weight.grad[0] for weight in weights], '
        '"all": [first for first in firsts]})'
    )
    assert wrap_code(line).splitlines() == [
        'table("First row",',
        '    {"one process": [weight.grad[0] for weight in weights],',
        '    "all": [first for first in firsts]})',
    ]
    for whole in ("a = 1", f"text = '{'word, ' * 20}'", f"first = {'value + ' * 12}1, 2"):
        assert wrap_code(whole) == whole


@pytest.mark.processes
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("name", ORDER)
def test_pages_in_a_browser(name, tmp_path):
    """Every page is shown without errors or requests, with its pictures drawn."""
    blocks = play_lesson(name, 2, has_pictures=True)
    path = tmp_path / "lesson.html"
    path.write_text(build_page(find_lesson(name).title, "a lesson", blocks))
    with start_browser() as browser:
        browser.open(path)
        sizes = browser.run("[...document.images].map(image => image.naturalWidth)")
        assert len(sizes) == sum(isinstance(block, LessonPicture) for block in blocks)
        assert all(size > 100 for size in sizes)
        claims = sum(isinstance(block, LessonClaim) for block in blocks)
        assert browser.run("document.querySelectorAll('.claim').length") == claims >= 1
        assert browser.run("getComputedStyle(document.body).maxWidth") == "864px"
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert find_chromium()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ORDER)
def test_notebooks_run(name):
    """Every cell of every notebook runs in a Jupyter kernel, and shows what the lesson shows."""
    import nbclient
    import nbformat

    notebook = nbformat.reads(build_notebook(find_lesson(name), 2), as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    # A warning of a rank, on standard error, may arrive between two parts of a table.
    text = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    blocks = play_lesson(name, 2, has_pictures=True)
    for block in blocks:
        if isinstance(block, LessonClaim) or (isinstance(block, LessonTable) and not block.is_measured):
            assert format_block(block) in text
    drawn = [output for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert len(drawn) == sum(isinstance(block, LessonPicture) for block in blocks)


def test_missing_packages_are_named(monkeypatch):
    import paceline.lesson.notebook as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"pip install 'paceline\[notebook\]'"):
        build_notebook(find_lesson("ranks"), 2)
