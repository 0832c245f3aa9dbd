"""Spec and Launch: the request of a training, as frozen values.

They are read from TOML and overridden by `key=value`. A contradiction is an error; values are never repaired.
"""

import copy
import difflib
import inspect
import itertools
import math
import os
import re
import sys
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from paceline.errors import SpecError
from paceline.optimizer_options import CONVENTIONS, OPTIMIZERS, WITH_TRUST, WITHOUT_DECAY
from paceline.units import parse_duration_s

DEFAULT_EPOCHS = 20
HF_PREFIX, HF_TASK = "hf:", "paceline.hf.task:HuggingFace"
LENGTH = re.compile(
    r"\d{1,12}(\.\d{1,6})? (sample|step|epoch)s?|\d{1,15}(\.\d{1,6})?(e\d{1,2})? tokens?", re.ASCII
)

TRACE = re.compile(r"(\d{1,12}):(\d{1,12})", re.ASCII)
MAX_TRACED_STEPS = 100  # the events of all of them are in memory


class Value(BaseModel):
    """Base class of values: frozen, comparable and strict. An unknown key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Append the descriptions of the fields to the docstring, for `help()`."""
        super().__pydantic_init_subclass__(**options)
        described = {name: field.description for name, field in cls.model_fields.items() if field.description}
        if described:
            width = max(map(len, described))
            table = "\n".join(f"{name:{width}}  {text}" for name, text in described.items())
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or cls.__name__)}\n\n{table}"


def check_printable(value: BaseModel, *names: str) -> None:
    """Raise ValueError if a field has control characters, which could add lines to a job script."""
    for name in names:
        for text in _find_texts(getattr(value, name)):
            if not text.isprintable():
                raise ValueError(f"{name} must be a single line of printable text, got {text!r}")


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for item in pair for text in _find_texts(item))
    elif isinstance(value, tuple):
        yield from (text for item in value for text in _find_texts(item))


def check_direction(key: str, metric: str) -> None:
    """Raise ValueError if the metric of this key is not such as "min loss"."""
    if not re.fullmatch(r"(min|max) \S+", metric):
        raise ValueError(f"{key} must be 'min NAME' or 'max NAME', got {abbreviate(metric)}")


Decay = Annotated[float, Field(ge=0, lt=1)]
Samples = int | str  # a number of samples, or "50 steps", "5 epochs"
MAX_INT = 2**63 - 1  # TOML and torch count in 64 bits
MAX_DEPTH = 50  # levels of nesting in a value


class ParamGroup(Value):
    """Options of the parameters whose names match a pattern of `optimizer.groups`; None: as the others.

    ParamGroup(lr_scale=0.1, weight_decay=0.0)
    """

    lr: float | None = Field(default=None, gt=0, description="learning rate")
    lr_scale: float | None = Field(default=None, gt=0, description="factor on optimizer.lr")
    weight_decay: float | None = Field(default=None, ge=0, description="weight decay")
    trust: bool | None = Field(default=None, description="whether the trust ratio of lars and lamb applies")

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
        "orthogonalizes apart [default: queries, keys and values in one matrix]",
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
        if name not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {abbreviate(name)}{suggest(str(name), OPTIMIZERS)}")
        return name

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
        self._check_groups()
        self._check_averages()
        known = CONVENTIONS.get(self.name, ())
        if self.convention is not None and self.convention not in known:
            raise ValueError(
                f"optimizer.convention of {self.name} must be {' or '.join(known)}, got "
                f"{abbreviate(self.convention)}"
            )
        if self.options.get("nesterov") and not self.options["momentum"]:
            raise ValueError("nesterov requires momentum above 0, got momentum=0.0")
        return self

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
        return values

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
        return value
    expected = f"samples (an integer, at least {int(minimum)}), '50 steps' or '5 epochs'"
    raise ValueError(f"{key} must be {expected}, got {abbreviate(value)}")


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


class MixtureWeights(Value):
    """Weights of the sources of a Mixture, from a sample on.

    MixtureWeights(first=64000, weights=(0.5, 0.5))
    """

    first: int = Field(ge=1, le=MAX_INT, description="number of the first sample with these weights")
    weights: tuple[float, ...] = Field(strict=False, description="weight of each source")


class Loading(Value):
    """The order of the samples, and how each rank reads them.

    Loading(workers=4, prefetch=2, shuffle="window")
    """

    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="worker processes that read samples, per rank"
        " [default: spare cores on a machine with GPUs, else 0]",
    )
    prefetch: int = Field(default=2, ge=1, le=1024, description="batches that each worker reads ahead")
    shuffle: Literal["full", "window", "none"] = Field(
        default="full",
        description="order of each epoch: a permutation of all samples, of blocks and then within windows"
        " (for files that are read in sequence), or as in the dataset",
    )
    window: int = Field(
        default=16384,
        ge=1,
        le=MAX_INT,
        description="samples of a window, which has 64 blocks of neighboring samples; shuffle=window only",
    )
    weights: tuple[MixtureWeights, ...] = Field(
        default=(),
        strict=False,
        description="changes of the weights of a Mixture, each from a sample on; resume --weights adds one",
    )

    skip_corrupt: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="training samples on each rank that may raise DataError; the next are used instead",
    )

    @model_validator(mode="after")
    def _window_needs_windows(self) -> Self:
        if self.shuffle != "window" and self.window != type(self).model_fields["window"].default:
            raise ValueError(
                f"data.window={self.window} requires data.shuffle='window', got {self.shuffle!r}"
            )
        return self


class Spec(Value):
    """The part of a request that determines the result: task, batch, length, optimizer, seed and so on.

        spec = Spec(task="my.py:Net", set={"width": 64}, batch=32, epochs=10, optimizer=Optimizer(lr=0.01))
        for event in train(spec, "zero3"):
            print(event)

    `paceline.spec` has Optimizer, Schedule, Save, Stop and Loading, and also Launch: how the ranks are
    started. A wrong type, a value out of range and an unknown key raise pydantic's ValidationError, which
    is a ValueError. A task that is not a string raises SpecError.
    """

    task: str = Field(
        default="digits",
        description='built-in name, "path/to/file.py:Class", "package.module:Class" or "hf:FOLDER"',
    )
    set: dict[str, Any] = Field(default={}, description="fields of the task: its hyper-parameters")
    batch: int = Field(
        default=64,
        ge=1,
        le=10**9,
        description="samples of the global batch, which is one update; the plan decides how it is divided",
    )
    epochs: float | None = Field(
        default=None, gt=0, le=1e9, description=f"length in epochs [default: {DEFAULT_EPOCHS}]"
    )
    steps: int | None = Field(
        default=None, ge=1, le=10**12, description="length in steps; not together with epochs"
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=MAX_INT,
        description="seed of the initial weights, the order of samples and dropout",
    )
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = Field(
        default="fp32", description="data type in which the model computes"
    )
    tf32: bool = Field(
        default=False, description="let CUDA round the inputs of float32 matrix products to TF32"
    )
    compile: bool = Field(default=False, description="compile the model's blocks with torch.compile")
    allow_local_loss: bool = Field(
        default=False, description="accept a loss that mixes the samples of a batch"
    )
    batch_norm: Literal["global", "local"] = Field(
        default="global", description="compute BatchNorm statistics over all ranks, or on each rank"
    )
    evaluate_every: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="steps between evaluations [default: each epoch and the end]",
    )
    evaluate_splits: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description='splits to evaluate besides "validation"; their metrics are SPLIT/NAME: test/loss',
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of torch per rank"
        " [default: cores ÷ ranks of the machine, fewer if other processes keep cores busy]",
    )
    profile: bool | None = Field(
        default=None,
        description="profile steps for paceline profile; false: none"
        " [default: as many as cost less than 1 % of the time]",
    )
    trace: str | None = Field(
        default=None,
        description="first and last step to trace, such as 20:25; the trace shows what each rank does when"
        " [default: none]",
    )
    histograms: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="steps between histograms of weights, gradients and activations, for TensorBoard"
        " [default: none]",
    )
    graph: bool = Field(default=False, description="write the graph of the model for TensorBoard")
    nvtx: bool = Field(
        default=False,
        description="mark steps, phases, micro-batches and blocks with NVTX ranges, for Nsight Systems",
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=1e6,
        description="seconds that a rank waits for another; at least 600 until all have made a step",
    )
    max_time: str | None = Field(
        default=None,
        description="wall time after which a start of the training saves and stops, such as 90m or 1h30m; "
        "paceline resume continues [default: no limit]",
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="an Optimizer: name, lr and so on")
    schedule: Schedule = Field(default=Schedule(), description="a Schedule: the course of the learning rate")
    save: Save = Field(default=Save(), description="a Save: when to write checkpoints")
    stop: Stop = Field(default=Stop(), description="a Stop: when a metric ends the training")
    data: Loading = Field(default=Loading(), description="a Loading: how samples are read")

    @field_validator("max_time", mode="before")
    @classmethod
    def _max_time_is_a_duration(cls, value: Any) -> Any:
        try:
            if value is not None:
                parse_duration_s(str(value))
        except ValueError:
            raise ValueError(
                f"max_time must be a duration such as '90m', '1h30m' or '2d', got {abbreviate(value)}"
            ) from None
        return value

    @field_validator("trace")
    @classmethod
    def _trace_is_a_range(cls, text: str | None) -> str | None:
        if text is None:
            return None
        match = TRACE.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(
                f"trace must be the first and the last step, such as '20:25', got {abbreviate(text)}"
            )
        if (count := int(match[2]) - int(match[1]) + 1) > MAX_TRACED_STEPS:
            raise ValueError(f"trace={text} has {count:,} steps; trace at most {MAX_TRACED_STEPS}")
        return text

    @field_validator("evaluate_splits")
    @classmethod
    def _splits_have_names(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        for number, split in enumerate(splits):
            if not re.fullmatch(r"[^\s/]+", split):
                raise ValueError(
                    f"evaluate_splits must be names without spaces and slashes, got {abbreviate(split)}"
                )
            if split == "validation" or split in splits[:number]:
                raise ValueError(f"evaluate_splits has {split!r}, which is evaluated already; leave it out")
        return splits

    @model_validator(mode="before")
    @classmethod
    def _expand_hugging_face(cls, values: Any) -> Any:
        """Replace the task hf:FOLDER by the task that trains the model of a folder."""
        task = values.get("task") if isinstance(values, dict) else None
        if not isinstance(task, str) or not task.startswith(HF_PREFIX):
            return values
        name, fields = task.removeprefix(HF_PREFIX), values.get("set", {})
        if not name:
            raise ValueError("task 'hf:' names no folder; write hf:FOLDER, a folder with config.json")
        if not isinstance(fields, dict):
            return values
        folder = os.path.abspath(os.path.expanduser(name))
        if fields.get("folder", folder) != folder:
            raise ValueError(
                f"folder is {folder!r} by the task and {abbreviate(fields['folder'])} by --set; "
                "specify it once"
            )
        return {**values, "task": HF_TASK, "set": {**fields, "folder": folder}}

    @field_validator("task", mode="before")
    @classmethod
    def _task_is_a_name(cls, task: Any) -> Any:
        """Refuse a class or an object: each rank imports the task by its name."""
        if isinstance(task, str):
            return task
        kind = task if isinstance(task, type) else type(task)
        if not hasattr(kind, "dataset"):
            return task
        if "<locals>" in kind.__qualname__:
            fix = "move it to the top of a module, and name it: task='my.py:Class'"
        else:
            module = sys.modules.get(kind.__module__)
            place = (
                getattr(module, "__file__", None) or "my.py"
                if kind.__module__ == "__main__"
                else kind.__module__
            )
            fix = f"write task={f'{place}:{kind.__qualname__}'!r}" + (
                "" if isinstance(task, type) else ", set={'field': value}"
            )
        raise SpecError(
            f"task must be a name, got the {'class' if kind is task else 'object'} {kind.__qualname__}; {fix}"
        )

    @model_validator(mode="after")
    def _names_are_printable(self) -> Self:
        check_printable(self, "task")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs={self.epochs:g} and steps={self.steps} contradict each other; specify either of them"
            )
        return self

    @property
    def trace_steps(self) -> range:
        """The steps to trace."""
        if self.trace is None:
            return range(0)
        first, _, last = self.trace.partition(":")
        return range(int(first), int(last) + 1)

    def total_steps(self, samples: int) -> int:
        """Return the number of steps of the whole training, if an epoch has `samples` samples.

        Batches span epochs, so that only the last batch can exceed the length.
        """
        if self.steps is not None:
            return self.steps
        return max(1, -(-round((self.epochs or DEFAULT_EPOCHS) * samples) // self.batch))


def parse_monitor(value: Any, hint: str) -> float | Literal["off"]:
    """Return the seconds between samples of a node, or "off". Raises ValueError with a hint."""
    if value == "off":
        return "off"
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        seconds = math.nan
    if not MIN_MONITOR_S <= seconds <= MAX_MONITOR_S:
        raise ValueError(
            f"monitor must be off, or seconds between samples from {MIN_MONITOR_S:g} to {MAX_MONITOR_S:g}, "
            f"got {abbreviate(value)}; {hint}"
        )
    return seconds


class Launch(Value):
    """The part of a request that does not determine the result: plan, ranks and how they are started.

        Launch(plan="zero3", ranks=8, nodes=2, restarts=3)

    In a TOML file, these keys are at the top level, next to those of Spec. Errors are raised as by Spec.
    """

    plan: str | None = Field(
        default=None,
        description="plan, or auto for the fastest that fits [default: single on one rank, else ddp]",
    )
    chosen: str | None = Field(default=None, description="written by Paceline: why it chose this plan")
    asked: str | None = Field(
        default=None, description="written by Paceline: the requested plan, if it chose another"
    )
    asked_ranks: int | None = Field(
        default=None, ge=1, le=10**6, description="written by Paceline: the ranks for which it was requested"
    )
    ranks: int | None = Field(
        default=None, ge=1, le=10**6, description="number of processes [default: one per GPU, or 1]"
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="number of nodes of Slurm or Ray; the ranks are distributed evenly over them",
    )
    least_nodes: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="minimum number of nodes to continue with after others were lost [default: all]",
    )
    launcher: Literal["local", "slurm", "ray"] | None = Field(
        default=None, description="what starts the ranks [default: slurm with several nodes, else local]"
    )
    restarts: int = Field(
        default=0, ge=0, le=10**6, description="maximum number of restarts after a rank fails"
    )
    run: str | None = Field(default=None, description="run folder [default: runs/TASK-TIME]")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="device of the ranks [default: cuda if available, else cpu]"
    )
    report: bool = Field(
        default=True,
        description="write report.html into the run folder at the end",
    )
    nsys: bool = Field(
        default=False,
        description="start each rank under Nsight Systems; the reports are in the folder nsys of the run",
    )
    monitor: float | Literal["off"] = Field(
        default=1.0,
        description="seconds between samples of processors, memory and GPUs of each node, or off",
    )

    mlflow: str | None = Field(
        default=None, description="address of an MLflow server or database to which the run is sent"
    )

    @field_validator("mlflow")
    @classmethod
    def _mlflow_is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return value
        match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^/@\s]*)(/[^@]*)?", value)
        is_local = match is not None and (match[1] == "file" or match[1].startswith("sqlite"))
        depth = "//" if match is not None and match[1].startswith("sqlite") else "/"
        is_whole = match is not None and (
            (match[3] or "").startswith(depth) and not match[2] if is_local else match[2] != ""
        )
        if not is_whole:
            raise ValueError(
                f"mlflow must be an address such as http://HOST:5000 or sqlite:////ABSOLUTE/PATH.db, without "
                f"a password, got {abbreviate(value.partition('@')[2] or value)}; MLflow reads the password "
                "from MLFLOW_TRACKING_PASSWORD"
            )
        return value

    @field_validator("monitor", mode="before")
    @classmethod
    def _monitor_is_seconds_or_off(cls, value: Any) -> Any:
        return parse_monitor(value, "write --monitor 1 or --monitor off")

    @model_validator(mode="after")
    def _names_are_printable(self) -> Self:
        check_printable(self, "plan", "asked", "run", "mlflow")
        return self

    @model_validator(mode="after")
    def _least_nodes_need_restarts(self) -> Self:
        if self.least_nodes is not None and self.least_nodes > self.nodes:
            raise ValueError(
                f"--nodes must be MINIMUM:MAXIMUM, got {self.least_nodes}:{self.nodes};"
                f" write {self.nodes}:{self.least_nodes}"
            )
        if self.least_nodes is not None and self.least_nodes < self.nodes and not self.restarts:
            raise ValueError(
                f"--nodes {self.least_nodes}:{self.nodes} requires restarts, to continue on fewer nodes;"
                " specify their maximum number: --restarts 3"
            )
        return self

    @property
    def is_elastic(self) -> bool:
        """Whether an agent on each of several nodes restarts the ranks."""
        return self.nodes > 1 and self.restarts > 0


def load(path: Path | None, overrides: Mapping[str, Any]) -> tuple[Spec, Launch]:
    """Return Spec and Launch from a TOML file and overrides. Raises SpecError.

    path: the file; None for the defaults.
    overrides: values by dotted key, such as `optimizer.lr`; None removes the key of the file.
    """
    return _build_with(read_toml(path) if path is not None else {}, overrides)


def load_own(path: Path, overrides: Mapping[str, Any], edited: bool = False) -> tuple[Spec, Launch]:
    """Return Spec and Launch from the file that `save` wrote for a run. Raises SpecError.

    The file must be complete: no key may fall back to its default.
    edited: a person changed the file; its checksum is ignored, but every key with a default is required.
    """
    tree = read_toml(path)
    if not edited and not _is_sealed(path.read_bytes()):
        raise SpecError(
            f"{path} is not as Paceline wrote it (its checksum in the last line is missing or wrong);"
            f" restore it, or if you edited it, accept it: paceline resume {path.parent} --edited"
        )
    request = _build_with(copy.deepcopy(tree), overrides)
    if edited and (missing := [key for key in _required_keys() if not _has(tree, key.split("."))]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SpecError(
            f"{path} lacks {missing[0]}{more}; the request of a run requires all keys"
            " that paceline train --keys lists"
        )
    return request


def _required_keys() -> list[str]:
    """Return the keys that `save` always writes: those whose default is not None."""
    kinds: tuple[type[BaseModel], ...] = (Launch, Spec)
    return [".".join(path) for kind in kinds for path, field in _leaves(kind) if field.default is not None]


def _leaves(kind: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield path and field of each key of a table and of the tables inside it."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (((name, *path), leaf) for path, leaf in _leaves(field.annotation))
        else:
            yield (name,), field


def _has(tree: Any, path: list[str]) -> bool:
    return not path or (isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:]))


def _build_with(tree: dict[str, Any], overrides: Mapping[str, Any]) -> tuple[Spec, Launch]:
    for key, value in overrides.items():
        *parents, leaf = key.split(".", -1 if key.startswith("set.") else 1)
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise SpecError(f"{name}={node!r} has no keys below it, got {key}")
        if value is None:
            node.pop(leaf, None)
        else:
            node[leaf] = value
    return build(tree)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises SpecError if it cannot be read or is not TOML."""
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    except (ValueError, RecursionError):  # a number with thousands of digits, thousands of levels
        raise SpecError(f"{path} is not TOML: {TOO_LARGE}") from None
    if is_too_large(tree):
        raise SpecError(f"{path} is not TOML: {TOO_LARGE}")
    return tree


def build(tree: Mapping[str, Any]) -> tuple[Spec, Launch]:
    """Return Spec and Launch from nested tables. Raises SpecError."""
    launch = {key: value for key, value in tree.items() if key in Launch.model_fields}
    spec = {key: value for key, value in tree.items() if key not in launch}
    try:
        return Spec.model_validate(spec), Launch.model_validate(launch)
    except ValidationError as error:
        raise SpecError(describe_error(error, KEYS)) from error


def save(path: Path, spec: Spec, launch: Launch) -> None:
    """Write a request for `load` and `load_own`. It is on the disk when this returns."""
    tree = launch.model_dump(exclude_none=True) | spec.model_dump(exclude_none=True)
    with open(path, "wb") as file:
        file.write(_sealed(tomli_w.dumps(tree).encode()))
        file.flush()
        os.fsync(file.fileno())


SEAL = b"# checksum "


def _sealed(text: bytes) -> bytes:
    return text + SEAL + f"{zlib.crc32(text):08x}\n".encode()


def _is_sealed(content: bytes) -> bool:
    return content == _sealed(content[: max(content.rfind(SEAL), 0)])


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """Return the overrides for `load` that `["width=64", "optimizer.eps=1e-6", "spec.threads=1"]` stands for.

    A dotted name that begins with a table of the request, or with `spec.` for the keys of its top level, is a
    key of the request. Another name is a field of the task, or of a table in it: `lora.rank=16`. Raises
    SpecError.
    """
    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not all(key.split(".")):
            raise SpecError(f"--set must be NAME=VALUE, got {abbreviate(item)}")
        if key.count(".") > MAX_DEPTH:
            raise SpecError(f"--set {abbreviate(key, str)}: {TOO_LARGE}")
        table = key.partition(".")[0] if "." in key else ""
        name = key.removeprefix("spec.") if table in {"spec", *TABLES} else f"set.{key}"
        value = parse_value(text, key)
        check_same_value(key, "--set", overrides.get(name, value), "another --set", value)
        overrides[name] = value
    return overrides


def check_same_value(key: str, source: str, value: Any, other_source: str, other_value: Any) -> None:
    """Raise SpecError if two options of a command line give a key different values."""
    are_nan = value != value and other_value != other_value
    if value != other_value and not are_nan:
        raise SpecError(
            f"{abbreviate(key, str)} is {abbreviate(value)} by {source} and {abbreviate(other_value)}"
            f" by {other_source}; specify it once"
        )


def set_key(key: str) -> str:
    """Return the name by which `--set` reaches a key of the request: the inverse of `parse_overrides`."""
    return key if "." in key else f"spec.{key}"


def replace_length(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides. If they set `epochs` or `steps`, they also remove the length of the file."""
    lengths = {key: overrides[key] for key in ("epochs", "steps") if key in overrides}
    return overrides if len(lengths) != 1 else {"epochs": None, "steps": None} | overrides


def parse_value(text: str, key: str = "VALUE") -> Any:
    """Return the TOML value of a text (`64`, `1e-3`, `true`, `[1, 2]`), or the text itself (`relu`).

    Raises SpecError for a value that TOML cannot represent.
    """
    try:
        tree = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):  # thousands of digits or levels
        raise SpecError(f"--set {abbreviate(key, str)}={abbreviate(text, str)}: {TOO_LARGE}") from None
    if is_too_large(tree):
        raise SpecError(f"--set {abbreviate(key, str)}={abbreviate(text, str)}: {TOO_LARGE}")
    return (
        tree["x"] if len(tree) == 1 and isinstance(tree["x"], (bool, int, float, str, list, dict)) else text
    )


TOO_LARGE = f"a number beyond 64 bits, or more than {MAX_DEPTH} levels"


def is_too_large(value: Any, level: int = 0) -> bool:
    """Return whether an integer in the value exceeds 64 bits, or the value has too many levels."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return level > MAX_DEPTH or any(is_too_large(item, level + 1) for item in inner)
    return isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT


def abbreviate(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    """Return the text of a value for a message; a long text is truncated."""
    text = as_text(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


def list_keys(kind: type[BaseModel]) -> list[str]:
    """Return the dotted keys of a model, tables included."""
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{name}.{key}" for key in list_keys(field.annotation)]
    return keys


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key of the request that has a value, under its name for `--set`."""
    for kind in (Spec, Launch):
        yield from ((set_key(".".join(path)), field) for path, field in _leaves(kind) if path != ("set",))


KEYS = [*list_keys(Spec), *list_keys(Launch)]
TABLES = {key.partition(".")[0] for key in KEYS if "." in key} | {"set"}
MAX_NAMES = 20  # names that a message lists
MIN_MONITOR_S, MAX_MONITOR_S = 0.1, 3600.0  # seconds between samples
MIN_SIMILARITY = 0.65  # by difflib: accepts rr for r and bach for batch, but not ema for betas


def describe_error(error: ValidationError, known: list[str], what: str = "key") -> str:
    """Return one sentence about the first error, with the nearest known name if a name is unknown."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown {what} {abbreviate(key, str)}{_suggest_key(key, known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{what} {key} has no value; specify it with --set {key}=VALUE"
    message = first["msg"].replace("Input should be", "must be")
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a table", message)
    message = message.replace("a valid tuple", 'a list, such as ["A","B"]')
    message = re.sub(r"a valid (?=[aeiou])", "an ", message).replace("a valid ", "a ")
    return f"{key} {message}, got {abbreviate(first['input'])}"


def _suggest_key(key: str, known: list[str]) -> str:
    """Return the hint for an unknown key.

    Dotted keys are compared within their table: the common prefix does not make `optimizer.ema` similar
    to `optimizer.eps`.
    """
    table, _, leaf = key.rpartition(".")
    if inside := [name.rpartition(".")[2] for name in known if table and name.rpartition(".")[0] == table]:
        return suggest(leaf, inside).replace("did you mean ", f"did you mean {table}.")
    hint = suggest(key, known)
    return hint if known is not KEYS or hint.startswith("; did") else "; paceline train --keys lists them"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown name: `"; did you mean batch?"`, or else `"; available: batch, seed"`.

    A known name matches if its spelling is similar, or if `name` is its last part (`lr`, `optimizer.lr`).
    The hint is empty if no names are known.
    """
    known = list(known)
    ends = [key for key in known if "." in key and key.rpartition(".")[2] == name]
    if matches := ends or difflib.get_close_matches(name, known, 1, cutoff=MIN_SIMILARITY):
        return f"; did you mean {matches[0]}?"
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return f"; available: {', '.join(known[:MAX_NAMES])}{more}" if known else ""
