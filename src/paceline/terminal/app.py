"""The terminal view of runs, drawn by Textual."""

import asyncio
import contextlib
import math
import signal
import time
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.widgets import Input

from paceline.report.curve_points import AXES
from paceline.terminal.reader import EVERY_S, Reader, Snapshot
from paceline.terminal.sections import build_header, build_runs
from paceline.terminal.text import Lines, shorten
from paceline.terminal.views import VIEWS, Look
from paceline.terminal.widgets import Help, TextLines
from paceline.web.curves import MAX_FILTER
from paceline.web.runs import RunList

LIST = "0"  # the view of all runs
KEYS = (
    *((key, name) for key, (name, _) in VIEWS.items()),
    ("tab", "next view"),
    ("r", "list of runs; enter opens one"),
    ("j, k", "next and previous run"),
    ("a", "next axis: step, samples, time of training, energy"),
    ("l", "logarithmic axis of the loss"),
    ("/", "filter curves by name; escape shows all"),
    ("n, p", "next and previous node"),
    ("up, down, pgup, pgdn", "scroll; in Ranks, choose a rank"),
    ("enter", "in Ranks: output of the rank; escape leaves it"),
    ("?", "this help"),
    ("q, Ctrl-C", "quit; training is not affected"),
)


class TerminalView(App[None]):
    """Shows a list of runs and the views of one run. A thread reads the files, once a second."""

    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    #head { height: 4; }
    #body { height: 1fr; }
    #foot { height: 1; }
    #filter { height: 1; border: none; padding: 0; display: none; background: ansi_default; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit", priority=False),
        *(Binding(key, f"view('{key}')", name) for key, (name, _) in VIEWS.items()),
        Binding("r", f"view('{LIST}')", "Runs"),
        Binding("tab", "turn(1)", "Next view", priority=True),
        Binding("shift+tab", "turn(-1)", "Previous view", priority=True),
        Binding("j", "change_run(1)", "Next run"),
        Binding("k", "change_run(-1)", "Previous run"),
        Binding("a", "change_axis", "Axis"),
        Binding("l", "change_scale", "Log"),
        Binding("slash", "filter", "Filter"),
        Binding("n", "change_node(1)", "Next node"),
        Binding("p", "change_node(-1)", "Previous node"),
        Binding("question_mark", "help", "Help"),
        Binding("escape", "leave", "Back"),
    ]

    def __init__(self, runs: RunList):
        super().__init__()
        self.theme = "ansi-dark"  # the 16 colours of the terminal, on its own background
        self.animation_level = "none"
        self.snapshot = Snapshot()
        self.error: BaseException | None = None
        self._reader = Reader(runs, self._receive, self._receive_error)
        self._view, self._look, self._chosen = LIST, Look(), 0
        self._opens_only_run = True

    def compose(self) -> ComposeResult:
        yield TextLines("head")
        yield TextLines("body")
        yield Input(
            id="filter", placeholder="text in the names of curves", max_length=MAX_FILTER, compact=True
        )
        yield TextLines("foot")

    def on_mount(self) -> None:
        for name in ("head", "foot"):
            self.query_one(f"#{name}", TextLines).can_focus = False
        self.query_one("#body").focus()
        for number in (signal.SIGTERM, signal.SIGHUP):  # otherwise the terminal stays in its raw mode
            # Only the main thread can handle signals, and not on every system.
            with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, self._end_by_signal, number)
        self._reader.start()
        self.set_interval(EVERY_S, self._draw)  # the age of the data
        self._draw()

    def on_unmount(self) -> None:
        self._reader.close()

    def _end_by_signal(self, number: int) -> None:
        self.exit(return_code=128 + number)

    def _receive(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(RuntimeError):  # the view has ended
            self.call_from_thread(self._show, snapshot)

    def _receive_error(self, error: BaseException) -> None:
        self.error = error
        with contextlib.suppress(RuntimeError):
            self.call_from_thread(self.exit, return_code=1)

    def _show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if self._opens_only_run and len(snapshot.runs) == 1:
            self._open(0)
        self._opens_only_run = False
        self._draw()

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        head, body, foot = (self.query_one(f"#{name}", TextLines) for name in ("head", "body", "foot"))
        width, height = self.size.width, body.size.height
        if width <= 0 or height <= 0:
            return
        head.show(self._build_head(width))
        body.show(self._build_body(body, width, height))
        foot.show([self._build_foot(width)])

    def _build_head(self, width: int) -> Lines:
        if self._view == LIST:
            lines = [Text(shorten(f"runs in {self._reader.path}", width), "bold"), Text(), Text()]
        else:
            lines = build_header(self.snapshot.panels, time.time(), width)
        tabs = Text(no_wrap=True)
        for key, name in ((LIST, "Runs"), *((key, name) for key, (name, _) in VIEWS.items())):
            shown = "r" if key == LIST else key
            count = (
                len((self.snapshot.panels.get("findings") or {}).get("findings", ()))
                if name == "Findings"
                else 0
            )
            label = f" {shown} {name}{f' ({count})' if count else ''} "
            tabs.append(label, "reverse bold" if key == self._view else "")
        tabs.truncate(width)
        return [*lines, tabs]

    def _build_body(self, body: TextLines, width: int, height: int) -> Lines:
        if self._view == LIST:
            self._chosen = max(0, min(self._chosen, len(self.snapshot.runs) - 1))
            return build_runs(self.snapshot.runs, self.snapshot.problem, self._chosen, width)
        if self.snapshot.panels.get("gone"):
            return []
        build = VIEWS[self._view][1]
        lines = build(self.snapshot, self._look, width, height)
        return build(self.snapshot, self._look, width - 1, height) if len(lines) > height else lines

    def _build_foot(self, width: int) -> Text:
        keys = {
            LIST: "↑↓ choose  enter open",
            "1": "a axis  l log  j k run",
            "2": "a axis  l log  / filter  ↑↓ scroll",
            "3": "escape all ranks" if self.snapshot.request.rank is not None else "↑↓ rank  enter output",
            "4": "n p node  ↑↓ scroll",
        }.get(self._view, "↑↓ scroll")
        return Text(shorten(f"{keys}  tab view  ? help  q quit", width), "dim", no_wrap=True)

    def _open(self, at: int) -> None:
        rows = self.snapshot.runs
        if not 0 <= at < len(rows):
            return
        self._chosen, self._look = at, Look(self._look.is_log)
        if self._view == LIST:
            self._view = "1"
        selection = replace(self._reader.request.selection, node="")
        self.snapshot = replace(self.snapshot, panels={}, tables={}, ranks=None, nodes=[])
        self._reader.ask(run_id=rows[at]["id"], rank=None, selection=selection)

    def action_view(self, key: str) -> None:
        if key != LIST and self._reader.request.run_id is None:
            self._open(self._chosen)
        if key == LIST or self._reader.request.run_id is not None:
            self._view = key
            self.query_one("#body", TextLines).scroll_to(y=0, animate=False)
        self._draw()

    def action_turn(self, by: int) -> None:
        names = [LIST, *VIEWS]
        self.action_view(names[(names.index(self._view) + by) % len(names)])

    def action_change_run(self, by: int) -> None:
        self._open((self._chosen + by) % max(1, len(self.snapshot.runs)))
        self._draw()

    def action_change_axis(self) -> None:
        axes = self.snapshot.panels.get("curves", {}).get("axes", AXES)
        selection = self._reader.request.selection
        at = axes.index(selection.axis) if selection.axis in axes else -1
        self._reader.ask(selection=replace(selection, axis=axes[(at + 1) % len(axes)]))

    def action_change_scale(self) -> None:
        self._look = replace(self._look, is_log=not self._look.is_log)
        self._draw()

    def action_change_node(self, by: int) -> None:
        node = (self._look.node + by) % max(1, len(self.snapshot.nodes))
        self._look = replace(self._look, node=node)
        self._reader.ask(selection=replace(self._reader.request.selection, node=str(node)))

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()
        self._view = "2" if self._view not in ("1", "2") else self._view
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._reader.ask(selection=replace(self._reader.request.selection, filter=event.value))

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._hide_filter()

    def _hide_filter(self) -> None:
        self.query_one("#filter").display = False
        self.query_one("#body").focus()
        self.call_after_refresh(self._draw)

    def action_leave(self) -> None:
        """Leave the output of a rank, or remove the filter."""
        if self._reader.request.rank is not None:
            self._reader.ask(rank=None)
        self.query_one("#filter", Input).value = ""
        self._hide_filter()

    def action_help(self) -> None:
        self.push_screen(Help(KEYS))

    async def on_key(self, event: events.Key) -> None:
        """Move the cursor of lists. Other views scroll."""
        moves: dict[str, float] = {"up": -1, "down": 1, "home": -math.inf, "end": math.inf}
        page = self.query_one("#body").size.height - 2
        moves |= {"pageup": -page, "pagedown": page}
        is_list = self._view == LIST
        is_ranks = self._view == "3" and self._reader.request.rank is None
        if not (is_list or is_ranks) or isinstance(self.focused, Input):
            return
        if event.key == "enter":
            if is_list:
                self._open(self._chosen)
            else:
                self._reader.ask(rank=self._look.rank)
            self._draw()
        elif event.key in moves:
            self._move(moves[event.key], is_list)
        else:
            return
        event.prevent_default()
        event.stop()

    def _move(self, by: float, is_list: bool) -> None:
        rows: list[Any] = self.snapshot.runs if is_list else (self.snapshot.ranks or {}).get("ranks", [])
        now = self._chosen if is_list else self._look.rank
        at = int(max(0.0, min(now + by, len(rows) - 1.0)))
        if is_list:
            self._chosen = at
        else:
            self._look = replace(self._look, rank=at)
        self._draw()
        self.query_one("#body", TextLines).keep_visible(at + (1 if is_list else 2))


def show(runs: RunList, size: Size | None = None) -> int:
    """Show runs until the user quits. Return the exit status."""
    view = TerminalView(runs)
    view.run(mouse=False, size=(size.width, size.height) if size else None)
    if view.error is not None:
        raise view.error
    return view.return_code or 0
