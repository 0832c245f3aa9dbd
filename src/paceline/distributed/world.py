"""World: who this process is among the ranks, a pure function of the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.distributed.hostlist import expand_hosts
from paceline.errors import LaunchError


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks of this machine
    local_size: int = 1
    launcher: str | None = None  # a row of LAUNCHERS; None: nobody started this process as a rank
    job: str = ""  # the same for all ranks of one start, and for no others
    address: str | None = None  # "host:port" of a store, where the launcher has agreed on one
    host: str | None = None  # the machine of rank 0 as the others know it, where the launcher tells
    pmi: int | None = None  # the descriptor over which ranks of MPICH can exchange words
    restart: int = 0  # how often the launcher has started these ranks again
    old_store: bool = False  # whether the store is the same as before that


@dataclass(frozen=True)
class LauncherVariables:
    """Variables by which a launcher tells a rank who it is; for the last three the first that is set counts."""

    rank: str
    size: str
    local_rank: str
    local_size: tuple[str, ...]
    job: tuple[str, ...]


# In this order: torchrun may run under mpirun or srun, and then knows better; mpirun may run in a Slurm allocation.
LAUNCHERS = {
    "torchrun": LauncherVariables(
        "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), ("TORCHELASTIC_RUN_ID",)
    ),
    "openmpi": LauncherVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_ID"),
    ),
    "mpich": LauncherVariables(
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        ("MPI_LOCALNRANKS",),
        ("PMI_JOBID", "HYDRA_JOBID", "PMI_PORT"),
    ),
    "slurm": LauncherVariables(
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        ("SLURM_JOB_ID",),
    ),
}


def read_world(environ: Mapping[str, str] = os.environ) -> World:
    """Who am I? The first launcher whose rank, size and local rank are all set tells. Raises LaunchError for a contradiction."""
    speaking = [launcher for launcher, names in LAUNCHERS.items() if _is_set_by(launcher, names, environ)]
    _check_consistency(speaking, environ)
    for launcher in speaking[:1]:
        names = LAUNCHERS[launcher]
        rank, size, local_rank = (
            _read_number(environ, name) for name in (names.rank, names.size, names.local_rank)
        )
        if not 0 <= rank < size:
            raise LaunchError(
                f"{names.rank}={rank} is outside {names.size}={size}: the variables of two launchers are mixed; unset them"
            )
        job = [environ[name] for name in names.job if name in environ][:1]
        if launcher == "slurm":  # a job that is queued again keeps its number, and counts its steps anew
            job += [environ.get("SLURM_RESTART_COUNT", "0"), environ.get("SLURM_STEP_ID", "0")]
        address = None
        if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
            address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=_local_size(launcher, names, environ, size, local_rank),
            launcher=launcher,
            job="-".join(job),
            address=address,
            host=_first_host(environ) if launcher == "slurm" else None,
            pmi=_read_number(environ, "PMI_FD") if launcher == "mpich" and "PMI_FD" in environ else None,
            restart=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if launcher == "torchrun" else 0,
            old_store=launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    return World()


def _is_set_by(launcher: str, names: LauncherVariables, environ: Mapping[str, str]) -> bool:
    return {names.rank, names.size, names.local_rank} <= environ.keys() and (
        launcher != "slurm" or _is_srun_task(environ)
    )


def _check_consistency(speaking: list[str], environ: Mapping[str, str]) -> None:
    """Raises LaunchError where what launchers say cannot be true together."""
    sizes = {launcher: _read_number(environ, LAUNCHERS[launcher].size) for launcher in speaking}
    if "torchrun" not in sizes and environ.get("WORLD_SIZE", "1") not in {"1", *map(str, sizes.values())}:
        said = f"WORLD_SIZE={environ['WORLD_SIZE']}"
        for launcher, size in sizes.items():
            raise LaunchError(
                f"{said}, but {LAUNCHERS[launcher].size}={size}: {launcher} started this process; unset WORLD_SIZE"
            )
        missing = [name for name in ("RANK", "LOCAL_RANK") if name not in environ]
        raise LaunchError(
            f"{said} without {' and '.join(missing)}: this process is none of so many ranks; unset WORLD_SIZE, or start them with --ranks "
            "or torchrun"
        )
    if sizes.get("slurm", 1) == 1:
        return
    if (
        "SLURM_STEP_TASKS_PER_NODE" not in environ
    ):  # which is what srun did; else it is known by what was asked for
        _check_slurm_tasks(sizes["slurm"], environ)
    if "torchrun" in sizes and "TORCHELASTIC_RUN_ID" not in environ:  # set by hand, so of the same ranks
        for mine, slurms in (("WORLD_SIZE", "SLURM_NTASKS"), ("RANK", "SLURM_PROCID")):
            if _read_number(environ, mine) != _read_number(environ, slurms):
                unlike = f"{mine}={environ[mine]}, but {slurms}={environ[slurms]}"
                raise LaunchError(f"{unlike}: unset RANK, LOCAL_RANK and WORLD_SIZE, srun says who a task is")
    for launcher in ("openmpi", "mpich"):
        names = LAUNCHERS[launcher]
        if launcher in sizes and environ.get(names.local_size[0]) == environ[names.size]:
            raise LaunchError(
                f"{names.size}={sizes[launcher]}, all on this machine, but SLURM_NTASKS={sizes['slurm']}: each task of srun has started "
                "ranks of its own; start them by srun alone, or mpirun without srun"
            )


def _check_slurm_tasks(size: int, environ: Mapping[str, str]) -> None:
    step = environ.get("SLURM_STEP_NUM_TASKS", str(size))
    if step != str(size):
        raise LaunchError(
            f"SLURM_NTASKS={size}, but SLURM_STEP_NUM_TASKS={step}: srun says both, so one was changed; unset it"
        )
    per_node, nodes = environ.get("SLURM_NTASKS_PER_NODE", ""), environ.get("SLURM_NNODES", "")
    if per_node.isdigit() and nodes.isdigit() and (most := int(per_node) * int(nodes)) < size:
        raise LaunchError(
            f"SLURM_NTASKS={size}, but SLURM_NTASKS_PER_NODE={per_node} on SLURM_NNODES={nodes} makes {most} at the most: "
            f"ask for --ntasks={most}, or leave --ntasks-per-node out"
        )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """srun starts tasks; in a batch script or an interactive shell of an allocation the same variables speak of the script."""
    return "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_ID") not in (
        "4294967291",
        "4294967292",
        "4294967290",
    )


def _first_host(environ: Mapping[str, str]) -> str | None:
    name = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if name in environ), None)
    if name is None:
        return None
    try:
        return expand_hosts(environ[name])[0]
    except ValueError as error:
        raise LaunchError(f"{name} cannot be read: {error}") from None


def _read_number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(f"{name}={environ[name]!r} is not a number") from None


def _local_size(
    launcher: str, names: LauncherVariables, environ: Mapping[str, str], size: int, local_rank: int
) -> int:
    name = next((name for name in names.local_size if name in environ), None)
    if name is None:
        return 1 if launcher == "slurm" else size
    if launcher == "slurm":
        try:
            counts = expand_task_counts(environ[name])
            local_size = counts[int(environ.get("SLURM_NODEID", "0"))]
        except (ValueError, IndexError):
            raise LaunchError(f"{name}={environ[name]!r} is no list of counts for each node") from None
        if name == names.local_size[0] and sum(counts) != size:
            raise LaunchError(
                f"{names.size}={size}, but {name}={environ[name]} makes {sum(counts)}: srun says both, so one was changed; unset it"
            )
    else:
        local_size = _read_number(environ, name)
    if not 0 <= local_rank < local_size:
        raise LaunchError(
            f"{names.local_rank}={local_rank} is outside {name}={environ[name]}: the variables of two launchers are mixed; unset them"
        )
    return local_size


def expand_task_counts(text: str) -> list[int]:
    """Slurm's tasks per node, one number a node: `"2(x3),1"` -> `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
