"""A lesson file as cells. `# %%` starts a cell: first its text, as comments, then its code."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "# %%"
COURSE = Path(__file__).parent / "course"
EXERCISES = Path(__file__).parent / "exercises"


@dataclass(frozen=True)
class LessonCell:
    """name: the word after `# %%`, empty in lessons. line: number of lines before the code."""

    text: str
    code: str
    line: int
    name: str = ""

    @property
    def shown_code(self) -> str:
        """The code that readers see: without questions, which have the answers, and without drawing."""
        return _remove(self.code, lambda node: _is_question(node) or _draws(node))

    @property
    def notebook_code(self) -> str:
        """The code of a cell of a notebook: without questions."""
        return _remove(self.code, _is_question)

    @property
    def questions(self) -> tuple[tuple[str, str], ...]:
        """Questions and answers of the cell."""
        calls = [
            node.value
            for node in ast.parse(self.code).body
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_question(node)
        ]
        return tuple((ast.literal_eval(call.args[0]), ast.literal_eval(call.args[1])) for call in calls)


def _is_call_of(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_question(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and _is_call_of(node.value, "ask")


def _draws(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        _is_call_of(decorator, "picture") for decorator in node.decorator_list
    )


def _remove(code: str, is_removed: Callable[[ast.stmt], bool]) -> str:
    """Return code without some of its statements, and with at most two empty lines in a row."""
    lines: list[str | None] = list(code.splitlines())
    for node in filter(is_removed, ast.parse(code).body):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        start = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        assert node.end_lineno is not None
        lines[start - 1 : node.end_lineno] = [None] * (node.end_lineno - start + 1)
    kept = "\n".join(line for line in lines if line is not None)
    return re.sub(r"\n{4,}", "\n\n\n", kept).strip("\n")


@dataclass(frozen=True)
class LessonFile:
    """A parsed file: the first sentence of its docstring, the rest of it, and its cells."""

    path: Path
    title: str
    text: str
    cells: tuple[LessonCell, ...]

    @property
    def name(self) -> str:
        """The name as users type it: `data-parallel` for data_parallel.py."""
        return self.path.stem.replace("_", "-")


def read_lesson(path: Path) -> LessonFile:
    """Return the cells of a lesson or of its exercises."""
    source = path.read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    lines = source.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(MARK)]
    ends = [*starts[1:], len(lines)]
    cells = tuple(_read_cell(lines, start, end) for start, end in zip(starts, ends, strict=True))
    return LessonFile(path, title.removesuffix("."), text.strip(), cells)


def _read_cell(lines: list[str], start: int, end: int) -> LessonCell:
    code = start + 1
    while code < end and lines[code].startswith("#"):
        code += 1
    text = "\n".join(line[1:].removeprefix(" ") for line in lines[start + 1 : code])
    while code < end and not lines[code].strip():
        code += 1
    content = "\n".join(lines[code:end]).rstrip()
    return LessonCell(text, content, code, lines[start].removeprefix(MARK).strip())
