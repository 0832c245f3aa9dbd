"""Small file systems for the tests of full disks."""

import subprocess
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
