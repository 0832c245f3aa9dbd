"""Ways of ours to start ranks, a row each. (Launchers of others, under which a process becomes a rank, are rows of `world.LAUNCHERS`.)"""

import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

from paceline.distributed.world import World
from paceline.errors import LaunchError
from paceline.run import RunFolder
from paceline.spec import Launch
from paceline.units import several

RANKS_PER_CORE = 64  # more are a mistake, and would stop the machine


class Launcher(NamedTuple):
    check: Callable[[Launch], None]  # raises LaunchError for what can be known without starting anything
    start: Callable[
        [RunFolder, Launch], int
    ]  # train the request of a run, show what happens, return the exit status


def _check_here(launch: Launch) -> None:
    if launch.nodes > 1:
        raise LaunchError(
            f"--launcher local starts ranks on this machine alone, got --nodes {launch.nodes}: leave out one of them"
        )
    check_count(launch.ranks or 1)


def check_count(ranks: int) -> None:
    """Raise LaunchError for more ranks than this machine starts."""
    cores = os.cpu_count() or 1
    if ranks > RANKS_PER_CORE * cores:
        raise LaunchError(
            f"--ranks {ranks} on this machine of {several(cores, 'core')}: it starts at most {RANKS_PER_CORE * cores}, "
            f"{RANKS_PER_CORE} for each core; use fewer, or several --nodes"
        )


def _start_here(run: RunFolder, launch: Launch) -> int:
    from paceline.launch import local

    return local.start(run, launch.ranks or 1, launch.restarts)


def _check_slurm(launch: Launch) -> None:
    from paceline.launch.slurm.srun import allocated

    allocated(launch.nodes, launch.least_nodes)


def _start_slurm(run: RunFolder, launch: Launch) -> int:
    from paceline.launch.slurm import srun

    return srun.start(run, launch)


def _check_ray(launch: Launch) -> None:
    if importlib.util.find_spec("ray") is None:
        raise LaunchError('--launcher ray needs Ray, which is not installed: pip install "paceline[ray]"')
    if launch.least_nodes not in (None, launch.nodes):
        raise LaunchError(
            f"--nodes {launch.least_nodes}:{launch.nodes} is for Slurm; with --launcher ray use --nodes {launch.nodes}"
        )


QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}  # what Ray has to say, the launcher says in a sentence


def _start_ray(run: RunFolder, launch: Launch) -> int:
    for name, value in QUIET.items():  # read when Ray is imported
        os.environ.setdefault(name, value)
    from paceline.launch.ray import launcher as ray

    return ray.start(run, launch)


LAUNCHERS = {
    "local": Launcher(_check_here, _start_here),
    "slurm": Launcher(_check_slurm, _start_slurm),
    "ray": Launcher(_check_ray, _start_ray),
}


def find_launcher(launch: Launch) -> Launcher:
    return LAUNCHERS[launch.launcher or ("slurm" if launch.nodes > 1 else "local")]


def is_rank(launch: Launch, me: World) -> bool:
    """Whether this process trains itself: somebody has started it as a rank, or it is all that is needed."""
    return me.launcher is not None or (
        find_launcher(launch) is LAUNCHERS["local"] and launch.ranks == 1 and not launch.restarts
    )
