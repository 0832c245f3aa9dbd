"""The Ray actor of a rank: it starts the rank as a process on its node, and reports how the process ended."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.spawn import spawn


@dataclass(frozen=True)
class ActorPlacement:
    """The node and the GPUs that Ray gave an actor."""

    node: str
    gpus: tuple[str, ...]


def order_by_node(placements: Sequence[ActorPlacement], first_node: str) -> list[tuple[int, list[str]]]:
    """Return for each rank the index of its actor and the GPUs that it sees. Ranks of a node are consecutive.

    Ray shows an actor only its GPU. Ranks of a node must see the GPUs of all ranks there to communicate; each
    uses that of its local rank.
    """
    nodes = sorted(dict.fromkeys(place.node for place in placements), key=lambda node: node != first_node)
    gpus = {node: [gpu for place in placements if place.node == node for gpu in place.gpus] for node in nodes}
    return [
        (index, gpus[node]) for node in nodes for index, place in enumerate(placements) if place.node == node
    ]


class Agent:
    """The actor of a rank."""

    def place(self, folder: Path) -> ActorPlacement:
        """Change to the folder of the rank, and return where Ray placed the actor."""
        import ray

        os.chdir(folder)
        return ActorPlacement(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> int:
        """Start the rank and return its process id."""
        for name in [name for name in os.environ if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"]:
            del os.environ[name]  # the rank is not a worker of Ray
        self._process = spawn(run, environ, log)
        return self._process.pid

    def wait(self) -> int:
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
