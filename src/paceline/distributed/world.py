"""World: the place of this process among the ranks, a pure function of the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.distributed.hostlist import expand_hosts
from paceline.errors import LaunchError


@dataclass(frozen=True)
class World:
    """Which rank this process is. `paceline.train` reads it from the environment of the launcher.

        world = World(rank=1, size=4, local_rank=1, local_size=4)

    rank, size: number of this rank, and of all ranks. local_rank, local_size: the same on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks of this machine
    local_size: int = 1
    launcher: str | None = None  # a key of LAUNCHERS; None: this process was not started as a rank
    job: str = ""  # the same for all ranks of one start, different for other starts
    address: str | None = None  # "host:port" of a store, if the launcher provides it
    host: str | None = None  # the machine of rank 0 as others know it, if the launcher provides it
    pmi: int | None = None  # the file descriptor for PMI, with which ranks of MPICH exchange strings
    restart: int = 0  # number of restarts by the launcher
    old_store: bool = False  # whether the store is the same as before the restart


@dataclass(frozen=True)
class LauncherVariables:
    """Environment variables that a launcher sets for a rank; of several names the first set one counts."""

    rank: str
    size: str
    local_rank: str
    local_size: tuple[str, ...]
    job: tuple[str, ...]


# The order matters: torchrun may run under mpirun or srun, and is then the launcher; mpirun may run in a
# Slurm allocation.
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
    """Return the World from the first launcher whose rank, size and local rank are all set.

    Raises LaunchError for contradictory variables.
    """
    launchers = [launcher for launcher, names in LAUNCHERS.items() if _is_set_by(launcher, names, environ)]
    _check_consistency(launchers, environ)
    for launcher in launchers[:1]:
        names = LAUNCHERS[launcher]
        rank, size, local_rank = (
            _read_number(environ, name) for name in (names.rank, names.size, names.local_rank)
        )
        if not 0 <= rank < size:
            raise LaunchError(
                f"{names.rank}={rank} is outside {names.size}={size}: the variables of two launchers are "
                "mixed; unset them"
            )
        job = [environ[name] for name in names.job if name in environ][:1]
        if launcher == "slurm":  # a requeued job keeps its id and restarts the count of its steps
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


def _check_consistency(launchers: list[str], environ: Mapping[str, str]) -> None:
    """Raise LaunchError if the variables of launchers contradict each other."""
    sizes = {launcher: _read_number(environ, LAUNCHERS[launcher].size) for launcher in launchers}
    if "torchrun" not in sizes and environ.get("WORLD_SIZE", "1") not in {"1", *map(str, sizes.values())}:
        setting = f"WORLD_SIZE={environ['WORLD_SIZE']}"
        for launcher, size in sizes.items():
            raise LaunchError(
                f"{setting}, but {LAUNCHERS[launcher].size}={size}: {launcher} started this process; unset "
                "WORLD_SIZE"
            )
        missing = [name for name in ("RANK", "LOCAL_RANK") if name not in environ]
        raise LaunchError(
            f"{setting} without {' and '.join(missing)}: this process is not a rank; unset WORLD_SIZE, or "
            "start ranks with --ranks or torchrun"
        )
    if sizes.get("slurm", 1) == 1:
        return
    # Without what srun did, check what was requested.
    if "SLURM_STEP_TASKS_PER_NODE" not in environ:
        _check_slurm_tasks(sizes["slurm"], environ)
    if "torchrun" in sizes and "TORCHELASTIC_RUN_ID" not in environ:  # set by the user, so for the same ranks
        for user_name, slurm_name in (("WORLD_SIZE", "SLURM_NTASKS"), ("RANK", "SLURM_PROCID")):
            if _read_number(environ, user_name) != _read_number(environ, slurm_name):
                raise LaunchError(
                    f"{user_name}={environ[user_name]}, but {slurm_name}={environ[slurm_name]}: "
                    "srun sets the rank of each task; unset RANK, LOCAL_RANK and WORLD_SIZE"
                )
    for launcher in ("openmpi", "mpich"):
        names = LAUNCHERS[launcher]
        if launcher in sizes and environ.get(names.local_size[0]) == environ[names.size]:
            raise LaunchError(
                f"{names.size}={sizes[launcher]}, all on this machine, but SLURM_NTASKS={sizes['slurm']}: "
                "each srun task started separate ranks; use srun without mpirun, or mpirun without srun"
            )


def _check_slurm_tasks(size: int, environ: Mapping[str, str]) -> None:
    step = environ.get("SLURM_STEP_NUM_TASKS", str(size))
    if step != str(size):
        raise LaunchError(
            f"SLURM_NTASKS={size}, but SLURM_STEP_NUM_TASKS={step}: srun sets both, so one was changed; "
            "unset it"
        )
    per_node, nodes = environ.get("SLURM_NTASKS_PER_NODE", ""), environ.get("SLURM_NNODES", "")
    if per_node.isdigit() and nodes.isdigit() and (max_tasks := int(per_node) * int(nodes)) < size:
        raise LaunchError(
            f"SLURM_NTASKS={size}, but SLURM_NTASKS_PER_NODE={per_node} on SLURM_NNODES={nodes} allows at "
            f"most {max_tasks}; use --ntasks={max_tasks}, or omit --ntasks-per-node"
        )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task.

    In a batch script or an interactive shell of an allocation, the same variables describe the script.
    """
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
            raise LaunchError(f"{name}={environ[name]!r} is not a list of tasks per node") from None
        if name == names.local_size[0] and sum(counts) != size:
            raise LaunchError(
                f"{names.size}={size}, but {name}={environ[name]} makes {sum(counts)}: srun sets both, so "
                "one was changed; unset it"
            )
    else:
        local_size = _read_number(environ, name)
    if not 0 <= local_rank < local_size:
        raise LaunchError(
            f"{names.local_rank}={local_rank} is outside {name}={environ[name]}: the variables of two "
            "launchers are mixed; unset them"
        )
    return local_size


def expand_task_counts(text: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's compressed form: `"2(x3),1"` -> `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
