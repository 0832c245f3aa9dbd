"""Learning-rate schedules."""

import math

from paceline.errors import SpecError
from paceline.spec import Schedule


def check_schedule(schedule: Schedule, total: int) -> None:
    """Raise SpecError if the warm-up is longer than the training.

    schedule: with lengths in samples. `total`: samples of the training.
    """
    assert isinstance(schedule.warmup, int)
    if schedule.warmup > total:
        raise SpecError(
            f"schedule.warmup={schedule.warmup} samples is longer than the training, {total} samples"
        )


def compute_lr_factor(schedule: Schedule, samples: int, total: int) -> float:
    """Return the factor on the learning rate after `samples` of `total` samples.

    The warm-up is linear and starts at 1 / (warmup + 1), not at 0. `schedule`: with lengths in samples.
    """
    assert isinstance(schedule.warmup, int)
    if samples < schedule.warmup:
        return (samples + 1) / (schedule.warmup + 1)
    if schedule.name == "step":
        assert isinstance(schedule.every, int)
        return schedule.factor ** (samples // schedule.every)
    done = min(1.0, (samples - schedule.warmup) / max(1, total - schedule.warmup))
    if schedule.name == "cosine":
        return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * done)) / 2
    if schedule.name == "linear":
        return 1 - (1 - schedule.floor) * done
    return 1.0
