"""A learning-rate scheduler of torch as a function: the factor on the learning rate by its steps."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import TaskError

RATE_KEYS = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "params"}


class SchedulerFactors:
    """The factors that a scheduler gives to the learning rates of its optimizer, which must be equal.

    A scheduler has a state. This calls its `step` once for each factor and keeps the factors, so that a
    training that resumes finds the factor of any step.

    scheduler: new, of an optimizer whose parameters have no gradients. It is changed.
    owner: where it was made, for errors.

    Raises TaskError for a scheduler that follows a metric, changes more than learning rates, or changes those
    of parameter groups differently.
    """

    def __init__(self, scheduler: Any, owner: str):
        self.kind, self._scheduler, self._owner = type(scheduler).__name__, scheduler, owner
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TaskError(
                f"{owner} returns a ReduceLROnPlateau, which follows a metric; leave it out, and use "
                "--schedule plateau"
            )
        self._optimizer: Optimizer = scheduler.optimizer
        groups = self._optimizer.param_groups
        self._initial = [float(group["initial_lr"]) for group in groups]
        if 0.0 in self._initial:
            raise TaskError(
                f"{owner} returns a {self.kind} for a learning rate of 0, of which there is no factor; give "
                "the optimizer the largest learning rate"
            )
        self._others = self._read_others()
        self._factors = [self._read_factor()]
        self.after(1)  # so that an unsuitable scheduler is refused before the first step

    def after(self, steps: int) -> float:
        """Return the factor after this number of steps of the scheduler."""
        while len(self._factors) <= steps:
            self._optimizer.step()  # changes nothing, because there are no gradients
            self._scheduler.step()
            if self._read_others() != self._others:
                raise TaskError(
                    f"{self._owner} returns a {self.kind} that changes more than the learning rate, such as "
                    "the momentum; give it cycle_momentum=False"
                )
            self._factors.append(self._read_factor())
        return self._factors[steps]

    def _read_factor(self) -> float:
        groups = self._optimizer.param_groups
        factors = [float(group["lr"]) / lr for group, lr in zip(groups, self._initial, strict=True)]
        if max(factors) - min(factors) > 1e-9 * max(map(abs, factors)):
            raise TaskError(
                f"{self._owner} returns a {self.kind} with different factors for parameter groups; use the "
                "same function for all groups"
            )
        return factors[0]

    def _read_others(self) -> list[dict[str, str]]:
        return [
            {key: repr(value) for key, value in group.items() if key not in RATE_KEYS}
            for group in self._optimizer.param_groups
        ]
