"""Spec: what a training computes."""

import os
import re
import sys
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.errors import SpecError
from paceline.spec.batch_schedule import StepBatches, build_batches
from paceline.spec.guard import WeightGuard
from paceline.spec.loading import Loading
from paceline.spec.messages import abbreviate
from paceline.spec.optimizer import Optimizer
from paceline.spec.saving import Save, Stop
from paceline.spec.schedule import Schedule
from paceline.spec.values import MAX_INT, Value, check_printable
from paceline.units import parse_duration_s

DEFAULT_EPOCHS = 20


HF_PREFIX, HF_TASK = "hf:", "paceline.hf.task:HuggingFace"


TRACE = re.compile(r"(\d{1,12}):(\d{1,12})", re.ASCII)


SCHEDULE_LENGTHS = ("warmup", "every", "length", "decay")
PRECISIONS = ("auto", "fp64", "fp32", "tf32", "bf16", "fp16")  # of a request
MAX_TRACED_STEPS = 100  # the events of all of them are in memory


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
    batch_schedule: str | None = Field(
        default=None,
        description="smaller batches at the begin, and the samples until which each is used, such as "
        "64:10000,128:50000; then batch [default: batch]",
    )
    batch_warmup: str | None = Field(
        default=None,
        description="first batch, and the samples over which it grows to batch in multiples of itself, such "
        "as 64:100000 [default: batch]",
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
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="data type in which the model computes; tf32: fp32 with tf32=true; auto: what this "
        "machine does well",
    )
    tf32: bool = Field(
        default=False, description="let CUDA round the inputs of float32 matrix products to TF32"
    )
    compile: bool = Field(
        default=False,
        description="compile the model's blocks with torch.compile, and on CPUs the updates of lion, nadam, "
        "adamax and adadelta",
    )
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
    noise_scale: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="steps between measurements of the gradient noise scale, each a second pass"
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
    guard: WeightGuard = Field(
        default=WeightGuard(), description="a WeightGuard: search for silently corrupted weights"
    )
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
    def _expand_tf32(cls, values: Any) -> Any:
        """Replace the precision tf32 by its two keys. Raises ValueError for unknown ones."""
        if not isinstance(values, dict):
            return values
        precision = values.get("precision", "auto")
        if precision not in PRECISIONS:
            *others, last = map(repr, PRECISIONS)
            raise ValueError(f"precision must be {', '.join(others)} or {last}, got {abbreviate(precision)}")
        if precision != "tf32":
            return values
        if values.get("tf32") is False:
            raise ValueError("precision='tf32' and tf32=false contradict each other; leave one of them out")
        return {**values, "precision": "fp32", "tf32": True}

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

    @model_validator(mode="after")
    def _batches_are_possible(self) -> Self:
        batches = self.batches
        if batches.is_constant:
            return self
        if self.schedule.scale_betas or self.schedule.scale_decay:
            raise ValueError(
                "schedule.scale_betas and schedule.scale_decay require one batch; leave out batch_schedule "
                "and batch_warmup"
            )
        lengths = [*self.schedule.milestones, *(getattr(self.schedule, key) for key in SCHEDULE_LENGTHS)]
        if length := next((text for text in lengths if isinstance(text, str) and "step" in text), None):
            raise ValueError(
                f"{length!r} has no number of samples while the batch changes; write samples or epochs"
            )
        return self

    @property
    def batches(self) -> StepBatches:
        """The batch of each step."""
        return build_batches(self.batch, self.batch_schedule, self.batch_warmup)

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
        return max(1, self.batches.steps_for(round((self.epochs or DEFAULT_EPOCHS) * samples)))
