"""The boundary to the user's code: whatever it raises becomes a TaskError that names the method, the file and the line."""

import dis
import inspect
import os
import re
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from paceline.errors import Error, TaskError

OWN = os.path.dirname(__file__)
TASKS = os.path.join(OWN, "tasks")
BASE = os.path.join(OWN, "task.py")  # what a subclass inherits
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3\.|^<")
TORCH = re.compile(r"/(site|dist)-packages/torch/")
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|remote process exited|ncclRemoteError|ncclSystemError",
    re.I,
)
MAX_TEXT = 300  # characters of an exception's message in a sentence; torch may list pages of operators
CALLED_BY_TORCH = ("__torch_dispatch__", "__torch_function__")  # in which the task's operations run
RAISE = dis.opmap["RAISE_VARARGS"]


class UserCode:
    """A context for a call of the user's code. `with UserCode("loss()", task.loss): ...` raises TaskError for whatever is raised in it.

    what: the call, as it appears in the sentence. `method`: what is called, whose place is given where no frame of the user raised.
    raises: the class of the error. `hint`: the fix, where there is one.

    SystemExit and other exceptions that are not an Exception are turned too: a task does not end the process. What passes: errors that
    Paceline raises itself, connections to other ranks that were lost, and the KeyboardInterrupt of a signal.
    """

    __slots__ = ("hint", "method", "raises", "what")

    def __init__(
        self,
        what: str,
        method: Callable[..., Any] | None = None,
        raises: type[Error] = TaskError,
        hint: str = "",
    ):
        self.what, self.method, self.raises, self.hint = what, method, raises, hint

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error = _unwrapped(error)
        if error is not None and not passes(error):
            hint = f"; {self.hint}" if self.hint else ""
            raise self.raises(f"{self.what} raised {described(error, self.method)}{hint}") from error


def described(error: BaseException, method: Callable[..., Any] | None = None) -> str:
    """Return the type, text, file and line of an exception, in one line."""
    where = _where(error, method)
    return f"{type(error).__name__}{_text(error)}{f' ({where})' if where else ''}"


def place_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that led to an exception; None where there is none."""
    return next((_line(*frame) for frame in reversed(_frames(error)) if _is_users(frame[0])), None)


def _frames(error: BaseException) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _text(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException as failure:  # __str__ is the user's code as well
        return f", whose text cannot be read: its __str__ raised {type(failure).__name__}"
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT].rstrip()}…"
    return f": {text}" if text else ""


def _where(error: BaseException, method: Callable[..., Any] | None) -> str:
    if (found := place_of(error)) is not None:
        return found
    of_libraries = [frame for frame in _frames(error) if not frame[0].startswith((OWN + os.sep, "<"))]
    places = [
        _line(*frame)
        for frame in [frame for frame in of_libraries if not TORCH.search(frame[0])][-1:] or of_libraries[-1:]
    ]
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    if method is not None and code is not None and _is_users(code.co_filename):
        places.append(f"{method.__name__}() is at {_line(code.co_filename, code.co_firstlineno)}")
    return "; ".join(places)


def _is_users(file: str) -> bool:
    return file.startswith(TASKS + os.sep) or not (file.startswith(OWN + os.sep) or LIBRARY.search(file))


def _line(file: str, line: int) -> str:
    return f"{shown_path(file)}, line {line}"


def shown_path(file: str) -> str:
    """Return a path as a person in the working folder would write it."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def passes(error: BaseException) -> bool:
    """Whether an exception is not the task's."""
    if isinstance(error, Error):
        return True
    outermost = trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or outermost is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    is_raised = _is_raise(trace.tb_frame, trace.tb_lasti)
    if isinstance(error, KeyboardInterrupt):
        return not is_raised  # a signal comes anywhere, but not as a `raise`
    of_paceline = file.startswith(OWN + os.sep) and not _is_users(file) and file != BASE
    if (
        isinstance(error, (RuntimeError, ConnectionError))
        and (of_paceline or TORCH.search(file))
        and LOST_PEER.search(str(error))
    ):
        return True
    inside = of_paceline and trace.tb_frame.f_code.co_name not in CALLED_BY_TORCH and trace is not outermost
    return (of_paceline and is_raised) or (inside and place_of(error) is None)


def _unwrapped(error: BaseException) -> BaseException:
    """What torch's engines raise another exception for, with all that they know of their tensors."""
    cause = error.__cause__
    frames = _frames(error)
    return (
        cause
        if cause is not None and frames and TORCH.search(frames[-1][0]) and place_of(cause) is not None
        else error
    )


def _is_raise(frame: FrameType, at: int) -> bool:
    return frame.f_code.co_code[at] == RAISE
