"""The boundary to the user's code: its exceptions become a TaskError with method, file and line."""

import dis
import inspect
import os
import re
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from paceline.errors import Error, TaskError

PACKAGE = os.path.dirname(__file__)
TASKS = os.path.join(PACKAGE, "tasks")  # the built-in tasks count as code of the user
TASK_MODULE = os.path.join(PACKAGE, "task", "interface.py")  # a subclass inherits methods from this file
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3\.|^<")
TORCH = re.compile(r"/(site|dist)-packages/torch/")
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|remote process exited"
    r"|ncclRemoteError|ncclSystemError",
    re.I,
)
MAX_TEXT = 300  # characters of an exception's message that are shown; torch may list pages of operators
CALLED_BY_TORCH = ("__torch_dispatch__", "__torch_function__")  # operations of the task run inside these
RAISE = dis.opmap["RAISE_VARARGS"]


class UserCode:
    """A context manager for a call of the user's code. It turns any exception into a TaskError.

        with UserCode("loss()", task.loss):
            loss = task.loss(output, batch)

    what: the call, as it appears in the message.
    method: the method that is called; its place is reported if no frame of the user's code raised.
    raises: the class of the new error.
    hint: the fix, if there is a known fix.

    This includes SystemExit and other exceptions that are not an Exception: a task must not end the process.
    `is_passed_through` lists the exceptions that pass unchanged.
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
            error = _unwrap(error)
        if error is not None and not is_passed_through(error):
            hint = f"; {self.hint}" if self.hint else ""
            raise self.raises(f"{self.what} raised {describe_exception(error, self.method)}{hint}") from error


def describe_exception(error: BaseException, method: Callable[..., Any] | None = None) -> str:
    """Return the type, text, file and line of an exception, on one line."""
    place = _find_place(error, method)
    return f"{type(error).__name__}{_format_text(error)}{f' ({place})' if place else ''}"


def find_user_line(error: BaseException) -> str | None:
    """Return file and line of the innermost frame of the user's code, or None if no frame is the user's."""
    return next((_format_line(*frame) for frame in reversed(_frames(error)) if is_user_file(frame[0])), None)


def _frames(error: BaseException) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _format_text(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException as failure:  # __str__ is code of the user, too
        return f", whose text cannot be read: its __str__ raised {type(failure).__name__}"
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT].rstrip()}…"
    return f": {text}" if text else ""


def _find_place(error: BaseException, method: Callable[..., Any] | None) -> str:
    """Return the user's line that raised; without such a line, the line of the library and of the method."""
    if (line := find_user_line(error)) is not None:
        return line
    frames = [frame for frame in _frames(error) if not frame[0].startswith((PACKAGE + os.sep, "<"))]
    without_torch = [frame for frame in frames if not TORCH.search(frame[0])]
    places = [_format_line(*frame) for frame in without_torch[-1:] or frames[-1:]]
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    if method is not None and code is not None and is_user_file(code.co_filename):
        places.append(f"{method.__name__}() is at {_format_line(code.co_filename, code.co_firstlineno)}")
    return "; ".join(places)


def is_user_file(file: str) -> bool:
    """Return whether a file is code of the user: not of Paceline and not of a library."""
    return file.startswith(TASKS + os.sep) or not (file.startswith(PACKAGE + os.sep) or LIBRARY.search(file))


def _format_line(file: str, line: int) -> str:
    return f"{relative_path(file)}, line {line}"


def relative_path(file: str) -> str:
    """Return a path relative to the working directory if the file is inside of it; other paths unchanged."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def is_passed_through(error: BaseException) -> bool:
    """Return whether `UserCode` lets an exception pass, because it is not an error of the task.

    These are errors that Paceline raises itself, lost connections to other ranks, and the KeyboardInterrupt
    of a signal.
    """
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
        return not is_raised  # a signal arrives at any instruction except `raise`
    of_paceline = file.startswith(PACKAGE + os.sep) and not is_user_file(file) and file != TASK_MODULE
    if (
        isinstance(error, (RuntimeError, ConnectionError))
        and (of_paceline or TORCH.search(file))
        and LOST_PEER.search(str(error))
    ):
        return True
    inside = of_paceline and trace.tb_frame.f_code.co_name not in CALLED_BY_TORCH and trace is not outermost
    return (of_paceline and is_raised) or (inside and find_user_line(error) is None)


def _unwrap(error: BaseException) -> BaseException:
    """Return the cause if torch raised `error` for an exception of the user's code; else `error`.

    torch's engines raise a new exception whose text repeats all that they know of their tensors.
    """
    cause = error.__cause__
    frames = _frames(error)
    return (
        cause
        if cause is not None and frames and TORCH.search(frames[-1][0]) and find_user_line(cause) is not None
        else error
    )


def _is_raise(frame: FrameType, at: int) -> bool:
    return frame.f_code.co_code[at] == RAISE
