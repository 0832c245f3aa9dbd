"""A bundle: one tar file with the wheels of an environment, their digests, and a script to install them."""

import hashlib
import io
import platform
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import NamedTuple

from paceline.errors import LaunchError
from paceline.files import replaced
from paceline.launch.environment.wheel import pack_wheel

FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)\.tar", re.ASCII)
LOCK, SCRIPT = "requirements.lock", "install.sh"

_INSTALL = """#!/bin/sh
# Create a virtual environment with these packages, without a network: ./install.sh FOLDER
# PYTHON names another Python of the same version.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python@VERSION@}
[ $# = 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
[ ! -e "$1" ] || { echo "$0: $1 exists; specify a new folder" >&2; exit 2; }
if [ "$("$python" -I -c 'import platform
print(platform.machine(), *platform.python_version_tuple()[:2])' 2> /dev/null)" != "@MACHINE@" ]; then
    echo "$0: these packages require Python @VERSION@ on @ARCHITECTURE@; load its module, or set PYTHON" >&2
    exit 2
fi
# Packages and settings of other environments must not count: -I, --isolated.
trap 'rm -rf "$1"; echo "$0: $1 was not created" >&2; exit 1' EXIT
trap 'exit 1' HUP INT TERM
"$python" -I -m venv "$1"
"$1/bin/python" -I -m pip --isolated install --quiet --disable-pip-version-check --no-index --no-deps \\
    --require-hashes --find-links "$here/wheels" --requirement "$here/requirements.lock"
trap - EXIT
echo "to use it: source $1/bin/activate"
"""


class BundleSize(NamedTuple):
    """What a bundle has."""

    num_packages: int
    bytes: int


def check_bundle_name(path: Path) -> str:
    """Return the folder of a bundle inside of its tar file. Raises LaunchError."""
    match = FILE.fullmatch(path.name)
    if match is None:
        raise LaunchError(
            f"the bundle must be a file such as env.tar, of letters, digits, - and _, got {path.name!r}"
        )
    return match[1]


def render_install_script() -> str:
    """Return the script that installs the wheels on a similar machine."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = {
        "VERSION": version,
        "MACHINE": f"{platform.machine()} {version.replace('.', ' ')}",
        "ARCHITECTURE": platform.machine(),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: words[match[1]], _INSTALL)


def write_bundle(
    path: Path, packages: Mapping[str, Distribution], on_package: Callable[[int, int], None]
) -> BundleSize:
    """Write the wheels of installed packages as a bundle. pip is left out: a new environment has it.

    on_package: called with the number of finished packages and of all. Raises LaunchError.
    """
    root = check_bundle_name(path)
    chosen = {name: package for name, package in packages.items() if name != "pip"}
    lock = []
    with (
        replaced(path, LaunchError) as temporary,
        tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".bundle-") as folder,
        tarfile.open(temporary, "w") as archive,
    ):
        for done, (name, package) in enumerate(sorted(chosen.items())):
            on_package(done, len(chosen))
            wheel = pack_wheel(package, Path(folder))
            with wheel.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                _add(archive, f"{root}/wheels/{wheel.name}", file, wheel.stat().st_size)
            wheel.unlink()
            lock.append(f"{name}=={package.version} --hash=sha256:{digest}\n")
        for name, text, mode in (
            (LOCK, "".join(lock), 0o644),
            (SCRIPT, render_install_script(), 0o755),
        ):
            content = text.encode()
            _add(archive, f"{root}/{name}", io.BytesIO(content), len(content), mode)
    return BundleSize(len(chosen), path.stat().st_size)


def _add(
    archive: tarfile.TarFile, name: str, file: "io.BufferedIOBase", size: int, mode: int = 0o644
) -> None:
    """Add a file without its date and owner, so that equal environments make equal bundles."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, mode
    archive.addfile(info, file)
