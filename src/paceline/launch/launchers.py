"""The launchers of Paceline, one row each.

Foreign launchers such as torchrun, under which a process becomes a rank, are in
`distributed.world.LAUNCHERS`.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

from paceline.distributed.world import World
from paceline.errors import LaunchError
from paceline.launch.nsys import check_program
from paceline.run import RunFolder
from paceline.spec import Launch
from paceline.units import several

RANKS_PER_CORE = 64  # more ranks are a mistake, and would stop the machine


class Launcher(NamedTuple):
    """A way to start ranks."""

    check: Callable[[Launch], None]  # raises LaunchError for what is wrong before anything starts
    start: Callable[[RunFolder, Launch], int]  # trains the request of a run and returns the exit status


def _check_local(launch: Launch) -> None:
    if launch.nodes > 1:
        raise LaunchError(
            f"--launcher local starts ranks on this machine only, got --nodes {launch.nodes}; leave out "
            "one of them"
        )
    if launch.nsys:
        check_program()
    check_count(launch.ranks or 1)


def check_count(ranks: int) -> None:
    """Raise LaunchError if this machine has too few cores for that many ranks."""
    cores = os.cpu_count() or 1
    if ranks > RANKS_PER_CORE * cores:
        raise LaunchError(
            f"--ranks must be at most {RANKS_PER_CORE * cores} on this machine of {several(cores, 'core')}, "
            f"{RANKS_PER_CORE} per core, got {ranks}; use fewer ranks, or several --nodes"
        )


def _start_local(run: RunFolder, launch: Launch) -> int:
    from paceline.launch import local

    return local.start(run, launch.ranks or 1, launch.restarts)


def _check_slurm(launch: Launch) -> None:
    from paceline.launch.slurm.srun import count_allocated_nodes

    count_allocated_nodes(launch.nodes, launch.least_nodes)


def _start_slurm(run: RunFolder, launch: Launch) -> int:
    from paceline.launch.slurm import srun

    return srun.start(run, launch)


def check_ray_is_installed() -> None:
    """Raise LaunchError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise LaunchError('--launcher ray requires Ray, which is not installed; pip install "paceline[ray]"')


def _check_ray(launch: Launch) -> None:
    check_ray_is_installed()
    if launch.least_nodes not in (None, launch.nodes):
        raise LaunchError(
            f"--nodes {launch.least_nodes}:{launch.nodes} requires Slurm; with --launcher ray use --nodes "
            f"{launch.nodes}"
        )


# without messages of Ray: the launcher reports errors in one sentence
QUIET_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


def prepare_ray() -> None:
    """Set the variables that Ray reads when it is imported."""
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)


def _start_ray(run: RunFolder, launch: Launch) -> int:
    prepare_ray()
    from paceline.launch.ray import launcher as ray

    return ray.start(run, launch)


LAUNCHERS = {
    "local": Launcher(_check_local, _start_local),
    "slurm": Launcher(_check_slurm, _start_slurm),
    "ray": Launcher(_check_ray, _start_ray),
}


def find_launcher(launch: Launch) -> Launcher:
    """Return the requested launcher, else slurm for several nodes and local for one."""
    return LAUNCHERS[launch.launcher or ("slurm" if launch.nodes > 1 else "local")]


def is_rank(launch: Launch, me: World) -> bool:
    """Return whether this process is a rank: a launcher started it as a rank, or one process is enough."""
    return me.launcher is not None or (
        find_launcher(launch) is LAUNCHERS["local"]
        and launch.ranks == 1
        and not launch.restarts
        and not launch.nsys
    )
