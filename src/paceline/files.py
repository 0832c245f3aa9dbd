"""Read and write files in folders where other users may have placed links, devices or pipes."""

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
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
    """Raise `kind` unless `path` is free or a regular file. A link is refused, even to a regular file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.absolute().parent.is_dir():
            raise kind(f"cannot write {path}: no such folder: {path.parent}; create it first") from None
        return
    except (OSError, ValueError) as error:
        raise kind(f"cannot write {path}: {reason(error)}") from error
    if not stat.S_ISREG(mode):
        actual = KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise kind(
            f"cannot write {path}: it is {actual}, and only regular files are replaced; specify another file"
        )


@contextlib.contextmanager
def replaced(path: Path, kind: type[Error] = RunError, suffix: str | None = None) -> Iterator[Path]:
    """Yield the path of an empty temporary file in the folder of `path`.

    The file replaces `path` at the end of the context, or is deleted after an error. Its name is random,
    so that another user cannot place a link there. Raises `kind` if the system refuses a write.
    suffix: of the temporary file; by default that of `path`.
    """
    check_target(path, kind)
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix if suffix is None else suffix}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield temporary
        check_target(path, kind)
        temporary.replace(path)
    except OSError as error:
        raise kind(f"cannot write {path}: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which is free or an empty folder.

    The folder becomes `path` at the end of the context, or is deleted after an error. Raises RunError if the
    system refuses a write.
    """
    temporary = path.absolute().with_name(f".{secrets.token_hex(8)}")
    try:
        temporary.mkdir()
        yield temporary
        if path.is_dir():
            path.rmdir()
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_whole(path: Path, text: str, kind: type[Error] = RunError) -> None:
    """Write a file atomically. Raises `kind` if it cannot be written."""
    with replaced(path, kind) as temporary:
        temporary.write_text(text, encoding="utf-8")


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it. Raises OSError for a pipe or a device, which could block the reader."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "it is not a regular file", str(path))
    return os.fdopen(file, "rb")


def append_whole(file: int, data: bytes) -> bool:
    """Append data to an open file, and return whether it was written. A full disk leaves no part of it."""
    try:
        written = os.write(file, data)
    except OSError:
        return False
    if 0 < written < len(data):
        os.ftruncate(file, os.fstat(file).st_size - written)
    return written == len(data)


def end_of_lines(file: int) -> int:
    """Return the position after the last newline. The file is read from its end."""
    end, size = os.fstat(file).st_size, min(2**12, 2**18)  # usually the last byte is a newline
    while end:
        begin, size = max(0, end - size), 2**18
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def has_open(pid: int, path: Path) -> bool:
    """Return whether a process of this user has a file open.

    Check this before a signal to a process whose number comes from a file: another user may have written it.
    """
    import psutil

    with contextlib.suppress(psutil.Error, OSError, ValueError):
        return any(Path(file.path).samefile(path) for file in psutil.Process(pid).open_files())
    return False


def write_secret(path: Path, content: str | bytes) -> None:
    """Write a file that only this user can read. Raises OSError."""
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


def read_own(path: Path) -> str:
    """Return the text of a file that this user or root owns. Raises OSError; RunError for other owners."""
    return read_own_bytes(path).decode()


def read_own_bytes(path: Path) -> bytes:
    """Return the content of a file that this user or root owns. The errors are those of `read_own`."""
    with open_regular(path) as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (os.geteuid(), 0):
            raise RunError(
                f"{path} belongs to user {owner}, who can write to {path.parent};"
                f" remove that permission: chmod go-w {path.parent}"
            )
        return file.read()


def find_cache_folder(kind: str) -> Path | None:
    """Return the folder of this user for copies of one kind; None if there is none that only they can open.

    XDG_CACHE_HOME counts if it is set. Otherwise it is a folder of TMPDIR, because home folders of clusters
    are often on the network.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = (
        Path(cache) / "paceline" / kind
        if cache and os.path.isabs(cache)
        else Path(tempfile.gettempdir()) / f"paceline-{kind}-{os.geteuid()}"
    )
    try:
        folder.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return None
    is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return folder if stat.S_ISDIR(status.st_mode) and is_private else None


def reason(error: Exception) -> str:
    """Return the text of an exception; of an OSError only the message of the system."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def is_plain_name(name: Any) -> bool:
    """Return whether a value is the name of a file inside a folder, without a path to other folders."""
    return isinstance(name, str) and name.isprintable() and "/" not in name and name not in ("", ".", "..")
