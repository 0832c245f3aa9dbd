"""A small disk in memory that can be filled: a mount that only a process of ours sees, and whoever goes through /proc of that process."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

FILLER = "filler"


class SmallDisk:
    """`path` leads to it as long as the context lasts. Raises OSError where such mounts are not allowed."""

    def __init__(self, at: Path, bytes: int):
        self.at, self.bytes = at.absolute(), bytes

    def __enter__(self) -> "SmallDisk":
        if shutil.which("unshare") is None:
            raise OSError("there is no unshare to mount a small disk with")
        self.at.mkdir(parents=True)
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        # It holds the mount, and ends with us: then cat has read all that it gets.
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
            said = self._holder.stderr.read().strip().splitlines()
            self.__exit__()
            raise OSError(
                f"a small disk cannot be mounted here: {said[-1] if said else 'unshare says nothing'}"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._holder.communicate()
        with suppress(OSError):
            self.at.rmdir()

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{self.at}")

    def fill(self) -> None:
        """To the last byte."""
        with suppress(OSError), open(self.path / FILLER, "wb", buffering=0) as file:
            while file.write(bytes(2**16)):
                pass

    def empty(self) -> None:
        (self.path / FILLER).unlink()
