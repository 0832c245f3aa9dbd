"""Probe: what is this machine? Every source is asked at the same time, none of them for long, and nothing is put to work."""

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cluster import cpu, directories, gpus, mpi, network, surroundings, topology
from paceline.cluster.command import run
from paceline.cluster.limits import usable_cores
from paceline.cluster.machine import Accelerator, Directory, Machine, Torch
from paceline.errors import ClusterError

LIMIT_S = 10.0
TORCH_LIMIT_S = 60.0  # a first import from a slow file system


def probe(asked: Sequence[Path] = (), with_torch: bool = True) -> Machine:
    """`asked`: directories to look at, instead of the usual ones. What does not answer in time is listed as silent."""
    places = dict.fromkeys(asked, ()) or directories.usual(os.environ, Path.cwd())
    sources: dict[str, Callable[[], Any]] = {
        "the CPU": cpu.cpu,
        "NVIDIA's GPUs": gpus.nvidia,
        "AMD's GPUs": gpus.amd,
        "NVIDIA's topology": topology.nvidia,
        "AMD's topology": topology.amd,
        "the network": network.interfaces,
        "RDMA": network.rdma,
        "MPI": mpi.mpi4py,
        "quotas": directories.quotas,
    }
    if with_torch:
        sources["PyTorch"] = _torch
    found, silent = ask(sources, TORCH_LIMIT_S if with_torch else LIMIT_S)
    looked, mute = ask(_looks(places, found.get("quotas", [])), LIMIT_S)
    torch: Torch | None = found.get("PyTorch")
    return Machine(
        host=platform.node(),
        system=platform.platform(terse=True),
        cpu=found.get("the CPU") or cpu.parse("", platform.machine(), usable_cores()),
        memory=cpu.memory(),
        accelerators=found.get("NVIDIA's GPUs", ()) + found.get("AMD's GPUs", ()) + _apple(torch),
        topology=found.get("NVIDIA's topology") or found.get("AMD's topology"),
        interfaces=found.get("the network", ()) + found.get("RDMA", ()),
        torch=torch,
        mpi=found.get("MPI"),
        slurm=surroundings.slurm(os.environ),
        container=surroundings.here_container(os.environ),
        visible=surroundings.visible(os.environ),
        modules=surroundings.modules(os.environ),
        directories=tuple(
            looked.get(str(path)) or Directory(path=str(path), names=names, note=mute[str(path)]) for path, names in places.items()
        ),
        silent=tuple(f"{name}: {reason}" for name, reason in silent.items()),
    )


def _looks(places: Mapping[Path, tuple[str, ...]], quotas: list[Any]) -> dict[str, Callable[[], Directory]]:
    among = directories.mounts()
    return {str(path): partial(directories.look, path, names, quotas, among) for path, names in places.items()}


def ask(sources: Mapping[str, Callable[[], Any]], limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """What they answer, all at once, and of the others why not. Threads, since a file system that is away never comes back."""
    answers: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def one(name: str, source: Callable[[], Any]) -> None:
        try:
            answers[name] = source()
        except ClusterError as error:
            reasons[name] = str(error)
        except OSError as error:
            reasons[name] = error.strerror or str(error)

    threads = {name: threading.Thread(target=one, args=(name, source), daemon=True) for name, source in sources.items()}
    _join(threads.values(), limit_s)
    late = {name: f"no answer within {limit_s:g} s" for name, thread in threads.items() if thread.is_alive()}
    return dict(answers), late | dict(reasons)


def _join(threads: Iterable[threading.Thread], limit_s: float) -> None:
    started = list(threads)
    for thread in started:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in started:
        thread.join(max(0.0, end - time.monotonic()))


def _torch() -> Torch:
    """In a process of its own, beside everything else: its import takes longer than all other sources together."""
    said = run(sys.executable, "-m", "paceline.cluster.backends", limit_s=TORCH_LIMIT_S)
    return Torch.model_validate_json(said)


def _apple(torch: Torch | None) -> tuple[Accelerator, ...]:
    """Only PyTorch knows of it."""
    found = [row for row in torch.backends if row.name == "mps" and row.available] if torch else []
    return tuple(Accelerator(index=0, name=row.version or "Apple GPU", kind="mps") for row in found)
