"""Probe this machine. All sources run concurrently for a limited time, and none loads the machine."""

import errno
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cluster import cpu, directories, environment, gpus, modules, mpi, network, topology
from paceline.cluster.limits import usable_cores
from paceline.cluster.machine import Accelerator, Directory, Machine, Torch
from paceline.errors import ClusterError

LIMIT_S = 15.0  # for a source; a tool that it runs has 10
TORCH_LIMIT_S = 60.0  # allows a first import from a slow file system
NVIDIA, AMD = "NVIDIA's GPUs", "AMD's GPUs"
MODULES = "the module system"


def probe(paths: Sequence[Path] = (), torch: subprocess.Popen[str] | None = None) -> Machine:
    """Return the facts of this machine. Sources that do not answer in time are listed in `silent`.

    paths: directories to examine, instead of the usual directories.
    torch: the process from `backends.start`, which a caller can start before it imports this module;
        None: neither PyTorch nor the module system is described.
    """
    backends = ParallelSources(
        # planning does not read the module system, which takes seconds on large sites
        {"PyTorch": partial(_torch, torch), MODULES: modules.list_offered} if torch else {}
    )
    sources = ParallelSources(
        {
            "the CPU": cpu.read_cpu,
            NVIDIA: gpus.list_nvidia,
            AMD: gpus.list_amd,
            "NVIDIA's topology": topology.read_nvidia,
            "AMD's topology": topology.read_amd,
            "the network": network.list_interfaces,
            "RDMA": network.list_rdma,
            "MPI": mpi.find_mpi4py,
            "quotas": directories.read_quotas,
        }
    )
    facts, silent = sources.collect(LIMIT_S)
    examined = _examine(dict.fromkeys(paths, ()) or _list_usual(), facts.get("quotas", []))
    torch_facts, torch_silent = backends.collect(2 * TORCH_LIMIT_S)
    facts |= torch_facts
    return Machine(
        host=platform.node(),
        system=platform.platform(terse=True),
        cpu=facts.get("the CPU") or cpu.parse("", platform.machine(), usable_cores()),
        memory=cpu.read_memory(),
        accelerators=facts.get(NVIDIA, ()) + facts.get(AMD, ()) + _list_apple(facts.get("PyTorch")),
        visible=environment.visible_devices(os.environ),
        topology=facts.get("NVIDIA's topology") or facts.get("AMD's topology"),
        interfaces=facts.get("the network", ()) + facts.get("RDMA", ()),
        torch=facts.get("PyTorch"),
        mpi=facts.get("MPI"),
        slurm=environment.read_slurm(os.environ),
        container=environment.find_own_container(os.environ),
        offered_modules=facts.get(MODULES, {}),
        modules=environment.loaded_modules(os.environ),
        directories=examined,
        silent=tuple(f"{name}: {reason}" for name, reason in (silent | torch_silent).items()),
    )


class ParallelSources:
    """Functions that run concurrently, in daemon threads: an unreachable file system never answers."""

    def __init__(self, sources: Mapping[str, Callable[[], Any]]) -> None:
        self._answers: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}
        self._threads = {
            name: threading.Thread(target=self._run, args=(name, source), daemon=True)
            for name, source in sources.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, name: str, source: Callable[[], Any]) -> None:
        try:
            self._answers[name] = source()
        except ClusterError as error:
            self._reasons[name] = str(error)
        except OSError as error:
            self._reasons[name] = error.strerror or str(error)

    def collect(self, limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the answers after at most `limit_s` seconds, and the reason of each missing answer."""
        end = time.monotonic() + limit_s
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        running = {name for name, thread in self._threads.items() if thread.is_alive()}
        answers, reasons = dict(self._answers), dict(self._reasons)
        for name in self._threads.keys() - answers.keys() - reasons.keys():
            reasons[name] = (
                f"no answer within {limit_s:g} s" if name in running else "broke, see the traceback above"
            )
        return answers, reasons


def _examine(places: Mapping[Path, tuple[str, ...]], quotas: list[Any]) -> tuple[Directory, ...]:
    """Return the facts of all directories; a directory that does not answer in time has a note."""
    mounts = directories.list_mounts()
    sources = ParallelSources(
        {
            str(path): partial(directories.examine, path, names, quotas, mounts)
            for path, names in places.items()
        }
    )
    facts, silent = sources.collect(LIMIT_S)
    return tuple(
        facts.get(str(path)) or Directory(path=str(path), names=names, note=silent[str(path)])
        for path, names in places.items()
        if silent.get(str(path)) != os.strerror(errno.ENOENT)  # a variable may name a folder that is gone
    )


def _list_usual() -> dict[Path, tuple[str, ...]]:
    try:
        folder = Path.cwd()
    except OSError:  # the working directory was deleted
        folder = Path("/tmp")
    return directories.list_usual(os.environ, folder)


def _torch(process: subprocess.Popen[str]) -> Torch:
    try:
        output, error = process.communicate(timeout=TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ClusterError(f"import torch took longer than {TORCH_LIMIT_S:g} s") from None
    if process.returncode:
        raise ClusterError(
            f"import torch failed: {(error.strip() or f'exit status {process.returncode}').splitlines()[-1]}"
        )
    return Torch.model_validate_json(output)


def _list_apple(torch: Torch | None) -> tuple[Accelerator, ...]:
    """Return Apple's GPU, which only PyTorch reports."""
    rows = [row for row in torch.backends if row.name == "mps" and row.available] if torch else []
    return tuple(Accelerator(index=0, name=row.version or "Apple GPU", kind="mps") for row in rows)
