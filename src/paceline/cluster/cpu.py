"""The CPU, as lscpu or /proc/cpuinfo describe it, and the host memory."""

import contextlib
import platform
import re
from pathlib import Path

import psutil

from paceline.cluster.limits import memory_limit, usable_cores
from paceline.cluster.machine import Cpu, MemoryFacts
from paceline.cluster.run_tool import run
from paceline.units import is_whole_number

# Linux flag -> usual name. `sme` differs: a matrix extension on ARM, memory encryption on x86.
X86 = {
    "sse4_2": "SSE4.2",
    "avx": "AVX",
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "avx_vnni": "AVX VNNI",
}
X86_MATRIX = {"amx_bf16": "AMX BF16", "amx_int8": "AMX INT8", "amx_fp16": "AMX FP16"}
ARM = {"asimd": "NEON", "sve": "SVE", "sve2": "SVE2", "bf16": "BF16", "i8mm": "I8MM"}
ARM_MATRIX = {"sme": "SME", "sme2": "SME2"}
NUMA = re.compile(r"numa node\d+ cpu\(s\)")
IMPLIED = {  # extensions that need not be listed besides a newer extension
    "AVX": {"SSE4.2"},
    "AVX2": {"SSE4.2", "AVX"},
    "AVX-512": {"SSE4.2", "AVX", "AVX2"},
    "SVE2": {"SVE"},
}


def read_cpu() -> Cpu:
    """Return the CPU of this machine. Raises ClusterError if lscpu fails."""
    return parse(f"{run('lscpu') or ''}\n{_cpuinfo()}", platform.machine(), usable_cores())


def read_memory() -> MemoryFacts:
    """Return the memory of this machine and the limit of the control group."""
    memory = psutil.virtual_memory()
    limit = memory_limit()
    return MemoryFacts(
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=limit if limit is not None and limit < memory.total else None,
    )


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def parse(text: str, architecture: str, usable: int) -> Cpu:
    """Return the CPU that the output of lscpu or /proc/cpuinfo describes; the latter has fewer facts.

    architecture: used if the text has none. usable: number of cores that this process may use.
    """
    rows: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if match := re.match(r"([A-Z a-z()/-][^:]*?)\s*:\s*(.*)", line):
            last = match[1].strip().lower()
            rows.setdefault(last, match[2].strip())
        elif last and line.startswith(" "):  # continuation of a long row
            rows[last] += line.strip()
    flags = {*(rows.get("flags") or rows.get("features") or "").split()}
    vectors, matrices = (ARM, ARM_MATRIX) if "asimd" in flags else (X86, X86_MATRIX)
    vector = [name for flag, name in vectors.items() if flag in flags]
    implied = {name for newer in vector for name in IMPLIED.get(newer, ())}
    sockets, cores = _count_cores(text, rows)
    return Cpu(
        name=_known(rows.get("model name")) or _known(rows.get("cpu")),
        architecture=rows.get("architecture") or architecture,
        sockets=sockets,
        cores=cores,
        threads=_count_online(rows) or text.lower().count("processor\t:") or None,
        usable_cores=usable,
        # nodes without CPUs, such as the memory of a GPU, have none here
        numa=tuple(cpus for key, cpus in rows.items() if NUMA.fullmatch(key) and cpus),
        vector=tuple(name for name in vector if name not in implied),
        matrix=tuple(name for flag, name in matrices.items() if flag in flags),
        clock_Hz=_clock_Hz(rows),
        virtual=rows.get("hypervisor vendor"),
    )


def _count_cores(text: str, rows: dict[str, str]) -> tuple[int | None, int | None]:
    """Return the sockets and the physical cores. lscpu lists different cores of a processor separately."""
    kinds = [
        (int(cores), int(sockets))
        for cores, sockets in re.findall(
            r"^ *Core\(s\) per socket: *(\d{1,6})$\n^ *Socket\(s\): *(\d{1,6})$", text, re.M | re.ASCII
        )
    ]
    if len(kinds) > 1:
        return None, sum(cores * sockets for cores, sockets in kinds)
    sockets, per_socket = _number(rows, "socket(s)"), _number(rows, "core(s) per socket")
    return sockets, sockets * per_socket if sockets and per_socket else None


def _count_online(rows: dict[str, str]) -> int | None:
    """Return the number of logical CPUs, without those that are switched off."""
    listed = rows.get("on-line cpu(s) list", "")
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", listed, re.ASCII):
        return _number(rows, "cpu(s)")
    bounds = [part.split("-") for part in listed.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in bounds)


def _known(text: str | None) -> str | None:
    """Return a value of lscpu, or None for "-"."""
    return None if text in (None, "", "-") else text


def _clock_Hz(rows: dict[str, str]) -> float | None:
    """Return the maximum clock rate.

    A virtual machine may report only the current rate, or only the model's name.
    """
    for key in ("cpu max mhz", "cpu mhz"):
        with contextlib.suppress(ValueError):
            if 0 < (MHz := float(rows.get(key, ""))) < 1e5:
                return MHz * 1e6
    match = re.search(r"@ (\d+(?:\.\d+)?)\s*GHz", rows.get("model name", ""))
    return float(match[1]) * 1e9 if match else None


def _number(rows: dict[str, str], key: str) -> int | None:
    return int(rows[key]) if is_whole_number(rows.get(key, "")) else None
