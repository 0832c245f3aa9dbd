"""LightningTask: a LightningModule as a task.

from paceline.adapters.lightning import LightningTask

class Digits(LightningTask):
    width: int = 64
    def module(self): return LitDigits(self.width)
    def dataset(self, split): return ...
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.adapters.lightning_module import adapt
from paceline.adapters.lr_schedulers import SchedulerFactors
from paceline.batch import count_samples
from paceline.errors import TaskError
from paceline.task import Task


class LightningTask(Task):
    """A task whose model, loss, metrics and optimizer are those of a LightningModule.

    A subclass defines `module` and `dataset`. The model is the LightningModule, and its parameters have their
    names. Its `training_step` computes the loss. If it has a `validation_step`, evaluations call it, and what
    it logs are metrics. Its `configure_optimizers` returns one optimizer, and one learning-rate scheduler at
    most, which requires `--schedule task`.

    Raises TaskError for what needs the Trainer of Lightning: hooks, manual optimization, `self.trainer`.
    """

    def module(self) -> Any:
        """Return the LightningModule."""
        raise TaskError(f"{type(self).__name__} has no method module; return a LightningModule from it")

    def model(self) -> nn.Module:
        return adapt(self.module())

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"batch": batch}

    def loss(self, output: Any, batch: Any) -> Tensor:
        loss: Tensor = output["loss"]
        return loss

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Any]:
        """Return the values that validation_step logged, for each sample of the batch.

        output: has the keys `loss`, `logged`, and `returned`, the dict that validation_step returned.
        """
        samples = count_samples(batch)
        return {name: value.float().expand(samples) for name, value in output["logged"].items()}

    def optimizer(self, params: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return the optimizer of `configure_optimizers`, over these parameters."""
        optimizer, scheduler = _configure(self._build_skeleton(dict(params)))
        if scheduler is None:
            return optimizer
        self._scheduler()  # raises TaskError for an unsuitable scheduler
        for group in optimizer.param_groups:
            group["lr"] = group.pop("initial_lr")
        vars(optimizer).pop("step", None)  # which the scheduler has wrapped
        return optimizer

    def lr_factor(self, progress: float, step: int = 0, epoch: int = 0) -> float:
        """Return the factor of the scheduler after this number of steps and epochs."""
        found = self._scheduler()
        if found is None:
            raise TaskError(
                f"configure_optimizers of {type(self).__name__} returns no scheduler; leave out --schedule "
                "task"
            )
        factors, interval, frequency = found
        return factors.after((step if interval == "step" else epoch) // frequency)

    def _own_schedule(self) -> str | None:
        found = self._scheduler()
        return None if found is None else f"{found[0].kind} of configure_optimizers"

    def _scheduler(self) -> tuple[SchedulerFactors, str, int] | None:
        """Return the scheduler of `configure_optimizers` with its interval and frequency."""
        if "_read_scheduler" not in vars(self):
            scheduler = _configure(self._build_skeleton({}))[1]
            found = None if scheduler is None else _read_scheduler(scheduler, type(self).__name__)
            object.__setattr__(self, "_read_scheduler", found)  # tasks are frozen
        result: tuple[SchedulerFactors, str, int] | None = vars(self)["_read_scheduler"]
        return result

    def _build_skeleton(self, params: Mapping[str, nn.Parameter]) -> Any:
        """Return the module without values, but with these parameters by name."""
        with torch.device("meta"):
            module = adapt(self.module())
        by_identity = {
            id(parameter): params[name] for name, parameter in module.named_parameters() if name in params
        }
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if id(parameter) in by_identity:
                    child._parameters[name] = by_identity[id(parameter)]
        return module


def _configure(module: Any) -> tuple[Optimizer, Any]:
    """Return the optimizer and the scheduler, or the table of a scheduler, of `configure_optimizers`.

    Parameters that have no values here are left out. Raises TaskError.
    """
    configured = module.configure_optimizers()
    optimizers, schedulers = _separate(configured)
    owner = f"configure_optimizers of {type(module).__name__}"
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise TaskError(
            f"{owner} returns {len(optimizers)} optimizers and {len(schedulers)} schedulers; return one "
            "optimizer and one scheduler at most, or write a task with updates() (paceline.Update)"
        )
    [optimizer] = optimizers
    if not isinstance(optimizer, Optimizer):
        raise TaskError(f"{owner} must return an optimizer of torch, got {type(optimizer).__name__}")
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter.is_meta for parameter in params):
        for group in optimizer.param_groups:  # frozen parameters have no values here
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
    return optimizer, schedulers[0] if schedulers else None


def _separate(configured: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers, in the forms that Lightning accepts."""
    if isinstance(configured, Mapping):
        scheduler = configured.get("lr_scheduler")
        return [configured.get("optimizer")], [] if scheduler is None else [scheduler]
    if not isinstance(configured, (list, tuple)):
        return [configured], []
    if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        schedulers = configured[1]
        return list(configured[0]), list(schedulers) if isinstance(schedulers, (list, tuple)) else [
            schedulers
        ]
    parts = [_separate(part) for part in configured]
    return [item for part in parts for item in part[0]], [item for part in parts for item in part[1]]


def _read_scheduler(scheduler: Any, owner: str) -> tuple[SchedulerFactors, str, int]:
    table = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    interval, frequency = table.get("interval", "epoch"), table.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise TaskError(
            f"configure_optimizers of {owner}: interval must be 'step' or 'epoch', got {interval!r}"
        )
    if not isinstance(frequency, int) or frequency < 1 or (interval == "step" and frequency > 1):
        raise TaskError(
            f"configure_optimizers of {owner}: frequency={frequency!r} with interval {interval!r} is not "
            "supported; use 1, and a scheduler that changes less often"
        )
    factors = SchedulerFactors(table.get("scheduler"), f"configure_optimizers of {owner}")
    return factors, interval, frequency
