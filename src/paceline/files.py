"""Read and write files where other users may have put something else: a link, a device, a pipe, a file that was not finished."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from paceline.errors import Error, RunError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def check_target(path: Path, kind: type[Error] = RunError) -> None:
    """Raise `kind` unless a file can be written to `path`: only nothing or a regular file is replaced, also no link to one."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.absolute().parent.is_dir():
            raise kind(
                f"cannot write {path}: there is no folder {path.parent} for {path.name}; make it first"
            ) from None
        return
    except (OSError, ValueError) as error:
        raise kind(f"cannot write {path}: {reason(error)}") from error
    if not stat.S_ISREG(mode):
        found = KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise kind(
            f"cannot write {path}: it is {found}, and only regular files are replaced; name another file"
        )


@contextlib.contextmanager
def replaced(path: Path, kind: type[Error] = RunError) -> Iterator[Path]:
    """Give an empty file beside `path` to write to. It takes the place of `path` at the end, or is deleted after an error.

    Its name cannot be guessed, so that nobody can have put a link there. Raises `kind` for what the system refuses."""
    check_target(path, kind)
    beside = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield beside
        check_target(path, kind)
        beside.replace(path)
    except OSError as error:
        raise kind(f"cannot write {path}: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def write_whole(path: Path, text: str, kind: type[Error] = RunError) -> None:
    """Write a file whole or not at all. Raises `kind` where it cannot be written."""
    with replaced(path, kind) as beside:
        beside.write_text(text, encoding="utf-8")


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read it. Raises OSError for a pipe or a device, which could keep the reader for ever."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "it is no regular file", str(path))
    return os.fdopen(file, "rb")


def has_open(pid: int, path: Path) -> bool:
    """Whether a process of this user has a file open: its number may have been written by somebody else, who would have another one hit."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError, ValueError):
        return any(Path(file.path).samefile(path) for file in psutil.Process(pid).open_files())
    return False


def write_secret(path: Path, text: str) -> None:
    """Write a file that nobody else can read. Raises OSError."""
    beside = path.with_name(f".{secrets.token_hex(8)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as writing:
        writing.write(text)
    beside.replace(path)


def read_own(path: Path) -> str:
    """Read a file of this user, and no other. Raises OSError, RunError for a file that somebody else has put there."""
    with open_regular(path) as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (os.geteuid(), 0):
            raise RunError(
                f"{path} is of user {owner}, who can write in {path.parent}, too; keep others out: chmod go-w {path.parent}"
            )
        return file.read().decode()


def reason(error: Exception) -> str:
    """The system's own words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def is_plain_name(name: Any) -> bool:
    """Whether it names a file of a folder, and nothing outside of it."""
    return isinstance(name, str) and name.isprintable() and "/" not in name and name not in ("", ".", "..")
