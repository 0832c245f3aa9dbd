"""A lesson file as cells. `# %%` starts a cell: first its text, as comments, then its code."""

import ast
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
