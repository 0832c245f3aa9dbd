"""The wrapper of a drill calls the methods of the user's own task."""

from pathlib import Path

import models
from paceline.drill.sample_log_task import SampleLog, wrap_task
from paceline.spec import Schedule
from paceline.training.optimization.schedule import check_schedule, compute_lr_factor

SCHEDULE = Schedule(name="task")


class Halved(models.Points):
    """Its rate is that of the instance whose data set was opened, as the training has it."""

    def dataset(self, split: str) -> models.Pairs | None:
        object.__setattr__(self, "opened", True)
        return super().dataset(split)

    def lr_factor(self, progress: float) -> float:
        return 0.5 * (1 - progress) if vars(self).get("opened") else -1.0


def test_lr_factor_is_that_of_the_own_task(tmp_path: Path) -> None:
    logged = wrap_task(Halved, SampleLog(tmp_path, tmp_path / "pace", 2, 1))()
    logged.dataset("train")
    check_schedule(SCHEDULE, 100, logged)
    assert compute_lr_factor(SCHEDULE, 50, 100, logged) == 0.25


def test_a_task_without_lr_factor_stays_without(tmp_path: Path) -> None:
    logged = wrap_task(models.Points, SampleLog(tmp_path, tmp_path / "pace", 2, 1))
    assert logged.lr_factor is models.Points.lr_factor
