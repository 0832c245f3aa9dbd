"""torch's profiler on one rank: started quietly, and stopped only when that is safe."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from paceline.distributed.unfinished import wait_for_collectives
from paceline.torch_compat import LOG_ERROR, set_log_level

STOP_S = 10.0  # maximum wait for collectives that a profile contains


class TorchProfiler:
    """torch's profiler, started when this is made.

    is_running: False if another profiler is active, for example the user's. Then nothing is recorded.
    """

    def __init__(self, device: torch.device, profile_memory: bool):
        self._profiler: Any = None
        self.is_running = not torch.autograd._profiler_enabled()
        if not self.is_running:
            return
        # torch 2.13: the profiler reports its start on standard error at a lower level.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._log_level = set_log_level(LOG_ERROR)
        options: Mapping[str, Any] = {"use_device": "cuda" if device.type == "cuda" else None}
        with torch.autograd.profiler.profile(**options):  # the first profiled operation is slow
            torch.zeros(1, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._profiler = torch.autograd.profiler.profile(**options, profile_memory=profile_memory)
        self._profiler.__enter__()

    def stop(self) -> bool:
        """Stop the profiler, and return whether that was possible.

        A thread of gloo that ends a collective after that would write into freed memory (torch 2.13). So the
        profiler continues if a collective does not end, for example because another rank failed.
        """
        if self._profiler is None or not wait_for_collectives(STOP_S):
            return False
        self._profiler.__exit__(None, None, None)
        set_log_level(self._log_level)
        return True

    @property
    def results(self) -> Any:
        """What was recorded, after `stop`."""
        return self._profiler.kineto_results
