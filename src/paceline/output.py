"""Standard output and text files whose writes never fail: printing must not end a training."""

import codecs
import contextlib
import io
import os
import sys
import unicodedata
from pathlib import Path
from typing import Any, TextIO

PLAIN = "paceline.plain"  # name of the codec error handler that replaces unencodable characters by ASCII
IN_ASCII = {
    "×": "x",
    "÷": "/",
    "·": "*",
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "±": "+/-",
    "→": "->",
    "←": "<-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "√": "sqrt",
    "‖": "||",
    "⁻": "-",
    "α": "alpha",
    "β": "beta",
    "ε": "epsilon",
    "η": "eta",
    "λ": "lambda",
    "Δ": "delta",
    "Σ": "sum",
    "μ": "u",
    "µ": "u",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    **dict.fromkeys("─━═╌╍┄┅┈┉╴╶╸╺", "-"),
    **dict.fromkeys("│┃║╎╏┆┇┊┋╵╷╹╻", "|"),
    **dict.fromkeys("█▉▊▋▌▍▎▏▓▒░", "#"),
    **dict.fromkeys("•●○■□◆", "*"),
    **dict.fromkeys("▶▷▸", ">"),
    **dict.fromkeys("▲△↑", "^"),
    **dict.fromkeys("▼▽↓", "v"),
    **dict.fromkeys("✗✘", "x"),
    "✓": "ok",
}


def _in_ascii(char: str) -> str:
    if char in IN_ASCII:
        return IN_ASCII[char]
    if "\u2500" <= char <= "\u257f":  # corners and crossings of box drawings
        return "+"
    return (
        unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
        or char.encode("ascii", "backslashreplace").decode()
    )


def _replace_by_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


codecs.register_error(PLAIN, _replace_by_ascii)


class _LossyFile(io.RawIOBase):
    """A file descriptor that drops data which cannot be written."""

    def __init__(self, descriptor: int, owned: bool):
        super().__init__()
        self._descriptor, self._owned = descriptor, owned

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:  # a full disk, a reader that has ended, a closed terminal
            return memoryview(data).nbytes

    def close(self) -> None:
        if self._owned and not self.closed:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        super().close()


def _open_lossy(descriptor: int, owned: bool, encoding: str, line_buffering: bool) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(descriptor, owned)), encoding, PLAIN, line_buffering=line_buffering
    )


def open_append(path: Path) -> TextIO:
    """Open a text file for lines that may be lost. Raises OSError if it cannot be opened."""
    return _open_lossy(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), True, "utf-8", True)


def open_standard_files() -> None:
    """Open /dev/null for each of standard input, output and error that is closed (`>&-`).

    Otherwise the next file to be opened gets that descriptor, and prints go into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # This gets the lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, _open_lossy(descriptor, False, "utf-8", True))


def ignore_write_errors(*names: str) -> None:
    """From now on drop output that `names`, of "stdout" and "stderr", cannot write.

    Streams without a file descriptor are not changed.
    """
    for name in names:
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):  # the buffer may hold data that cannot be written
            stream.flush()
        with contextlib.suppress(OSError, AttributeError):
            line_buffering = stream.line_buffering or name == "stderr"
            setattr(sys, name, _open_lossy(stream.fileno(), False, stream.encoding, line_buffering))


def replace_unencodable() -> None:
    """From now on replace characters that standard output and error cannot encode by ASCII."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(AttributeError):  # not a text stream
            getattr(sys, name).reconfigure(errors=PLAIN)
