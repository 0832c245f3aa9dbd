"""The tables [save] and [stop] of a request: when to write checkpoints, and when to end."""

from typing import Self

from pydantic import Field, model_validator

from paceline.spec.values import MAX_INT, Value, check_direction


class Save(Value):
    """When to write checkpoints, and which to keep. The end of a training always writes a checkpoint.

    Save(every=500, minutes=float("inf"), keep=3, best="max accuracy")
    """

    every: int | None = Field(
        default=None, gt=0, le=MAX_INT, description="steps between two checkpoints [default: by time only]"
    )
    minutes: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=True,
        description="minutes between two checkpoints; inf: only by steps",
    )
    keep: int = Field(
        default=2, ge=1, le=MAX_INT, description="number of recent checkpoints to keep, besides the best"
    )
    best: str = Field(
        default="min loss", description="metric that determines the best checkpoint: min NAME or max NAME"
    )

    @model_validator(mode="after")
    def _best_is_a_direction(self) -> Self:
        check_direction("save.best", self.best)
        return self


class Stop(Value):
    """When a training ends before its length, by a metric of its evaluations. All ranks end at the same step.

    Stop(metric="max accuracy", patience=3, min_delta=0.001, target=0.98)
    """

    metric: str | None = Field(
        default=None, description="metric that decides: min NAME or max NAME [default: that of save.best]"
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="end after this many evaluations in a row without a better metric [default: never]",
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="least change of the metric that counts as better; with patience only"
    )
    target: float | None = Field(
        default=None, description="end when the metric reaches this value [default: never]"
    )

    @model_validator(mode="after")
    def _metric_has_a_use(self) -> Self:
        if self.metric is not None:
            check_direction("stop.metric", self.metric)
            if not self.is_active:
                raise ValueError(
                    f"stop.metric={self.metric!r} requires stop.patience (evaluations without a better "
                    "metric) or stop.target (a value of the metric)"
                )
        if self.min_delta and self.patience is None:
            raise ValueError(
                f"stop.min_delta={self.min_delta:g} requires stop.patience, the number of evaluations "
                "without such a change"
            )
        return self

    @property
    def is_active(self) -> bool:
        """Whether an evaluation may end the training."""
        return self.patience is not None or self.target is not None
