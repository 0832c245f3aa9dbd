"""Screens of the terminal view, as text: in Textual's own driver, and in tmux."""

import contextlib
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from command import clean_environment

TMUX = shutil.which("tmux")


def read_screen(app: object) -> str:
    """Return the text of an app's screen, a line for each row."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


@dataclass
class Terminal:
    """A terminal of tmux in which a shell runs."""

    socket: str

    def tmux(self, *words: str) -> str:
        result = subprocess.run(
            [TMUX, "-L", self.socket, *words], capture_output=True, text=True, timeout=30, check=True
        )
        return result.stdout

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def screen(self, *options: str) -> str:
        return self.tmux("capture-pane", "-p", *options)

    def wait_for(self, holds: Callable[[str], object], what: str, timeout_s: float = 60.0) -> str:
        deadline = time.monotonic() + timeout_s
        while not holds(screen := self.screen()):
            assert time.monotonic() < deadline, f"not {what} in {timeout_s:.0f} s\n{screen}"
            time.sleep(0.1)
        return screen


@contextlib.contextmanager
def open_terminal(at: Path, width: int = 80, height: int = 24) -> Iterator[Terminal]:
    terminal = Terminal(f"paceline-test-{uuid.uuid4().hex}")
    size = ["-x", str(width), "-y", str(height)]
    subprocess.run(
        [TMUX, "-L", terminal.socket, "-f", "/dev/null", "new-session", "-d", *size,
         "-c", str(at), "env", "PS1=$ ", "sh"],
        env={name: value for name, value in clean_environment().items() if name not in ("COLUMNS", "TMUX")}
        | {"LC_ALL": "C.UTF-8"},
        check=True, timeout=30,
    )  # fmt: skip
    try:
        yield terminal
    finally:
        terminal.tmux("kill-server")
