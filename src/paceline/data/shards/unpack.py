"""Unpack shards into the folder that was packed: names, contents, permissions and times."""

import contextlib
import fcntl
import os
import shutil
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.shards.shard_files import CHUNK_BYTES, ShardFiles
from paceline.errors import DataError
from paceline.files import reason
from paceline.units import format_bytes


@dataclass(frozen=True)
class UnpackResult:
    """What `unpack` did."""

    files: int
    bytes: int
    seconds: float


def unpack(
    source: Path, out: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> UnpackResult:
    """Write the files of tar shards below the new folder `out`, and return what was done.

    Contents are compared with the checksums of the index. `out` appears when all of it is written; until
    then it is a hidden folder beside it, which the next call deletes if this is killed. Raises DataError,
    also for a member whose name leads out of the folder, and for links and devices.
    """
    start = time.perf_counter()
    files = ShardFiles(source)
    index = files.index
    size = int(index.sizes.sum())
    with _new_folder(out) as folder:
        free = shutil.disk_usage(folder).free
        if size > free:
            raise DataError(
                f"{out.absolute().parent} has {format_bytes(free)} free, but the files need"
                f" {format_bytes(size)}; specify a folder on another disk"
            )
        folders: list[tuple[Path, tarfile.TarInfo]] = []
        done = 0
        for shard in index.shards:
            for member in _members(files.folder / shard.name):
                target = folder / check_member_name(member, files.folder / shard.name)
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    folders.append((target, member))
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                _write_file(files, done, member, target)
                done += 1
                on_progress(done, len(index.names))
        for target, member in reversed(folders):  # a folder may forbid writing into it
            target.chmod(member.mode & 0o777)
    return UnpackResult(len(index.names), size, time.perf_counter() - start)


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` at the end of the context, and is deleted after an error."""
    if os.path.lexists(out) and (not out.is_dir() or out.is_symlink() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not an empty folder; specify a new folder")
    hidden = out.absolute().parent / f".{out.absolute().name}.unpacking"
    lock = None
    try:
        hidden.mkdir(exist_ok=True)
        lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in hidden.iterdir():  # of a call that was killed
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        try:
            yield hidden
            hidden.replace(out)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except BlockingIOError:
        raise DataError(
            f"another process unpacks into {out}; wait for it, or specify another folder"
        ) from None
    except OSError as error:
        raise DataError(f"cannot write {error.filename or out}: {reason(error)}") from error
    finally:
        if lock is not None:
            os.close(lock)


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(path, "r:") as tar:
            yield from tar
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"cannot read the shard {path}: {error}; copy the shard again") from error


def check_member_name(member: tarfile.TarInfo, shard: Path) -> str:
    """Return the name of a file or folder of a shard. Raises DataError for links, devices and `..`."""
    if not (member.isreg() or member.isdir()):
        raise DataError(f"{member.name} in {shard} is a link or a device; unpack it by tar if you trust it")
    if member.name.startswith("/") or ".." in member.name.split("/") or "\0" in member.name:
        raise DataError(
            f"{member.name!r} in {shard} leads out of the folder; unpack it by tar if you trust it"
        )
    return member.name


def _write_file(files: ShardFiles, number: int, member: tarfile.TarInfo, target: Path) -> None:
    index = files.index
    shard = files.folder / index.shards[index.find_shard(number)].name
    is_same = index.offsets[number] == member.offset_data and index.sizes[number] == member.size
    if not is_same or os.fsencode(member.name) != index.names[number]:
        raise DataError(f"{shard} differs from {index.path} at {member.name}; copy the shard again")
    crc, offset, end = 0, member.offset_data, member.offset_data + member.size
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        while offset < end:
            data = files.read_bytes(number, min(CHUNK_BYTES, end - offset), offset)
            if not data:
                break
            crc, offset = zlib.crc32(data, crc), offset + len(data)
            file.write(data)
        if crc != index.crcs[number]:
            raise DataError(
                f"{member.name} in {shard} is damaged: its checksum differs from {index.path};"
                " copy or pack the shard again"
            )
        file.flush()
        os.fchmod(file.fileno(), member.mode & 0o777)
        os.utime(file.fileno(), (member.mtime, member.mtime))
