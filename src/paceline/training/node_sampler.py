"""The sampler of a node: local rank 0 starts it, whatever program starts the ranks."""

import time
from typing import Literal

from paceline.distributed.world import World
from paceline.errors import SpecError
from paceline.monitor.sampler_process import SamplerProcess
from paceline.run import RunFolder
from paceline.spec import parse_monitor

CHECK_S = 1.0  # how often to look whether the sampler runs


def check_monitor(value: object) -> float | Literal["off"]:
    """Return the argument `monitor` of a function of Python. Raises SpecError."""
    try:
        return parse_monitor(value, 'write monitor=1.0 or monitor="off"')
    except ValueError as error:
        raise SpecError(str(error)) from None


class NodeSampler:
    """The sampler of this node, if this rank starts it."""

    def __init__(self, run: RunFolder, every_s: float | Literal["off"], world: World):
        self._run, self._world = run, world
        self._every_s = every_s if world.local_rank == 0 else "off"
        self._process: SamplerProcess | None = None
        self._checked = 0.0

    def check(self) -> list[str]:
        """Start the sampler when the run folder exists, and return new sentences about failures of it."""
        now = time.monotonic()
        if self._every_s == "off" or now < self._checked + CHECK_S:
            return []
        self._checked = now
        if self._process is None:
            # A temporary folder is deleted at the end; rank 0 may have to create another folder.
            if self._run.is_temporary or not self._run.path.exists():
                return []
            world = self._world
            self._process = SamplerProcess(
                self._run.path, self._every_s, world.rank, world.local_size, world.size
            )
        return [f"{note} (rank {self._world.rank})" for note in self._process.new_notes()]

    def stop(self) -> None:
        """End the sampler."""
        if self._process is not None:
            self._process.stop()
