"""Standard output and files of text that never fail: what is printed to a person never costs a training."""

import codecs
import contextlib
import io
import os
import sys
import unicodedata
from pathlib import Path
from typing import Any, TextIO

PLAIN = "paceline.plain"  # name of the error handler of streams: what an encoding lacks is written in ASCII
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
    "α": "alpha",
    "β": "beta",
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
    **dict.fromkeys("•●○■□", "*"),
}


def _in_ascii(char: str) -> str:
    if char in IN_ASCII:
        return IN_ASCII[char]
    if "\u2500" <= char <= "\u257f":  # corners and crossings of boxes
        return "+"
    return (
        unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
        or char.encode("ascii", "backslashreplace").decode()
    )


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


codecs.register_error(PLAIN, _plain)


class _Lenient(io.RawIOBase):
    """A file descriptor; what cannot be written is dropped."""

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
        except OSError:  # a full disk, a reader that is gone, a terminal that was closed
            return memoryview(data).nbytes

    def close(self) -> None:
        if self._owned and not self.closed:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        super().close()


def _text(descriptor: int, owned: bool, encoding: str, line_buffering: bool) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Lenient(descriptor, owned)), encoding, PLAIN, line_buffering=line_buffering
    )


def append_to(path: Path) -> TextIO:
    """Open a file for lines that may be lost. Raises OSError where it cannot be opened."""
    return _text(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), True, "utf-8", True)


def open_standard_files() -> None:
    """Open what of standard input, output and error is closed (`>&-`) on /dev/null. Else the next file that is opened takes that place,
    and whatever prints writes into it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # takes the lowest that is free, which is this one
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, _text(descriptor, False, "utf-8", True))


def never_fail(*names: str) -> None:
    """From here on drop what `names`, of "stdout" and "stderr", cannot print. Streams that are no file are left as they are."""
    for name in names:
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):  # also of what could not be written before
            stream.flush()
        with contextlib.suppress(OSError, AttributeError):
            lines = stream.line_buffering or name == "stderr"
            setattr(sys, name, _text(stream.fileno(), False, stream.encoding, lines))


def write_plainly() -> None:
    """From here on write in ASCII what the encoding of standard output and error lacks, in place of failing."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(AttributeError):  # no stream of text in a file
            getattr(sys, name).reconfigure(errors=PLAIN)
