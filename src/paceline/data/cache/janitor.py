"""A program that removes a folder of cached samples when the last process that uses it has ended.

It waits for the lock of the folder, which the system releases when a process ends, even by `kill -9`. It is
run by its path, so it imports no other file of Paceline: `python -I -S janitor.py FOLDER`.
"""

import fcntl
import os
import secrets
import signal
import sys

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_named(base: int, name: str, folder: int) -> bool:
    """Return whether a name in an open folder still belongs to another open folder."""
    try:
        return os.path.samestat(os.fstat(folder), os.stat(name, dir_fd=base, follow_symlinks=False))
    except FileNotFoundError:
        return False


def remove_locked(base: int, name: str, folder: int) -> None:
    """Remove a folder of files, whose exclusive lock this process holds.

    It is renamed first, so that nobody opens a folder of which only some files exist.
    """
    if not is_named(base, name, folder):
        return
    trash = f"{secrets.token_hex(8)}.removed"
    os.rename(name, trash, src_dir_fd=base, dst_dir_fd=base)
    for file in os.listdir(folder):
        os.unlink(file, dir_fd=folder)
    os.rmdir(trash, dir_fd=base)


def main(path: str) -> None:
    """Wait until no process uses the folder, and remove it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, name = os.path.split(path)
    try:
        base = os.open(parent, DIRECTORY)
        folder = os.open(name, DIRECTORY, dir_fd=base)
        fcntl.flock(folder, fcntl.LOCK_EX)
        remove_locked(base, name, folder)
    except OSError:  # somebody else has removed it
        return


if __name__ == "__main__":
    main(sys.argv[1])
