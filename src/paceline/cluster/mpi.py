"""MPI beside PyTorch: mpi4py, and the MPI that it would run on."""

import re
import shutil
from importlib.metadata import PackageNotFoundError, version

from paceline.cluster.machine import BackendFacts
from paceline.cluster.run_tool import run


def mpi4py() -> BackendFacts:
    """Importing it would start MPI, so only what is installed is looked at."""
    package = _installed()
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    missing = [] if package else ["pip install mpi4py"]
    if launcher is None:
        missing.append("install an MPI with mpirun (Debian: openmpi-bin) or load a module that has one")
    library = mpi_name(run(launcher, "--version")) if launcher else None
    found = " with ".join(word for word in (package, library) if word)
    return BackendFacts(name="mpi4py", available=not missing, version=found or None, note="; ".join(missing))


def mpi_name(text: str) -> str | None:
    """From what `mpirun --version` says."""
    if found := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\) (\S+)", text):
        return f"Open MPI {found[1]}"
    if found := re.search(r"Intel\(R\) MPI Library.*? Version (\S+(?: Update \d+)?)", text):
        return f"Intel MPI {found[1]}"
    found = re.search(r"HYDRA build details:\s+Version:\s+(\S+)", text)
    return f"MPICH {found[1]}" if found else None


def _installed() -> str | None:
    try:
        return version("mpi4py")
    except PackageNotFoundError:
        return None
