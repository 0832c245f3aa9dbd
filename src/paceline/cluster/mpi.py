"""mpi4py, and the MPI on which it would run."""

import re
from importlib.metadata import PackageNotFoundError, version

from paceline.cluster.machine import BackendFacts
from paceline.cluster.run_tool import find_program, run


def find_mpi4py() -> BackendFacts:
    """Return the installed mpi4py and MPI. mpi4py is not imported, because that would start MPI."""
    package = _installed()
    launcher = find_program("mpirun") or find_program("mpiexec")
    missing = [] if package else ["pip install mpi4py"]
    if launcher is None:
        missing.append("install an MPI with mpirun (Debian: openmpi-bin) or load its module")
    library = parse_mpi_name(run(launcher, "--version")) if launcher else None
    versions = " with ".join(word for word in (package, library) if word)
    return BackendFacts(
        name="mpi4py", available=not missing, version=versions or None, note="; ".join(missing)
    )


def parse_mpi_name(text: str) -> str | None:
    """Return name and version of the MPI from the output of `mpirun --version`."""
    if match := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\) (\S+)", text):
        return f"Open MPI {match[1]}"
    if match := re.search(r"Intel\(R\) MPI Library.*? Version (\S+(?: Update \d+)?)", text):
        return f"Intel MPI {match[1]}"
    match = re.search(r"HYDRA build details:\s+Version:\s+(\S+)", text)
    return f"MPICH {match[1]}" if match else None


def _installed() -> str | None:
    try:
        return version("mpi4py")
    except PackageNotFoundError:
        return None
