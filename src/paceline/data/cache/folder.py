"""CacheFolder: a private folder on a disk or in the memory of a node, which its users remove together.

Each user holds a shared lock of the folder. Who gets the exclusive lock is alone, and may remove it. The
system releases the lock of a process that ends in any way, so a killed job is no user any more.
"""

import contextlib
import fcntl
import os
import stat
import sys
import tempfile
from pathlib import Path

from paceline.data.cache import janitor
from paceline.data.cache.janitor import DIRECTORY, is_named, remove_locked
from paceline.errors import DataError
from paceline.files import reason

SHARED_MEMORY = Path("/dev/shm")
# Environment variables with which sites name a disk of the node, before TMPDIR.
NODE_DISKS = ("SLURM_TMPDIR", "LOCAL_SCRATCH")


def choose_cache_folder(is_memory: bool, folder: str | None) -> Path:
    """Return the folder in which caches are stored. Raises DataError if there is none.

    folder: of the request; None: the disk of the node that the environment names.
    """
    if is_memory:
        place = SHARED_MEMORY
    elif folder is not None:
        place = Path(folder)
    else:
        named = [value for name in NODE_DISKS if os.path.isabs(value := os.environ.get(name, ""))]
        place = next((Path(value) for value in named if os.path.isdir(value)), Path(tempfile.gettempdir()))
    if not place.is_dir():
        hint = "use data.cache=scratch" if is_memory else "create it, or specify another data.cache_folder"
        raise DataError(f"the samples cannot be cached in {place}: no such folder; {hint}")
    return place


class CacheFolder:
    """An open folder for files of one cache. Raises DataError if the place cannot be used.

    place: in which `paceline-cache-UID` is created; only this user can open that. name: of the folder.
    """

    def __init__(self, place: Path, name: str):
        self.name = name
        self._base_path = place.resolve() / f"paceline-cache-{os.geteuid()}"
        self.path = self._base_path / name
        self._base = _open_private(self._base_path)
        try:
            self.folder = self._open()
        except OSError as error:
            os.close(self._base)
            raise DataError(
                f"cannot create a cache in {self._base_path}: {reason(error)}; specify another"
                " data.cache_folder, or use data.cache=off"
            ) from error

    def _open(self) -> int:
        """Return the folder with a shared lock. It may be removed at any time before it is locked."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.name, 0o700, dir_fd=self._base)
            try:
                folder = os.open(self.name, DIRECTORY, dir_fd=self._base)
            except FileNotFoundError:
                continue
            fcntl.flock(folder, fcntl.LOCK_SH)
            if is_named(self._base, self.name, folder):
                return folder
            os.close(folder)

    def open_file(self, name: str, flags: int) -> int:
        """Return a file descriptor of a file in the folder, never of a link. Raises OSError."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.folder)

    def remove_abandoned(self) -> None:
        """Remove the folders here that no process uses: jobs were killed together with their janitor."""
        for name in os.listdir(self._base):
            with contextlib.suppress(OSError):
                _remove_if_unused(self._base, name)

    def start_janitor(self) -> None:
        """Start a process that removes the folder when no process uses it."""
        null = [(os.POSIX_SPAWN_OPEN, file, os.devnull, os.O_RDWR, 0) for file in (0, 1, 2)]
        words = [sys.executable, "-I", "-S", str(janitor.__file__), str(self.path)]
        with contextlib.suppress(OSError):  # then only a job that is killed leaves its cache
            os.posix_spawn(sys.executable, words, {}, file_actions=null, setsid=True)

    def close(self) -> None:
        """End the use of the folder, and remove it if nobody else uses it."""
        with contextlib.suppress(OSError):  # somebody uses it
            fcntl.flock(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_locked(self._base, self.name, self.folder)
        fcntl.flock(self.folder, fcntl.LOCK_UN)  # of workers, too, which ended
        os.close(self.folder)
        os.close(self._base)


def _open_private(path: Path) -> int:
    """Return an open folder that only this user can open, after it was created if necessary."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, DIRECTORY)
    except OSError as error:
        raise DataError(
            f"cannot create a cache in {path}: {reason(error)}; specify another data.cache_folder, or use"
            " data.cache=off"
        ) from error
    status = os.fstat(folder)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        return folder
    os.close(folder)
    raise DataError(
        f"the samples are not cached in {path}, which other users can open; remove it, or specify another"
        " data.cache_folder"
    )


def _remove_if_unused(base: int, name: str) -> None:
    folder = os.open(name, DIRECTORY, dir_fd=base)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_locked(base, name, folder)
    finally:
        os.close(folder)
