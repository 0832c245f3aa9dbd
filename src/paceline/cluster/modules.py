"""The modules that a site offers, as Environment Modules and Lmod list them: those that trainings need."""

import re
from collections.abc import Mapping

from paceline.cluster.machine import OfferedModule
from paceline.cluster.run_tool import run

# Modules by what they contain: patterns of the first part of a name, without case.
KINDS: Mapping[str, str] = {
    "CUDA": r"cuda(toolkit|-toolkit)?|nvhpc(-.*)?",
    "ROCm": r"rocm(-.*)?|hip",
    "MPI": r"(openmpi|ompi|mpich|mvapich2?|intelmpi|impi|hpcx|cray-mpich)(-.*)?",
    "Python": r"(c?python3?|anaconda\d*|miniconda\d*|miniforge\d*|mamba|conda)(-.*)?",
    "PyTorch": r"(py)?torch(-.*)?",
    "NCCL": r"(nccl|rccl|aws-ofi-.*)",
    "containers": r"(apptainer|singularity(ce|-ce|pro)?|podman)",
}
# Both systems print the list to standard error. The status distinguishes a machine without modules.
LIST = "type module > /dev/null 2>&1 || exit 0; module -t avail 2>&1"


def list_offered() -> dict[str, tuple[OfferedModule, ...]]:
    """Return the modules that a login shell can load, by what they contain, in order of their versions.

    Raises ClusterError if the module system fails or does not answer.
    """
    return choose_modules(list_modules())


def list_modules() -> list[OfferedModule]:
    """Return all modules that a login shell can load; none without a module system. Raises ClusterError."""
    return parse_modules(run("bash", "-lc", LIST))


def parse_modules(text: str) -> list[OfferedModule]:
    """Return the modules in the output of `module -t avail`.

    Folders end with a colon. Lmod adds names without versions, `cuda/`, and names `latest(@cuda/12.8)`.
    Environment Modules marks with `(default)`, lists other names of a module in brackets, and adds tags such
    as `<L>`.
    """
    modules = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        match = re.fullmatch(r"\s*([^\s()@:<>]+[^\s()@:/<>])(?:\(([^()]*)\))?(?:\s*<[^<>]*>)?\s*", line)
        if match is None or match[1].startswith("/") or (match[2] or "").startswith("@"):
            continue
        modules.append(OfferedModule(name=match[1], is_default=_has_default(match[2] or "")))
    return modules


def _has_default(symbols: str) -> bool:
    return "default" in symbols.split(":") or symbols in ("D", "L,D")


def choose_modules(modules: list[OfferedModule]) -> dict[str, tuple[OfferedModule, ...]]:
    """Return the modules that trainings need, by what they contain, in order of their versions."""
    found: dict[str, set[OfferedModule]] = {}
    for module in modules:
        for what, pattern in KINDS.items():
            if any(re.fullmatch(pattern, part, re.I) for part in _list_stems(module.name)):
                found.setdefault(what, set()).add(module)
    return {
        what: tuple(sorted(found[what], key=lambda module: _version_key(module.name)))
        for what in KINDS
        if what in found
    }


def propose_modules(
    offered: Mapping[str, tuple[OfferedModule, ...]], cuda: str | None, rocm: str | None
) -> list[str]:
    """Return the names of modules for a site file: compilers of kernels for torch, and an MPI.

    cuda, rocm: the versions for which torch is built; None: it is not. A module fits if its first number is
    the same. Of several, the default is chosen, else the newest.
    """
    proposed = []
    for what, version in (("CUDA", cuda), ("ROCm", rocm), ("MPI", None)):
        fitting = [each for each in offered.get(what, ()) if what == "MPI" or _has_major(each.name, version)]
        if fitting:
            default = next((each for each in fitting if each.is_default), None)
            proposed.append((default or fitting[-1]).name)
    return proposed


def _has_major(name: str, version: str | None) -> bool:
    """Return whether the version in the name of a module begins with the first number of a version."""
    number = re.search(r"\d+", name.rpartition("/")[2])
    return version is not None and number is not None and number[0] == version.partition(".")[0]


def _list_stems(name: str) -> list[str]:
    """Return the names of a module without its version: compilers/gcc/openmpi/4.1 has `openmpi`, too."""
    parts = name.split("/")
    return parts[:-1] if len(parts) > 1 else parts


def _version_key(name: str) -> list[tuple[int, int, str]]:
    """Return a key by which 12.10 follows 12.8."""
    return [
        (1, int(part), "") if part.isdigit() else (0, 0, part.lower())
        for part in re.findall(r"\d+|[^\d./-]+", name)
    ]
