"""Interruptions of a training: the best interval between checkpoints, and the time that is lost.

Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps.
"""

from math import exp, sqrt
from typing import NamedTuple

RESTART_S = 300.0  # until the devices are there again, the processes have started and the weights are loaded
STATE_BYTES = 12  # of a parameter: its weight and two moments in float32
STORAGE_BPS = 1e9  # of a node


class Interruptions(NamedTuple):
    """Interruptions that come at random moments.

    mean_s: between two of them. save_s: for which a checkpoint holds the training up. restart_s: from an
    interruption to the first step after it.
    """

    mean_s: float
    save_s: float
    restart_s: float = RESTART_S

    @property
    def interval_s(self) -> float:
        """The computing between two checkpoints with which a training ends first (Daly, equation 37)."""
        if self.save_s >= 2 * self.mean_s:
            return self.mean_s
        ratio = sqrt(self.save_s / (2 * self.mean_s))
        return sqrt(2 * self.save_s * self.mean_s) * (1 + ratio / 3 + ratio**2 / 9) - self.save_s

    @property
    def slowdown(self) -> float:
        """Expected duration relative to a training without interruptions and checkpoints (equation 20).

        An interruption can also hit a restart.
        """
        segment = (self.interval_s + self.save_s) / self.mean_s
        if segment > 700 or self.restart_s / self.mean_s > 700:  # beyond the range of exp
            return float("inf")
        return exp(self.restart_s / self.mean_s) * (exp(segment) - 1) * self.mean_s / self.interval_s


def guess_save_s(params: float, nodes: int) -> float:
    """Return the seconds in which `nodes` nodes write a checkpoint of weights and optimizer state."""
    return params * STATE_BYTES / (nodes * STORAGE_BPS)
