"""The table [schedule] of a request."""

import itertools
import re
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.errors import SpecError
from paceline.spec.messages import abbreviate
from paceline.spec.values import MAX_INT, Samples, Value, check_direction

LENGTH = re.compile(
    r"\d{1,12}(\.\d{1,6})? (sample|step|epoch)s?|\d{1,15}(\.\d{1,6})?(e\d{1,2})? tokens?", re.ASCII
)


class Schedule(Value):
    """The factor on the learning rate over the training.

    Lengths count samples, so that the schedule does not depend on ranks or micro-batches.

        Schedule(name="cosine", warmup="5 epochs", floor=0.1)
    """

    name: Literal[
        "constant",
        "cosine",
        "linear",
        "step",
        "polynomial",
        "cosine-restarts",
        "milestones",
        "one-cycle",
        "wsd",
        "inverse-sqrt",
        "plateau",
        "task",
    ] = Field(default="constant", description="shape of the schedule after the warm-up")
    warmup: Samples = Field(
        default=0,
        description='length of the linear warm-up: samples, or "50 steps", "5 epochs", "1e6 tokens"',
    )
    start: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="factor at the begin of the warm-up [default: 1 / (samples + 1)]",
    )
    length: Samples | None = Field(
        default=None, description="length of the whole schedule [default: that of the training]"
    )
    floor: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="factor at the end; cosine, cosine-restarts, linear, polynomial, one-cycle, wsd, plateau",
    )
    every: Samples | None = Field(
        default=None,
        description='samples between two decays of step, or of the first cycle of cosine-restarts, or "50 '
        'steps", "5 epochs"',
    )
    factor: float = Field(
        default=0.1, gt=0, le=1, description="factor of each decay; step, milestones, plateau"
    )
    milestones: tuple[Samples, ...] = Field(
        default=(), strict=False, description='when milestones decays, such as ["30 epochs", "60 epochs"]'
    )
    power: float | None = Field(default=None, gt=0, description="exponent of polynomial [default: 2]")
    growth: float | None = Field(
        default=None, ge=1, description="growth of each cycle of cosine-restarts [default: 1]"
    )
    decay: Samples | None = Field(
        default=None, description="length of the decay at the end of wsd [default: 20 % of the schedule]"
    )
    decay_shape: Literal["linear", "1-sqrt", "cosine"] | None = Field(
        default=None, description="shape of the decay of wsd [default: linear]"
    )
    metric: str | None = Field(
        default=None, description="metric of plateau: min NAME or max NAME [default: that of save.best]"
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="evaluations without a better metric before plateau decays [default: 3]",
    )
    min_delta: float | None = Field(
        default=None, ge=0, description="least change of the metric that counts as better; plateau"
    )

    base_batch: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="batch for which optimizer.lr was chosen, which lr_scale adapts [default: none]",
    )
    lr_scale: Literal["linear", "sqrt", "none"] | None = Field(
        default=None,
        description="how the learning rate grows with batch / base_batch [default: linear]",
    )
    scale_betas: bool = Field(
        default=False, description="scale betas and eps of Adam with the batch, too (Malladi et al., 2022)"
    )
    scale_decay: bool = Field(
        default=False, description="keep the decoupled weight decay per sample when the batch grows"
    )

    @field_validator("warmup", "every", "length", "decay", mode="before")
    @classmethod
    def _is_a_length(cls, value: Any, about: ValidationInfo) -> Any:
        if value is None and about.field_name != "warmup":
            return value
        return check_length(f"schedule.{about.field_name}", value, minimum=about.field_name != "warmup")

    @field_validator("milestones", mode="before")
    @classmethod
    def _are_lengths(cls, values: Any) -> Any:
        if isinstance(values, (list, tuple)):
            return [check_length("schedule.milestones", value, minimum=1) for value in values]
        raise ValueError(
            f'schedule.milestones must be a list, such as ["30 epochs","60 epochs"], got {abbreviate(values)}'
        )

    @model_validator(mode="after")
    def _options_have_a_use(self) -> Self:
        if (self.name in ("step", "cosine-restarts")) != (self.every is not None):
            raise ValueError(
                "schedule.every is required by step (samples between two decays) and cosine-restarts "
                f"(samples of the first cycle), and only by them; got name={self.name!r}, every={self.every}"
            )
        for key, owner in SCHEDULE_OWNERS.items():
            if self.name != owner and (value := getattr(self, key)) not in (None, ()):
                raise ValueError(
                    f"schedule.{key}={value!r} applies to {owner}, and the schedule is {self.name}; leave it "
                    f"out, or use --schedule {owner}"
                )
        if self.name == "milestones" and not self.milestones:
            raise ValueError('schedule milestones requires schedule.milestones, such as ["30 epochs"]')
        if self.name == "inverse-sqrt" and not self.warmup:
            raise ValueError("schedule inverse-sqrt requires schedule.warmup, after which it decays")
        if self.metric is not None:
            check_direction("schedule.metric", self.metric)
        for key in ("lr_scale", "scale_betas", "scale_decay"):
            if self.base_batch is None and (value := getattr(self, key)):
                raise ValueError(
                    f"schedule.{key}={value} requires schedule.base_batch, the batch for which optimizer.lr "
                    "was chosen"
                )
        return self

    def in_samples(self, batch: int, samples: int, tokens: float | None = None) -> Self:
        """Return the schedule with all lengths in samples.

        A step has `batch` samples, an epoch `samples`, a sample `tokens` tokens. Raises SpecError for tokens
        if their number is not known, and if milestones are not in their order.
        """

        def convert(length: Samples, minimum: int = 1) -> int:
            if isinstance(length, int):
                return length
            number, unit = length.split()
            unit = unit.removesuffix("s")
            if unit == "token" and not tokens:
                raise SpecError(
                    f"{length!r} in the schedule needs the number of tokens of a sample; define "
                    "tokens_per_sample in the task, or use samples, steps or epochs"
                )
            size = {"sample": 1, "step": batch, "epoch": samples, "token": 1 / (tokens or 1)}[unit]
            return max(minimum, round(float(number) * size))

        milestones = tuple(map(convert, self.milestones))
        if any(later <= earlier for earlier, later in itertools.pairwise(milestones)):
            raise SpecError(
                f"schedule.milestones must increase, got {', '.join(map(str, self.milestones))}; sort them"
            )
        lengths = {key: getattr(self, key) for key in ("every", "length", "decay")}
        converted: dict[str, Any] = {
            key: convert(value) for key, value in lengths.items() if value is not None
        }
        return self.model_copy(
            update={"warmup": convert(self.warmup, 0), "milestones": milestones, **converted}
        )


# Options of a schedule that only one shape has.
SCHEDULE_OWNERS = {
    "milestones": "milestones",
    "power": "polynomial",
    "growth": "cosine-restarts",
    "decay": "wsd",
    "decay_shape": "wsd",
    "metric": "plateau",
    "patience": "plateau",
    "min_delta": "plateau",
}


def check_length(key: str, value: Any, minimum: int) -> Any:
    """Return a length in samples, steps, epochs or tokens. Raises ValueError if it is none.

    minimum: number of samples.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_INT
    if is_number or (isinstance(value, str) and LENGTH.fullmatch(value)):
        if minimum and isinstance(value, str) and not float(value.split()[0]):
            raise ValueError(f"{key} must be longer than 0, got {value!r}")
        return value
    expected = f"samples (an integer, at least {int(minimum)}), '50 steps' or '5 epochs'"
    raise ValueError(f"{key} must be {expected}, got {abbreviate(value)}")
