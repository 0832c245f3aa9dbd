"""The nodes of a study on other machines, as Slurm or Ray provides them."""

import contextlib
from collections.abc import Iterator, Sequence

from paceline.tuning.executors.pool import Node


@contextlib.contextmanager
def open_nodes(launcher: str, nodes: int, ranks: int) -> Iterator[Sequence[Node]]:
    """Yield nodes, each with an agent. Raises LaunchError."""
    if launcher == "slurm":
        from paceline.tuning.executors.slurm_nodes import open_slurm_nodes

        with open_slurm_nodes(nodes, ranks) as opened:
            yield opened
        return
    from paceline.launch.launchers import prepare_ray

    prepare_ray()
    from paceline.tuning.executors.ray_nodes import open_ray_nodes

    with open_ray_nodes(nodes, ranks) as opened:
        yield opened
