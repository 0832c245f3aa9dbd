"""The origin of a run."""

import getpass
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline.version import __version__


def collect_provenance() -> dict[str, Any]:
    """Return the origin of a run that starts now, for provenance.json. Unknown values are left out."""

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(
                ["git", *words], capture_output=True, text=True, check=True, timeout=5
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    from paceline.cluster.cpu import read_cpu

    facts = {
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": platform.node(),
        "user": getpass.getuser(),
        "system": platform.platform(),
        "processor": read_cpu().name or None,
        "python": platform.python_version(),
        "packages": {"paceline": __version__}
        | {name: number for name in ("torch", "numpy") if (number := installed(name))},
        "git_revision": git("rev-parse", "HEAD"),
        "git_changed": bool(changed)
        if (changed := git("status", "--porcelain", "--untracked-files=no")) is not None
        else None,
    }
    return {key: value for key, value in facts.items() if value is not None}
