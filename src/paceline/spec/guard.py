"""The table [guard] of a request: comparisons that find silently corrupted weights."""

from typing import Self

from pydantic import Field, model_validator

from paceline.spec.values import MAX_INT, Value


class WeightGuard(Value):
    """When ranks compare the bits of their weights, to find memory and processors that corrupt them silently.

    WeightGuard(every=100, locate=True)
    """

    every: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="steps between comparisons of the weights of replicas; each checkpoint is preceded by a "
        "comparison, too [default: none]",
    )
    locate: bool = Field(
        default=False,
        description="record digests of weights and gradients in each step, which finds the step of a fault, "
        "and weights that change between two updates",
    )
    recompute: bool = Field(
        default=False,
        description="in each compared step, compute the loss of a micro-batch on a second data rank, too",
    )

    @model_validator(mode="after")
    def _options_have_comparisons(self) -> Self:
        for name in ("locate", "recompute"):
            if getattr(self, name) and self.every is None:
                raise ValueError(
                    f"guard.{name}=true requires guard.every, the steps between comparisons, such as 100"
                )
        if self.locate and self.every is not None and self.every > MAX_LOCATED:
            raise ValueError(
                f"guard.locate=true keeps digests of all steps between comparisons and requires guard.every "
                f"of at most {MAX_LOCATED}, got {self.every}"
            )
        return self


MAX_LOCATED = 10_000
