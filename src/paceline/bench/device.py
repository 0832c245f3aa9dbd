"""The device that a bench measures."""

import torch

from paceline.cluster.limits import usable_cores
from paceline.distributed.process_group import choose_device
from paceline.distributed.world import World
from paceline.errors import SpecError


def choose_bench_device(name: str | None) -> torch.device:
    """Return the device to measure, and use all cores if it is the CPU. Raises SpecError or LaunchError."""
    if name not in (None, "cpu", "cuda"):
        raise SpecError(f"--device must be cpu or cuda, got {name!r}")
    torch.set_num_threads(usable_cores())
    return choose_device(World(), name)
