"""Dynamic loss scaling for fp16."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al., Mixed precision training, 2018).

    The norm of the whole gradient decides, so that all ranks agree. torch's GradScaler looks only at the
    shards of its rank.
    """

    scale: float = 65536.0
    good_steps: int = 0

    def is_finite(self, norm: Tensor) -> bool:
        """Return whether the norm is finite. Waits for the device."""
        return bool(norm.isfinite())

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step. `finite`: whether the gradient was."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == 2000:
            self.scale, self.good_steps = self.scale * 2, 0
