"""Small file systems, and images of file systems, which tests mount."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mount_tmpfs(folder: Path, options: str):
    """Mount a file system in memory on `folder`. Skip the test if that is not possible."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def require_programs(*names: str) -> None:
    """Skip the test if a program is missing."""
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")


@contextmanager
def mount_squashfs(command: Sequence[str], at: Path) -> Iterator[None]:
    """Mount an image by `squashfuse IMAGE FOLDER`. Skip the test if that is not possible."""
    require_programs("squashfuse", "fusermount")
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"FUSE cannot be used here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["fusermount", "-u", command[-1]], cwd=at, check=True)
