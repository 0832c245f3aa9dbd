"""Probe: what is this machine? Every source is asked at the same time, none of them for long, and nothing is put to work."""

import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cluster import cpu, directories, environment, gpus, mpi, network, topology
from paceline.cluster.limits import usable_cores
from paceline.cluster.machine import Accelerator, Directory, Machine, Torch
from paceline.errors import ClusterError

LIMIT_S = 15.0  # for a source; a tool of its has 10
TORCH_LIMIT_S = 60.0  # a first import from a slow file system
NVIDIA, AMD = "NVIDIA's GPUs", "AMD's GPUs"


def probe(asked: Sequence[Path] = (), torch: subprocess.Popen[str] | None = None) -> Machine:
    """`asked`: directories to look at, instead of the usual ones. What does not answer in time is listed as silent.

    torch: from `backends.begin`, which a caller in a hurry starts before it imports this; None: PyTorch is not described.
    """
    backends = ParallelSources({"PyTorch": partial(_torch, torch)} if torch else {})
    sources = ParallelSources(
        {
            "the CPU": cpu.cpu,
            NVIDIA: gpus.nvidia,
            AMD: gpus.amd,
            "NVIDIA's topology": topology.nvidia,
            "AMD's topology": topology.amd,
            "the network": network.interfaces,
            "RDMA": network.rdma,
            "MPI": mpi.mpi4py,
            "quotas": directories.quotas,
        }
    )
    found, silent = sources.within(LIMIT_S)
    places = dict.fromkeys(asked, ()) or directories.usual(os.environ, Path.cwd())
    looked = _look(places, found.get("quotas", []))
    described, late = backends.within(2 * TORCH_LIMIT_S)
    found |= described
    return Machine(
        host=platform.node(),
        system=platform.platform(terse=True),
        cpu=found.get("the CPU") or cpu.parse("", platform.machine(), usable_cores()),
        memory=cpu.memory(),
        accelerators=found.get(NVIDIA, ()) + found.get(AMD, ()) + _apple(found.get("PyTorch")),
        visible=environment.visible(os.environ),
        topology=found.get("NVIDIA's topology") or found.get("AMD's topology"),
        interfaces=found.get("the network", ()) + found.get("RDMA", ()),
        torch=found.get("PyTorch"),
        mpi=found.get("MPI"),
        slurm=environment.slurm(os.environ),
        container=environment.here_container(os.environ),
        modules=environment.modules(os.environ),
        directories=looked,
        silent=tuple(f"{name}: {reason}" for name, reason in (silent | late).items()),
    )


class ParallelSources:
    """Sources that answer at the same time, in threads that nobody waits for at the end: a file system that is away never comes back."""

    def __init__(self, sources: Mapping[str, Callable[[], Any]]) -> None:
        self._answers: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}
        self._threads = {
            name: threading.Thread(target=self._ask, args=(name, source), daemon=True)
            for name, source in sources.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _ask(self, name: str, source: Callable[[], Any]) -> None:
        try:
            self._answers[name] = source()
        except ClusterError as error:
            self._reasons[name] = str(error)
        except OSError as error:
            self._reasons[name] = error.strerror or str(error)

    def within(self, limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
        """Answers by name, and for those that there are none of the reason."""
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


def _look(places: Mapping[Path, tuple[str, ...]], quotas: list[Any]) -> tuple[Directory, ...]:
    among = directories.mounts()
    asked = ParallelSources(
        {str(path): partial(directories.look, path, names, quotas, among) for path, names in places.items()}
    )
    found, mute = asked.within(LIMIT_S)
    return tuple(
        found.get(str(path)) or Directory(path=str(path), names=names, note=mute[str(path)])
        for path, names in places.items()
    )


def _torch(process: subprocess.Popen[str]) -> Torch:
    try:
        said, error = process.communicate(timeout=TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ClusterError(f"import torch took longer than {TORCH_LIMIT_S:g} s") from None
    if process.returncode:
        raise ClusterError(
            f"import torch failed: {(error.strip() or f'exit status {process.returncode}').splitlines()[-1]}"
        )
    return Torch.model_validate_json(said)


def _apple(torch: Torch | None) -> tuple[Accelerator, ...]:
    """Only PyTorch knows of it."""
    found = [row for row in torch.backends if row.name == "mps" and row.available] if torch else []
    return tuple(Accelerator(index=0, name=row.version or "Apple GPU", kind="mps") for row in found)
