"""The tables [optimizer] and [[optimizer.groups]] of a request."""

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.optimizer_options import CONVENTIONS, OPTIMIZERS, WITH_TRUST, WITHOUT_DECAY
from paceline.spec.messages import abbreviate, suggest
from paceline.spec.values import MAX_INT, Decay, Value


class ParamGroup(Value):
    """Options of the parameters whose names match a pattern of `optimizer.groups`; None: as the others.

    ParamGroup(lr_scale=0.1, weight_decay=0.0)
    """

    lr: float | None = Field(default=None, gt=0, description="learning rate")
    lr_scale: float | None = Field(default=None, gt=0, description="factor on optimizer.lr")
    weight_decay: float | None = Field(default=None, ge=0, description="weight decay")
    trust: bool | None = Field(default=None, description="whether the trust ratio of lars and lamb applies")

    @model_validator(mode="before")
    @classmethod
    def _options_are_known(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values.keys() - cls.model_fields.keys():
                raise ValueError(
                    f"a group of optimizer.groups has no option {abbreviate(key)}"
                    f"{suggest(str(key), cls.model_fields)}"
                )
        return values

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.lr is not None and self.lr_scale is not None:
            raise ValueError(
                f"a group of optimizer.groups has lr={self.lr:g} and lr_scale={self.lr_scale:g}; leave one "
                "out"
            )
        if all(value is None for _, value in self):
            raise ValueError(
                "a group of optimizer.groups is empty; give it lr, lr_scale, weight_decay or trust"
            )
        return self


# Options that are lists of numbers, and the default of an optimizer that has them.
NUMBER_LISTS = {
    key: value
    for options in reversed([*OPTIMIZERS.values()])
    for key, value in options.items()
    if isinstance(value, tuple)
}
LARGEST = 3.4e38
KEYWORDS_AND_PATTERNS = "norm, bias, embedding or patterns of names, separated by commas"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Optimizer(Value):
    """The built-in optimizer. An option that is None has the default of the optimizer.

        Optimizer(name="sgd", lr=0.1, momentum=0.9, clip=1.0)

    `optimizer_options.OPTIMIZERS` has the options of each optimizer; others are refused.
    """

    name: str = Field(
        default="adamw",
        description=f"optimizer: {', '.join(OPTIMIZERS)}; ignored if the task defines its own",
    )
    lr: float = Field(default=1e-3, gt=0, description="learning rate, before the schedule's factor")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="weight decay: added to the gradient, but decoupled for adamw, lion, lamb, "
        "adafactor and muon",
    )
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="momentum of sgd, rmsprop, lars and muon"
    )
    nesterov: bool | None = Field(default=None, description="use Nesterov momentum; sgd, lars and muon")
    dampening: float | None = Field(default=None, ge=0, le=1, description="dampening of the momentum of sgd")
    betas: tuple[Decay, Decay] | None = Field(
        default=None,
        strict=False,
        description="decay rates of the two moments of adamw and its relatives, lion, lamb and novograd",
    )
    eps: float | None = Field(default=None, gt=0, description="term added to denominators")
    amsgrad: bool | None = Field(
        default=None, description="divide by the largest second moment so far; adam, adamw"
    )
    momentum_decay: float | None = Field(default=None, ge=0, description="decay of the momentum of nadam")
    decoupled_weight_decay: bool | None = Field(
        default=None, description="decouple the weight decay from the gradient; nadam and radam"
    )
    lr_decay: float | None = Field(default=None, ge=0, description="decay of the learning rate of adagrad")
    initial_accumulator_value: float | None = Field(
        default=None, ge=0, description="initial sum of squares of adagrad"
    )
    rho: float | None = Field(default=None, ge=0, lt=1, description="decay rate of the averages of adadelta")
    alpha: float | None = Field(
        default=None, ge=0, le=1, description="decay rate of squares of rmsprop; power of the rate of asgd"
    )
    centered: bool | None = Field(default=None, description="divide by the standard deviation; rmsprop")
    etas: tuple[float, float] | None = Field(
        default=None, strict=False, description="factors that shrink and grow the steps of rprop"
    )
    step_sizes: tuple[float, float] | None = Field(
        default=None, strict=False, description="smallest and largest step of rprop"
    )
    lambd: float | None = Field(default=None, ge=0, description="decay term of asgd")
    t0: float | None = Field(default=None, ge=0, description="update from which asgd averages weights")
    trust_coefficient: float | None = Field(
        default=None, gt=0, description="ratio of the norms of update and weights; lars"
    )
    trust_clip: float | None = Field(
        default=None, gt=0, description="largest trust ratio of a tensor; lars, lamb [default: none]"
    )
    convention: str | None = Field(
        default=None,
        description="whose update to compute where implementations differ: you2017 or timm for lars, "
        "you2020 or timm for lamb",
    )
    bias_correction: bool | None = Field(default=None, description="correct the first moments; lamb")
    grad_averaging: bool | None = Field(
        default=None, description="average gradients in the first moment instead of adding them; novograd"
    )
    beta2_decay: float | None = Field(
        default=None, lt=0, description="power of the step in the second moment of adafactor"
    )
    eps2: float | None = Field(
        default=None, gt=0, description="smallest scale of a tensor for scale_parameter; adafactor"
    )
    clip_threshold: float | None = Field(
        default=None, ge=1, description="largest root mean square of an update; adafactor"
    )
    scale_parameter: bool | None = Field(
        default=None, description="multiply the learning rate by the scale of each tensor; adafactor"
    )
    relative_step: bool | None = Field(
        default=None, description="limit the learning rate to 1/sqrt(step); adafactor"
    )
    ns_steps: int | None = Field(
        default=None, ge=1, le=99, description="steps of the Newton-Schulz iteration of muon"
    )
    ns_coefficients: tuple[float, float, float] | None = Field(
        default=None, strict=False, description="coefficients of the Newton-Schulz iteration of muon"
    )
    ns_precision: Literal["bf16", "full"] | None = Field(
        default=None, description="data type of the iteration of muon: bf16, or that of the weights"
    )
    adjust_lr: Literal["original", "match_rms_adamw"] | None = Field(
        default=None, description="how muon scales updates by the shape of a matrix"
    )
    adamw: str | None = Field(
        default=None,
        description="patterns of names that muon trains by AdamW besides vectors, separated by commas "
        "[default: embeddings and the last layer]",
    )
    adamw_lr: float | None = Field(
        default=None, gt=0, description="learning rate of the AdamW of muon [default: lr]"
    )
    fused: str | None = Field(
        default=None,
        description="patterns of matrices that are several, such as *.kv_proj.weight:2, which muon "
        "orthogonalizes separately [default: queries, keys and values in one matrix]",
    )
    no_decay: str | None = Field(
        default=None,
        description="parameters without weight decay: norm, bias, embedding, or patterns of names, separated "
        "by commas [default: none]",
    )
    no_trust: str | None = Field(
        default=None,
        description="parameters whose updates lars and lamb do not scale, as for no_decay [default: none]",
    )
    groups: dict[str, ParamGroup] | None = Field(
        default=None,
        description="options by pattern of names: lr, lr_scale, weight_decay, trust; the first match counts",
    )
    clip: float | None = Field(
        default=None, gt=0, description="maximum norm of the whole gradient [default: no clipping]"
    )
    clip_value: float | None = Field(
        default=None, gt=0, description="largest element of the gradient, after clip [default: no limit]"
    )
    agc: float | None = Field(
        default=None,
        gt=0,
        description="largest norm of the gradient of a row relative to that of its weights [default: none]",
    )
    no_agc: str | None = Field(
        default=None, description="parameters that agc does not clip, named as for no_decay [default: none]"
    )
    on_nan: Literal["stop", "skip"] = Field(
        default="stop",
        description="if the gradient is NaN or infinite: stop, or skip the update of up to 10 steps in a row",
    )
    ema: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="decay of an exponential average of the weights, which evaluations use [default: none]",
    )
    swa: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="step from which evaluations use the mean of the weights so far [default: never]",
    )
    swa_every: int | None = Field(
        default=None, ge=1, le=MAX_INT, description="steps between two weights in that mean [default: 1]"
    )

    @field_validator("name", mode="before")
    @classmethod
    def _name_is_known(cls, name: Any) -> Any:
        if not isinstance(name, str) or name not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {abbreviate(name)}{suggest(str(name), OPTIMIZERS)}")
        return name

    @field_validator(*NUMBER_LISTS, mode="before")
    @classmethod
    def _are_numbers(cls, value: Any, about: ValidationInfo) -> Any:
        """Refuse anything but a list of as many numbers as the option has."""
        example = NUMBER_LISTS[about.field_name or ""]
        is_list = isinstance(value, (list, tuple)) and len(value) == len(example)
        if value is None or (is_list and all(map(_is_number, value))):
            return value
        raise ValueError(
            f"optimizer.{about.field_name} must be a list of {len(example)} numbers, such as "
            f"[{','.join(f'{number:g}' for number in example)}], got {abbreviate(value)}"
        )

    @field_validator("etas", "step_sizes")
    @classmethod
    def _are_ordered(cls, pair: tuple[float, float] | None, about: ValidationInfo) -> Any:
        """Refuse factors that do not shrink and grow the steps, and limits in another order."""
        if pair is None:
            return pair
        if about.field_name == "etas" and not 0 < pair[0] < 1 < pair[1]:
            raise ValueError(
                "optimizer.etas must be a factor between 0 and 1 and one above 1, such as [0.5,1.2], got "
                f"[{pair[0]:g},{pair[1]:g}]"
            )
        if about.field_name == "step_sizes" and not 0 < pair[0] <= pair[1]:
            raise ValueError(
                "optimizer.step_sizes must be the smallest step, above 0, and the largest, such as "
                f"[1e-06,50], got [{pair[0]:g},{pair[1]:g}]"
            )
        return pair

    @field_validator("no_decay", "no_trust", "no_agc")
    @classmethod
    def _names_parameters(cls, patterns: str | None, about: ValidationInfo) -> str | None:
        if patterns is not None and not patterns.replace(",", " ").strip():
            raise ValueError(
                f"optimizer.{about.field_name}={patterns!r} names no parameter; write "
                f"{KEYWORDS_AND_PATTERNS}, or leave it out"
            )
        return patterns

    @field_validator("groups")
    @classmethod
    def _groups_name_parameters(cls, groups: dict[str, ParamGroup] | None) -> dict[str, ParamGroup] | None:
        if groups is None:
            return None
        if not groups:
            raise ValueError(
                "optimizer.groups is empty; give it a pattern with options, such as "
                "{'head.*'={lr=0.01}}, or leave it out"
            )
        for pattern in groups:
            if not pattern.replace(",", " ").strip():
                raise ValueError(
                    f"optimizer.groups has the pattern {pattern!r}, which names no parameter; write "
                    f"{KEYWORDS_AND_PATTERNS}"
                )
        return groups

    @model_validator(mode="after")
    def _options_exist(self) -> Self:
        options = OPTIMIZERS[self.name]
        for key in sorted(set().union(*OPTIMIZERS.values()) - options.keys()):
            if (value := getattr(self, key)) is None:
                continue
            owners = [name for name, others in OPTIMIZERS.items() if key in others]
            raise ValueError(
                f"{self.name} has no option {key}, got optimizer.{key}={value}; leave it out, or use "
                f"{', '.join(owners)}; options of {self.name}: {', '.join(options)}"
            )
        if self.weight_decay and self.name in WITHOUT_DECAY:
            raise ValueError(
                f"{self.name} has no weight decay, got optimizer.weight_decay={self.weight_decay:g}; "
                "leave it out"
            )
        self._check_sizes()
        self._check_groups()
        self._check_averages()
        known = CONVENTIONS.get(self.name, ())
        if self.convention is not None and self.convention not in known:
            raise ValueError(
                f"optimizer.convention of {self.name} must be {' or '.join(known)}, got "
                f"{abbreviate(self.convention)}"
            )
        if self.options.get("nesterov") and not self.options["momentum"]:
            raise ValueError(
                "optimizer.nesterov requires momentum above 0, got optimizer.momentum=0; set "
                "optimizer.nesterov=false"
            )
        if self.options.get("nesterov") and self.options.get("dampening"):
            raise ValueError(
                f"optimizer.nesterov requires no dampening, got optimizer.dampening={self.dampening:g}; "
                "leave one out"
            )
        return self

    def _check_sizes(self) -> None:
        """Refuse numbers that torch cannot convert to the data type of float32 weights."""
        values = {"weight_decay": self.weight_decay, **{key: getattr(self, key) for key in self.options}}
        values |= {
            f"groups.{pattern}.weight_decay": group.weight_decay
            for pattern, group in (self.groups or {}).items()
        }
        for key, value in values.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if any(_is_number(number) and abs(number) > LARGEST for number in numbers):
                raise ValueError(
                    f"optimizer.{key} must be at most {LARGEST:g}, the largest number of float32, got "
                    f"{abbreviate(value)}"
                )

    def _check_averages(self) -> None:
        if self.ema is not None and self.swa is not None:
            raise ValueError(
                f"optimizer.ema={self.ema:g} and optimizer.swa={self.swa} are two averages of the weights; "
                "leave one out"
            )
        if self.swa_every is not None and self.swa is None:
            raise ValueError(
                f"optimizer.swa_every={self.swa_every} requires optimizer.swa, the first step of the mean"
            )
        if self.no_agc is not None and self.agc is None:
            raise ValueError(f"optimizer.no_agc={self.no_agc!r} requires optimizer.agc, such as 0.01")

    def _check_groups(self) -> None:
        groups = self.groups or {}
        if self.no_decay and not (self.weight_decay or any(group.weight_decay for group in groups.values())):
            raise ValueError(
                f"optimizer.no_decay={self.no_decay!r} has no effect without weight decay; set "
                "optimizer.weight_decay"
            )
        has_trust = self.no_trust is not None or any(group.trust is not None for group in groups.values())
        if has_trust and self.name not in WITH_TRUST:
            raise ValueError(
                f"{self.name} has no trust ratio, got optimizer.no_trust or a group with trust; leave it "
                f"out, or use {' or '.join(WITH_TRUST)}"
            )
        if self.name in WITHOUT_DECAY and any(group.weight_decay for group in groups.values()):
            raise ValueError(
                f"{self.name} has no weight decay, got a group of optimizer.groups with it; leave it out"
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options of this optimizer besides lr, weight_decay and clip, with its defaults."""
        options = OPTIMIZERS[self.name]
        values = {key: getattr(self, key) for key in options}
        return {key: options[key] if value is None else value for key, value in values.items()}
