"""A check that a pipeline gives gradients to the same parameters as a plain pass."""

from collections.abc import Collection

from torch import nn

from paceline.distributed.dtensor import is_materialized
from paceline.errors import PlanError
from paceline.plan.plan import Plan


class GradientCheck:
    """Compares the parameters that have gradients with those that get gradients in a plain pass.

    `expected`: names of the parameters that get gradients in a plain pass. `required`: those that must have a
    gradient on this rank.
    """

    def __init__(self, plan: Plan, model: nn.Module, expected: Collection[str], required: Collection[str]):
        self.plan, self.model, self.expected, self.required = plan, model, expected, required
        self.is_checked = False

    def check_and_drop_extra(self) -> None:
        """Raise PlanError if a required gradient is missing in the first step, and drop unexpected gradients.

        Unexpected gradients are zeros, of values that cross a cut and are not used after it.
        """
        own = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and is_materialized(parameter)
        ]
        if not self.is_checked:
            missing = [name for name, parameter in own if parameter.grad is None and name in self.required]
            if missing:
                others = f" and {len(missing) - 1} more" if missing[1:] else ""
                raise PlanError(
                    f"plan {self.plan}: {missing[0]}{others} got no gradient in this pipeline, and gets one "
                    "on one process; this is a defect of Paceline; use pp_schedule=1f1b or a plan without pp"
                )
            self.is_checked = True
        for name, parameter in own:
            if name not in self.expected:
                parameter.grad = None
