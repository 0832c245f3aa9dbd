"""Run a tool of the machine and return its output."""

import atexit
import contextlib
import os
import selectors
import signal
import stat
import subprocess
import time
from pathlib import Path

from paceline.errors import ClusterError
from paceline.units import format_bytes, without_controls

MAX_BYTES = 2**24  # of the output of a tool; that of 10,000 modules has less than 1 MiB
SHORT_LINES = 3  # a message of at most this many lines is shown whole, else its last line
MAX_MESSAGE = 300  # characters
REAP_S = 1.0  # to wait for a killed tool: one that waits for a dead device does not end

_running: set["subprocess.Popen[bytes]"] = set()


def run(*words: str, good: frozenset[int] = frozenset({0}), limit_s: float = 10.0) -> str:
    """Return the standard output of a tool, or "" if the tool is not installed.

    good: exit statuses that are not failures.
    Raises ClusterError if the tool fails, does not end within `limit_s` seconds, prints more than
    MAX_BYTES, or could be a program that another user put on PATH.
    """
    program = find_program(words[0])
    if program is None:
        return ""
    try:
        process = subprocess.Popen(
            [program, *words[1:]],
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that `_kill` reaches what the tool starts
        )
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ClusterError(f"{words[0]} cannot be run: {error.strerror}") from error
    _running.add(process)
    try:
        output, errors = _read(process, words[0], limit_s)
    except BaseException:
        _kill(process)
        raise
    finally:
        _running.discard(process)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    if process.returncode not in good:
        message = _shorten(errors) or _shorten(output)
        raise ClusterError(
            f"{words[0]} failed with exit status {process.returncode}" + (f": {message}" if message else "")
        )
    return output


def find_program(name: str) -> str | None:
    """Return the path of a program in the absolute folders of PATH, or None.

    Raises ClusterError for a program that another user could have put there: a login node is shared.
    """
    if os.sep in name:
        return name
    for folder in os.get_exec_path():
        path = Path(folder, name)
        if os.path.isabs(folder) and os.access(path, os.X_OK) and path.is_file():
            if (reason := _find_danger(path)) is not None:
                raise ClusterError(f"{path} was not run, because {reason}; remove {folder} from PATH")
            return str(path)
    return None


def _find_danger(path: Path) -> str | None:
    """Return why another user than root could have written a program, or None."""
    file, folder = path.stat(), path.parent.stat()
    if file.st_mode & stat.S_IWOTH:
        return "every user can write it"
    if folder.st_mode & stat.S_IWOTH and path.lstat().st_uid not in (0, os.geteuid()):
        return f"every user can write {path.parent}, and it belongs to another user"
    return None


def _read(process: "subprocess.Popen[bytes]", name: str, limit_s: float) -> tuple[str, str]:
    """Return output and errors of a tool that ends. Raises ClusterError."""
    end = time.monotonic() + limit_s
    assert process.stdout is not None
    assert process.stderr is not None
    found = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in found:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            if (left_s := end - time.monotonic()) <= 0:
                raise ClusterError(f"{name} did not answer within {limit_s:g} s")
            for key, _ in selector.select(left_s):
                block = os.read(key.fd, 2**16)
                found[key.fileobj] += block  # type: ignore[index]
                if not block:
                    selector.unregister(key.fileobj)
            if sum(map(len, found.values())) > MAX_BYTES:
                raise ClusterError(f"{name} printed more than {format_bytes(MAX_BYTES)}")
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{name} did not answer within {limit_s:g} s") from None
    output, errors = (bytes(part).decode(errors="replace") for part in found.values())
    return output.replace("\r\n", "\n"), errors


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a tool with what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)


def _shorten(text: str) -> str:
    """Return a message in one line: a short text whole, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    joined = "; ".join(lines if len(lines) <= SHORT_LINES else lines[-1:])
    return without_controls(joined if len(joined) <= MAX_MESSAGE else joined[:MAX_MESSAGE] + "…")


@atexit.register
def _kill_all() -> None:
    """Kill the tools that still run when the program ends, for example at Ctrl-C."""
    for process in tuple(_running):
        _kill(process)
