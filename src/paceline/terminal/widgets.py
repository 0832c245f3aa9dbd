"""Widgets: lines of text, which are drawn again only if they change, and the help."""

from collections.abc import Iterable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.geometry import Region, Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static


class TextLines(ScrollView, can_focus=True):
    """Lines that can be scrolled. A changed line is sent to the terminal alone, for slow connections."""

    DEFAULT_CSS = """
    TextLines {
        overflow-x: hidden; overflow-y: auto;
        scrollbar-size-vertical: 1; scrollbar-background: ansi_default; scrollbar-color: ansi_blue;
    }
    """

    def __init__(self, id: str):
        super().__init__(id=id)
        self.lines: list[Text] = []
        self._strips: dict[int, Strip] = {}

    def show(self, lines: list[Text]) -> None:
        """Replace the lines."""
        before, self.lines = self.lines, lines
        self._strips.clear()
        if len(before) != len(lines):
            self.virtual_size = Size(self.size.width, len(lines))
        top, height = round(self.scroll_y), self.size.height
        for at in range(top, top + height):
            old = before[at] if at < len(before) else None
            new = lines[at] if at < len(lines) else None
            if old != new or (old is not None and new is not None and old.spans != new.spans):
                self.refresh(Region(0, at - top, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        at, width = round(self.scroll_y) + y, self.size.width
        if at >= len(self.lines):
            return Strip.blank(width)
        if at not in self._strips:
            segments = self.lines[at].render(self.app.console)
            self._strips[at] = Strip(segments).adjust_cell_length(width)
        return self._strips[at].crop(0, width)

    def keep_visible(self, at: int) -> None:
        """Scroll so that a line is visible."""
        top, height = round(self.scroll_y), self.size.height
        if at < top:
            self.scroll_to(y=at, animate=False)
        elif at >= top + height:
            self.scroll_to(y=at - height + 1, animate=False)


class Help(ModalScreen[None]):
    """All keys. Any of escape, ? and q closes it."""

    DEFAULT_CSS = """
    Help { align: center middle; background: ansi_default; }
    Help Static { width: auto; max-width: 100%; height: auto; border: round ansi_default; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        (keys, "dismiss", "Close") for keys in ("escape", "question_mark", "q", "enter")
    ]

    def __init__(self, rows: Iterable[tuple[str, str]]):
        super().__init__()
        self._rows = [*rows]

    def compose(self) -> ComposeResult:
        size = max(len(keys) for keys, _ in self._rows)
        lines = [f"{keys:<{size}}  {meaning}" for keys, meaning in self._rows]
        yield Static("\n".join(lines), markup=False)
