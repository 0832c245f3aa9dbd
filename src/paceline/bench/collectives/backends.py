"""What moves the bytes: torch's back ends and MPI through mpi4py, each a table of calls by the names of the operations."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.bench.collectives.operations import ROOT, GroupRank
from paceline.bench.timer import WALL, Clock, cuda_events
from paceline.distributed.process_group import choose_device, process_group
from paceline.distributed.world import World
from paceline.errors import BenchError
from paceline.spec import nearest

Tensor = torch.Tensor
Run = Callable[[], object]
Call = Callable[[Any, GroupRank, Tensor, Tensor], Run]  # (group, place in it, input, output) -> what is timed


class Peers(Protocol):
    """What the ranks say to one another beside what is measured."""

    def largest(self, values: Sequence[float]) -> list[float]: ...

    def everyone(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Backend:
    """out_of_place, in_place: the calls that it offers. For the latter input and output share memory, as `buffers` lays them."""

    name: str
    about: str  # what a row says of it
    device: torch.device
    clock: Clock
    group: Callable[
        [list[list[int]]], Any
    ]  # of these groups, which all ranks make together, the one of this rank
    out_of_place: Mapping[str, Call]
    in_place: Mapping[str, Call]


# --- torch ---

_all_gather = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # the new names are torch 2.13's, the old ones 2.11's
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _scatter(group: Any, at: GroupRank, input: Tensor, output: Tensor) -> Run:
    return partial(
        dist.scatter,
        output,
        list(input.chunk(at.size)) if at.rank == ROOT else None,
        group=group,
        group_src=ROOT,
    )


def _gather(group: Any, at: GroupRank, input: Tensor, output: Tensor) -> Run:
    return partial(
        dist.gather,
        input,
        list(output.chunk(at.size)) if at.rank == ROOT else None,
        group=group,
        group_dst=ROOT,
    )


def _send_recv(group: Any, at: GroupRank, input: Tensor, output: Tensor) -> Run:
    both = [
        dist.P2POp(dist.isend, input, group=group, group_peer=(at.rank + 1) % at.size),
        dist.P2POp(dist.irecv, output, group=group, group_peer=(at.rank - 1) % at.size),
    ]

    def run() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return run


_MOVING: Mapping[str, Call] = {
    "all-gather": lambda group, at, input, output: partial(_all_gather, output, input, group=group),
    "reduce-scatter": lambda group, at, input, output: partial(_reduce_scatter, output, input, group=group),
    "scatter": _scatter,
    "gather": _gather,
}
TORCH_OUT_OF_PLACE: Mapping[str, Call] = {
    **_MOVING,
    "all-to-all": lambda group, at, input, output: partial(
        dist.all_to_all_single, output, input, group=group
    ),
    "send-recv": _send_recv,
}
TORCH_IN_PLACE: Mapping[str, Call] = {
    **_MOVING,
    "all-reduce": lambda group, at, input, output: partial(dist.all_reduce, output, group=group),
    "broadcast": lambda group, at, input, output: partial(
        dist.broadcast, output, group=group, group_src=ROOT
    ),
    "reduce": lambda group, at, input, output: partial(dist.reduce, output, group=group, group_dst=ROOT),
    "barrier": lambda group, at, input, output: partial(dist.barrier, group=group),
}


class TorchPeers:
    def largest(self, values: Sequence[float]) -> list[float]:
        own = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.tolist()

    def everyone(self, value: Any) -> list[Any]:
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, value)
        return answers


def _torch_backend(name: str, device: torch.device, timeout_s: float) -> Backend:
    def group(groups: list[list[int]]) -> Any:
        made = [dist.new_group(ranks, backend=name, timeout=timedelta(seconds=timeout_s)) for ranks in groups]
        return next(one for one, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)

    clock = cuda_events() if device.type == "cuda" else WALL
    about = f"{name} of torch {torch.__version__}"
    if device.type == "cuda":
        about += f", {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return Backend(name, about, device, clock, group, TORCH_OUT_OF_PLACE, TORCH_IN_PLACE)


# --- MPI ---


def _with_place(call: Callable[[Any, Any, Any], Run]) -> Call:
    """mpi4py takes NumPy arrays, which share the memory of CPU tensors."""
    return lambda comm, at, input, output: call(comm, input.numpy(), output.numpy())


def _is_root(comm: Any) -> bool:
    return comm.rank == ROOT


def _mpi_calls(here: Any) -> tuple[Mapping[str, Call], Mapping[str, Call]]:
    """`here`: MPI.IN_PLACE."""
    out_of_place: Mapping[str, Callable[[Any, Any, Any], Run]] = {
        "all-reduce": lambda comm, sent, got: partial(comm.Allreduce, sent, got),
        "reduce-scatter": lambda comm, sent, got: partial(comm.Reduce_scatter_block, sent, got),
        "all-gather": lambda comm, sent, got: partial(comm.Allgather, sent, got),
        "reduce": lambda comm, sent, got: partial(
            comm.Reduce, sent, got if _is_root(comm) else None, root=ROOT
        ),
        "scatter": lambda comm, sent, got: partial(
            comm.Scatter, sent if _is_root(comm) else None, got, root=ROOT
        ),
        "gather": lambda comm, sent, got: partial(
            comm.Gather, sent, got if _is_root(comm) else None, root=ROOT
        ),
        "all-to-all": lambda comm, sent, got: partial(comm.Alltoall, sent, got),
        "send-recv": lambda comm, sent, got: partial(
            comm.Sendrecv, sent, (comm.rank + 1) % comm.size, recvbuf=got, source=(comm.rank - 1) % comm.size
        ),
    }
    in_place: Mapping[str, Callable[[Any, Any, Any], Run]] = {
        "all-reduce": lambda comm, sent, got: partial(comm.Allreduce, here, got),
        "all-gather": lambda comm, sent, got: partial(comm.Allgather, here, got),
        "broadcast": lambda comm, sent, got: partial(comm.Bcast, got, root=ROOT),
        "reduce": lambda comm, sent, got: partial(
            comm.Reduce, *((here, got) if _is_root(comm) else (sent, None)), root=ROOT
        ),
        "scatter": lambda comm, sent, got: partial(
            comm.Scatter, *((sent, here) if _is_root(comm) else (None, got)), root=ROOT
        ),
        "gather": lambda comm, sent, got: partial(
            comm.Gather, *((here, got) if _is_root(comm) else (sent, None)), root=ROOT
        ),
        "all-to-all": lambda comm, sent, got: partial(comm.Alltoall, here, got),
        "barrier": lambda comm, sent, got: comm.Barrier,
    }
    return {name: _with_place(call) for name, call in out_of_place.items()}, {
        name: _with_place(call) for name, call in in_place.items()
    }


class MpiPeers:
    def __init__(self, comm: Any, largest: Any, here: Any):
        self._comm, self._largest, self._here = comm, largest, here

    def largest(self, values: Sequence[float]) -> list[float]:
        own = torch.tensor(values, dtype=torch.float64)
        self._comm.Allreduce(self._here, own.numpy(), op=self._largest)
        return own.tolist()

    def everyone(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)


def _load_mpi() -> Any:
    """The library, loaded and not yet initialized: a process that is no rank must not become one."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI


def _mpi() -> tuple[Backend, Peers]:
    from mpi4py import __version__

    MPI = _load_mpi()
    MPI.Init_thread()
    world = MPI.COMM_WORLD

    def group(groups: list[list[int]]) -> Any:
        return world.Split(
            color=next(at for at, ranks in enumerate(groups) if world.rank in ranks), key=world.rank
        )

    library = MPI.Get_library_version().split(",")[0].strip()
    about = f"{library}, host memory, through mpi4py {__version__}"
    backend = Backend("mpi", about, torch.device("cpu"), WALL, group, *_mpi_calls(MPI.IN_PLACE))
    return backend, MpiPeers(world, MPI.MAX, MPI.IN_PLACE)


# --- which there are ---


def _no_gloo() -> str | None:
    return (
        None
        if dist.is_gloo_available()
        else f"torch {torch.__version__} was built without it: install torch from PyPI"
    )


def _no_nccl() -> str | None:
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without it: install torch for CUDA or ROCm"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU here"


def _no_mpi() -> str | None:
    if find_spec("mpi4py") is None:
        return "it is measured through mpi4py, which is not installed: pip install 'paceline[mpi]'"
    try:
        _load_mpi()
    except (ImportError, RuntimeError) as error:
        return f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): apt-get install openmpi-bin, or load the module of your site"
    return None


MISSING: Mapping[str, Callable[[], str | None]] = {"gloo": _no_gloo, "nccl": _no_nccl, "mpi": _no_mpi}
MPI_LAUNCHERS = ("openmpi", "mpich", "slurm")


def check(names: Sequence[str], world: World, ranks: int) -> None:
    """Raises BenchError for a back end that there is not, with how to get it. `world`: with no launcher ranks are started here."""
    for name in names:
        if name not in MISSING:
            raise BenchError(f"unknown back end {name}{nearest(name, MISSING)}")
        if why := MISSING[name]():
            raise BenchError(f"{name} cannot be measured: {why}; or leave {name} out of --backends")
    if "nccl" in names and world.launcher is None and ranks > torch.cuda.device_count():
        raise BenchError(
            f"nccl needs a GPU for each of {ranks} ranks, and there are {torch.cuda.device_count()}; use fewer, or gloo"
        )
    if "mpi" not in names:
        return
    if world.launcher is None and shutil.which("mpirun") is None:
        raise BenchError(
            "mpi cannot be measured: there is no mpirun: apt-get install openmpi-bin, or load the module of your site"
        )
    if world.launcher is not None and world.launcher not in MPI_LAUNCHERS:
        raise BenchError(
            f"mpi cannot be measured by ranks of {world.launcher}: start them with mpirun or srun, or leave mpi out"
        )


def default() -> str:
    return "nccl" if _no_nccl() is None else "gloo"


def devices() -> int:
    """Ranks to start on this machine, where nobody says how many."""
    return max(2, torch.cuda.device_count())


@contextmanager
def joined(
    names: Sequence[str], world: World, timeout_s: float, meeting_place: Path
) -> Iterator[tuple[list[Backend], Peers]]:
    """This rank among the others, on each back end. `meeting_place`: a folder that all ranks see, for launchers that agree on no store."""
    backends: dict[str, Backend] = {}
    peers: Peers = TorchPeers()
    if "mpi" in names:
        backends["mpi"], of_mpi = _mpi()
        if (
            len(names) == 1
        ):  # else they meet over gloo, which sleeps while it waits; MPI takes a core of each rank
            peers = of_mpi
    of_torch = [name for name in names if name != "mpi"]
    device = choose_device(world, None if "nccl" in names else "cpu") if of_torch else torch.device("cpu")
    with process_group(world, device, timeout_s, meeting_place) if of_torch else nullcontext():
        for name in of_torch:
            backends[name] = _torch_backend(
                name, device if name == "nccl" else torch.device("cpu"), timeout_s
            )
        yield [backends[name] for name in names], peers
    if "mpi" in names:  # not after an error: it waits for all ranks, and mpirun ends them
        _load_mpi().Finalize()
