"""Back ends: torch's, and MPI through mpi4py. Each is a table of calls by operation name."""

import os
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

from paceline.bench.collectives.operations import AVERAGE, MAX, MIN, PRODUCT, REDUCTIONS, ROOT, GroupRank
from paceline.bench.timer import WALL, Clock, cuda_event_clock
from paceline.cluster.run_tool import run
from paceline.distributed.process_group import choose_device, process_group
from paceline.distributed.world import World
from paceline.errors import BenchError
from paceline.spec import suggest
from paceline.torch_compat import all_gather_single, reduce_scatter_single

Tensor = torch.Tensor
Run = Callable[[], object]
Call = Callable[
    [Any, GroupRank, Tensor, Tensor], Run
]  # (group, rank in it, input, output) -> function to time


class Peers(Protocol):
    """Communication between the ranks that is not measured."""

    def all_reduce_max(self, values: Sequence[float]) -> list[float]: ...

    def all_gather(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Backend:
    """A back end on this rank.

    group: create the given groups, on all ranks together, and return the group of this rank.
    out_of_place, in_place: the supported calls. In place, input and output share memory.
    """

    name: str
    about: str  # library and versions, for a note
    device: torch.device
    clock: Clock
    group: Callable[[list[list[int]]], Any]
    out_of_place: Mapping[str, Call]
    in_place: Mapping[str, Call]


# --- torch ---


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
    operations = [
        dist.P2POp(dist.isend, input, group=group, group_peer=(at.rank + 1) % at.size),
        dist.P2POp(dist.irecv, output, group=group, group_peer=(at.rank - 1) % at.size),
    ]

    def run() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


_COMMON: Mapping[str, Call] = {
    "all-gather": lambda group, at, input, output: partial(all_gather_single, output, input, group=group),
    "reduce-scatter": lambda group, at, input, output: partial(
        reduce_scatter_single, output, input, group=group
    ),
    "scatter": _scatter,
    "gather": _gather,
}
TORCH_OUT_OF_PLACE: Mapping[str, Call] = {
    **_COMMON,
    "all-to-all": lambda group, at, input, output: partial(
        dist.all_to_all_single, output, input, group=group
    ),
    "send-recv": _send_recv,
}
TORCH_IN_PLACE: Mapping[str, Call] = {
    **_COMMON,
    "all-reduce": lambda group, at, input, output: partial(dist.all_reduce, output, group=group),
    "broadcast": lambda group, at, input, output: partial(
        dist.broadcast, output, group=group, group_src=ROOT
    ),
    "reduce": lambda group, at, input, output: partial(dist.reduce, output, group=group, group_dst=ROOT),
    "barrier": lambda group, at, input, output: partial(dist.barrier, group=group),
}


def _torch_reductions() -> Iterator[tuple[str, Call]]:
    """Yield the calls in place with another reduction than the sum, by name."""
    ops = {
        MIN: dist.ReduceOp.MIN,
        MAX: dist.ReduceOp.MAX,
        PRODUCT: dist.ReduceOp.PRODUCT,
        AVERAGE: dist.ReduceOp.AVG,
    }

    def build(name: str, op: Any) -> Call:
        if name.startswith("all-reduce"):
            return lambda group, at, input, output: partial(dist.all_reduce, output, op=op, group=group)
        if name.startswith("reduce-scatter"):
            return lambda group, at, input, output: partial(
                reduce_scatter_single, output, input, op=op, group=group
            )
        return lambda group, at, input, output: partial(
            dist.reduce, output, op=op, group=group, group_dst=ROOT
        )

    for name, operation in REDUCTIONS.items():
        yield name, build(name, ops[operation.reduction])


class TorchPeers:
    """Peers over torch's default process group."""

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        maxima = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return maxima.tolist()

    def all_gather(self, value: Any) -> list[Any]:
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, value)
        return answers


def _torch_backend(name: str, device: torch.device, timeout_s: float) -> Backend:
    def group(groups: list[list[int]]) -> Any:
        timeout = timedelta(seconds=timeout_s)
        created = [dist.new_group(ranks, backend=name, timeout=timeout) for ranks in groups]
        return next(
            process_group
            for process_group, ranks in zip(created, groups, strict=True)
            if dist.get_rank() in ranks
        )

    clock = cuda_event_clock() if device.type == "cuda" else WALL
    about = f"{name} of torch {torch.__version__}"
    if name == "nccl":
        about += f", {'.'.join(map(str, torch.cuda.nccl.version()))}"
    elif device.type == "cuda":
        about += ", memory of the GPU"
    in_place = {**TORCH_IN_PLACE, **dict(_torch_reductions())}
    return Backend(name, about, device, clock, group, TORCH_OUT_OF_PLACE, in_place)


# --- MPI ---


def _as_call(call: Callable[[Any, Any, Any], Run]) -> Call:
    """Pass CPU tensors to mpi4py as NumPy arrays, which share their memory, and CUDA tensors as they are."""
    return lambda comm, at, input, output: call(comm, _as_buffer(input), _as_buffer(output))


def _as_buffer(tensor: Tensor) -> Any:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _is_root(comm: Any) -> bool:
    return comm.rank == ROOT


def _mpi_calls(in_place_flag: Any) -> tuple[Mapping[str, Call], Mapping[str, Call]]:
    """Return the calls out of place and in place. `in_place_flag`: MPI.IN_PLACE."""
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
        "all-reduce": lambda comm, sent, got: partial(comm.Allreduce, in_place_flag, got),
        "all-gather": lambda comm, sent, got: partial(comm.Allgather, in_place_flag, got),
        "broadcast": lambda comm, sent, got: partial(comm.Bcast, got, root=ROOT),
        "reduce": lambda comm, sent, got: partial(
            comm.Reduce, *((in_place_flag, got) if _is_root(comm) else (sent, None)), root=ROOT
        ),
        "scatter": lambda comm, sent, got: partial(
            comm.Scatter, *((sent, in_place_flag) if _is_root(comm) else (None, got)), root=ROOT
        ),
        "gather": lambda comm, sent, got: partial(
            comm.Gather, *((in_place_flag, got) if _is_root(comm) else (sent, None)), root=ROOT
        ),
        "all-to-all": lambda comm, sent, got: partial(comm.Alltoall, in_place_flag, got),
        "barrier": lambda comm, sent, got: comm.Barrier,
    }
    return (
        {name: _as_call(call) for name, call in out_of_place.items()},
        {name: _as_call(call) for name, call in in_place.items()},
    )


def _mpi_reductions(MPI: Any) -> Mapping[str, Call]:
    """Return the calls out of place with another reduction than the sum. MPI has no average."""
    ops = {MIN: MPI.MIN, MAX: MPI.MAX, PRODUCT: MPI.PROD}

    def build(name: str, op: Any) -> Callable[[Any, Any, Any], Run]:
        if name.startswith("all-reduce"):
            return lambda comm, sent, got: partial(comm.Allreduce, sent, got, op=op)
        if name.startswith("reduce-scatter"):
            return lambda comm, sent, got: partial(comm.Reduce_scatter_block, sent, got, op=op)
        return lambda comm, sent, got: partial(
            comm.Reduce, sent, got if _is_root(comm) else None, op=op, root=ROOT
        )

    return {
        name: _as_call(build(name, ops[operation.reduction]))
        for name, operation in REDUCTIONS.items()
        if operation.reduction in ops
    }


class MpiPeers:
    """Peers over an MPI communicator. `max_op`: MPI.MAX; `in_place_flag`: MPI.IN_PLACE."""

    def __init__(self, comm: Any, max_op: Any, in_place_flag: Any):
        self._comm, self._max_op, self._in_place_flag = comm, max_op, in_place_flag

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        maxima = torch.tensor(values, dtype=torch.float64)
        self._comm.Allreduce(self._in_place_flag, maxima.numpy(), op=self._max_op)
        return maxima.tolist()

    def all_gather(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)


def _load_mpi() -> Any:
    """Load MPI without initializing it, because a process that is not a rank must not become a rank."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI


def _mpi_backend(device: torch.device) -> tuple[Backend, Peers]:
    from mpi4py import __version__

    MPI = _load_mpi()
    MPI.Init_thread()
    world = MPI.COMM_WORLD

    def group(groups: list[list[int]]) -> Any:
        return world.Split(
            color=next(color for color, ranks in enumerate(groups) if world.rank in ranks), key=world.rank
        )

    library = MPI.Get_library_version().split(",")[0].strip()
    where = "host memory" if device.type == "cpu" else "memory of the GPU"
    about = f"{library}, {where}, through mpi4py {__version__}"
    out_of_place, in_place = _mpi_calls(MPI.IN_PLACE)
    reductions = _mpi_reductions(MPI)
    backend = Backend("mpi", about, device, WALL, group, {**out_of_place, **reductions}, in_place)
    return backend, MpiPeers(world, MPI.MAX, MPI.IN_PLACE)


# --- available back ends ---


def _no_gloo() -> str | None:
    if dist.is_gloo_available():
        return None
    return f"torch {torch.__version__} was built without gloo; install torch from PyPI"


def _no_nccl() -> str | None:
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without nccl; install torch for CUDA or ROCm"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


INSTALL_MPI = "run apt-get install openmpi-bin, or load the module of your site"


def _no_mpi() -> str | None:
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed; run: pip install 'paceline[mpi]'"
    try:
        _load_mpi()
    except (ImportError, RuntimeError) as error:
        return f"mpi4py finds no MPI library ({str(error).splitlines()[0]}); {INSTALL_MPI}"
    return None


MISSING: Mapping[str, Callable[[], str | None]] = {"gloo": _no_gloo, "nccl": _no_nccl, "mpi": _no_mpi}
# Variables by which other libraries than Open MPI accept memory of a GPU.
GPU_VARIABLES = ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


def find_cuda_support(library: str, parameters: str, environ: Mapping[str, str]) -> str | None:
    """Return why an MPI library does not accept memory of a GPU, which would end the ranks; None if it does.

    library: its version. parameters: the output of `ompi_info --parsable --all`.
    """
    if "Open MPI" in library:
        has_support = "mpi_built_with_cuda_support:value:true" in parameters
        return None if has_support else "this Open MPI was built without CUDA"
    has_support = any(environ.get(name, "0") not in ("", "0") for name in GPU_VARIABLES)
    return None if has_support else f"none of {', '.join(GPU_VARIABLES)} is set"


def _check_device(names: Sequence[str], world: World, ranks: int) -> None:
    """Raise BenchError if gloo or mpi cannot have their tensors on the GPU."""
    if not torch.cuda.is_available():
        raise BenchError(f"--device cuda: torch {torch.__version__} finds no GPU; leave it out")
    if world.launcher is None and ranks > torch.cuda.device_count():
        raise BenchError(
            f"--device cuda requires a GPU for each of {ranks} ranks, got {torch.cuda.device_count()}; use "
            "fewer ranks, or leave it out"
        )
    if "mpi" in names:
        library, parameters = _load_mpi().Get_library_version(), run("ompi_info", "--parsable", "--all")
        if why := find_cuda_support(library, parameters, os.environ):
            raise BenchError(f"--device cuda: mpi needs a CUDA-aware library, and {why}; load its module")


MPI_LAUNCHERS = ("openmpi", "mpich", "slurm")


def check_backends(names: Sequence[str], world: World, ranks: int, device: str = "cpu") -> None:
    """Raise BenchError if a back end is not available; the message says how to get it.

    world: if it has no launcher, the ranks will be started on this machine. device: of the tensors of gloo
    and mpi.
    """
    for name in names:
        if name not in MISSING:
            raise BenchError(f"unknown back end {name}{suggest(name, MISSING)}")
        if why := MISSING[name]():
            raise BenchError(f"{name} cannot be measured: {why}; or remove {name} from --backends")
    if "nccl" in names and world.launcher is None and ranks > torch.cuda.device_count():
        raise BenchError(
            f"nccl requires a GPU for each of {ranks} ranks, got {torch.cuda.device_count()}; "
            "use fewer ranks, or gloo"
        )
    if device == "cuda":
        _check_device(names, world, ranks)
    if "mpi" not in names:
        return
    if world.launcher is None and shutil.which("mpirun") is None:
        raise BenchError(f"mpi cannot be measured: mpirun is not installed; {INSTALL_MPI}")
    if world.launcher is not None and world.launcher not in MPI_LAUNCHERS:
        raise BenchError(
            f"mpi requires ranks started by mpirun or srun, got {world.launcher}; "
            "use one of these, or remove mpi from --backends"
        )


def default_backend() -> str:
    """Return nccl if it can be used, else gloo."""
    return "nccl" if _no_nccl() is None else "gloo"


def default_ranks() -> int:
    """Return the default number of ranks on this machine: one per GPU, at least 2."""
    return max(2, torch.cuda.device_count())


@contextmanager
def join_backends(
    names: Sequence[str], world: World, timeout_s: float, rendezvous_dir: Path, device_type: str = "cpu"
) -> Iterator[tuple[list[Backend], Peers]]:
    """Join the other ranks on each back end; yield the back ends and the peers.

    rendezvous_dir: a folder that all ranks see, for launchers that provide no store. device_type: of the
    tensors of gloo and mpi.
    """
    has_gpu = "nccl" in names or device_type == "cuda"
    device = choose_device(world, "cuda" if has_gpu else "cpu")
    own_device = device if device_type == "cuda" else torch.device("cpu")
    backends: dict[str, Backend] = {}
    peers: Peers = TorchPeers()
    if "mpi" in names:
        backends["mpi"], mpi_peers = _mpi_backend(own_device)
        if len(names) == 1:  # otherwise gloo, which sleeps while it waits; MPI keeps a core of each rank busy
            peers = mpi_peers
    torch_names = [name for name in names if name != "mpi"]
    with process_group(world, device, timeout_s, rendezvous_dir) if torch_names else nullcontext():
        for name in torch_names:
            backends[name] = _torch_backend(name, device if name == "nccl" else own_device, timeout_s)
        yield [backends[name] for name in names], peers
    if "mpi" in names:  # not after an error: Finalize waits for all ranks, and mpirun ends them
        _load_mpi().Finalize()
