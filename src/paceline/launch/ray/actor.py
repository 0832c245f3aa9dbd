"""An actor of Ray's beside each rank: starts it as a process on its node, and tells how it ended."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.spawn import spawn


@dataclass(frozen=True)
class ActorPlacement:
    """What an actor was given."""

    node: str
    gpus: tuple[str, ...]


def side_by_side(given: Sequence[ActorPlacement], here: str) -> list[tuple[int, list[str]]]:
    """For each rank which actor is its own, those of a node in a row, and which GPUs it is to see. `here`: the first node.

    Ray shows an actor its own GPU alone; ranks of a node must see those of all, to reach one another; each takes that of its local rank.
    """
    nodes = sorted(dict.fromkeys(where.node for where in given), key=lambda node: node != here)
    gpus = {node: [gpu for where in given if where.node == node for gpu in where.gpus] for node in nodes}
    return [(at, gpus[node]) for node in nodes for at, where in enumerate(given) if where.node == node]


class Agent:
    def where(self, folder: Path) -> ActorPlacement:
        """Of the rank, which is to work in this folder."""
        import ray

        os.chdir(folder)
        return ActorPlacement(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def start(self, run: Path, environ: Mapping[str, str], log: Path) -> int:
        """The process id."""
        for name in [name for name in os.environ if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"]:
            del os.environ[name]  # the rank is no worker of Ray's
        self._process = spawn(run, environ, log)
        return self._process.pid

    def wait(self) -> int:
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
