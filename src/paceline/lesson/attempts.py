"""What the check of an exercise calls: it runs a student's solution, which may be wrong in any way."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from paceline.errors import Error, TaskError
from paceline.lesson.outputs import describe_value
from paceline.lesson.ranks import num_ranks
from paceline.user_code import LOST_PEER, describe_exception, find_user_line, is_user_file, relative_path

STUCK_S = 20.0  # after which a solution has no end
HINT = (
    "is there a loop without an end, a message without a receiver, or a collective that only some ranks call?"
)


def run_solution(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank, and return the results by rank.

    Raises TaskError with the line of the student's file, for an exception, and for ranks that do not end.
    """
    from paceline.launch.call_on_ranks import spawn

    with TemporaryDirectory() as folder, no_time_limit():
        try:
            return spawn(_attempt, num_ranks(), Path(folder), STUCK_S, function, args, timeout_s=STUCK_S)
        except Error as error:
            places = {int(path.name): path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}
            if not any(places.values()):
                raise
            shown = [
                f"rank {rank} {f'is at {place}' if place else 'has returned'}"
                for rank, place in sorted(places.items())
            ]
            raise TaskError(f"no end after {STUCK_S:.0f} s: {', '.join(shown)}; {HINT}") from error


def _attempt(folder: Path, stuck_s: float, function: Callable[..., Any], args: Any) -> Any:
    """Call a function on this rank. Write where it is stuck, or nothing when it has returned."""
    import torch.distributed as dist

    rank = dist.get_rank()
    place = folder / str(rank)
    begin = time.monotonic()
    try:
        with time_limit(stuck_s + 1):  # a rank that waits for others has its timeout before
            result = function(*args)
    except NoEndError as error:
        place.write_text(error.line, encoding="utf-8")
        raise TaskError(f"rank {rank} does not end") from None
    except BaseException as error:  # of the student's code
        if LOST_PEER.search(str(error)):
            # a rank that has returned waits, too, and closes its connections
            if time.monotonic() - begin > 0.9 * stuck_s and (line := find_user_line(error)):
                place.write_text(line, encoding="utf-8")
            raise
        text = describe_failure(error)
        raise TaskError(
            text if isinstance(error, Error | NotImplementedError) else f"rank {rank}: {text}"
        ) from None
    place.touch()
    return result


def describe_failure(error: BaseException) -> str:
    """Return a sentence about an exception of the student's code, or that of the check."""
    if isinstance(error, NotImplementedError):
        line = find_user_line(error)
        return f"not written yet: {line or 'a function'} raises NotImplementedError"
    if isinstance(error, NoEndError):
        return f"no end after {STUCK_S:.0f} s: {error.line}; is there a loop without an end?"
    is_check = isinstance(error, AssertionError) and find_user_line(error) is None
    return str(error) if is_check or isinstance(error, Error) else describe_exception(error)


class NoEndError(BaseException):
    """Raised in a solution that has no end. A student's `except Exception` does not catch it."""

    def __init__(self, line: str):
        super().__init__(line)
        self.line = line


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise NoEndError at the line of the student's code that runs after these seconds."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            file = frame.f_code.co_filename
            if is_user_file(file):
                raise NoEndError(f"{relative_path(file)}, line {frame.f_lineno}")
            frame = frame.f_back

    handler = signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, if a bare `except` has caught it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def no_time_limit() -> Iterator[None]:
    """Stop the clock of `time_limit` inside the context."""
    before = signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def require(condition: bool, sentence: str, got: Any) -> None:
    """Raise TaskError with a sentence about what a function must return, if the condition is false."""
    if not condition:
        shape = getattr(got, "shape", None)
        shown = describe_value(got) if shape is None else f"a tensor of shape {tuple(shape)}"
        raise TaskError(f"{sentence}, got {shown}")


def require_tensor(name: str, got: Any, shape: tuple[int, ...]) -> None:
    """Raise TaskError if the result of a function is not a tensor of this shape."""
    import torch

    is_right = isinstance(got, torch.Tensor) and tuple(got.shape) == shape
    require(is_right, f"{name} must return a tensor of shape {shape}", got)


def find_methods(operation: str) -> list[str]:
    """Return the methods of process groups that do an operation, such as `allgather`, in any form.

    Their names depend on the version of torch: `_allgather_base` in 2.11 is `all_gather_single` in 2.13.
    """
    import torch.distributed as dist

    has_forms = operation in ("allreduce", "allgather", "reducescatter", "alltoall")
    plain = {name: name.replace("_", "") for name in dir(dist.ProcessGroup)}
    return [
        name
        for name, text in plain.items()
        if text == operation or (has_forms and text.startswith(operation))
    ]


def forbid(sentence: str, *operations: str) -> None:
    """Let operations of process groups raise TaskError on this rank, in all ways to call them."""
    import torch.distributed as dist

    def refuse(*args: Any, **options: Any) -> None:
        raise TaskError(sentence)

    for name in [name for operation in operations for name in find_methods(operation)]:
        setattr(dist.ProcessGroup, name, refuse)
