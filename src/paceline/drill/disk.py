"""A small disk in memory that can be filled.

It is mounted in the namespace of one process of ours, and visible to others only through its folder in /proc.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

FILLER = "filler"


class SmallDisk:
    """A context with a small disk at `path`. Raises OSError if the system does not permit the mount."""

    def __init__(self, at: Path, bytes: int):
        self.at, self.bytes = at.absolute(), bytes

    def __enter__(self) -> "SmallDisk":
        if shutil.which("unshare") is None:
            raise OSError("mounting a small disk requires the command unshare, which is not on PATH")
        self.at.mkdir(parents=True)
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        # This process holds the mount. It ends with ours, since cat then reaches the end of its input.
        mount = 'mount -t tmpfs -o size="$0" tmpfs "$1" && echo mounted && exec cat'
        self._holder = subprocess.Popen(
            ["unshare", "--mount", *user, "sh", "-c", mount, str(self.bytes), str(self.at)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "mounted\n":
            lines = self._holder.stderr.read().strip().splitlines()
            self.__exit__()
            reason = lines[-1] if lines else "unshare printed no reason"
            raise OSError(f"a small disk cannot be mounted here: {reason}")
        return self

    def __exit__(self, *error: object) -> None:
        self._holder.communicate()
        with suppress(OSError):
            self.at.rmdir()

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{self.at}")

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with suppress(OSError), open(self.path / FILLER, "wb", buffering=0) as file:
            while file.write(bytes(2**16)):
                pass

    def empty(self) -> None:
        (self.path / FILLER).unlink()
