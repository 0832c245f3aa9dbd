"""Task and Layout: what a user writes. A task mentions no ranks, devices or plans."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, dataclass_transform

import tomli_w
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from paceline.errors import TaskError
from paceline.spec import HF_PREFIX, HF_TASK, KEYS, TABLES, abbreviate, describe_error, set_key, suggest
from paceline.user_code import (
    UserCode,
    describe_exception,
    find_user_line,
    is_passed_through,
    relative_path,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from paceline.after_step import StepOperation
    from paceline.metrics import Accumulator
    from paceline.sample_rng import SampleRng
    from paceline.updates import Update

BUILT_IN = {
    "bigearthnet": "paceline.tasks.bigearthnet:BigEarthNet",
    "cifar10": "paceline.tasks.cifar:Cifar10",
    "cifar100": "paceline.tasks.cifar:Cifar100",
    "digits": "paceline.tasks.digits:Digits",
    "imagefolder": "paceline.tasks.imagefolder:ImageFolder",
    "lm": "paceline.tasks.lm:Lm",
    "mnist": "paceline.tasks.mnist:Mnist",
    "text": "paceline.tasks.text:Text",
}


@dataclasses.dataclass(frozen=True)
class BufferSum:
    """How a buffer changes: its value times `decay`, plus a sum over the samples of the batch.

        Layout(buffers={"quantizer.counts": BufferSum(decay=0.99)})

    This is for moving averages of sums, such as `counts = 0.99 * counts + 0.01 * samples_of_each_code`.
    decay: from 0 to 1; 0 for a buffer that each forward pass overwrites. Raises TaskError for other values.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        is_number = isinstance(self.decay, (int, float)) and not isinstance(self.decay, bool)
        if not is_number or not 0 <= self.decay <= 1:
            raise TaskError(f"BufferSum: decay must be at least 0 and at most 1, got {self.decay!r}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model may be divided over ranks. `Task.layout` returns it; the model itself stays unchanged.

        Layout(blocks=("encoder.layers", "decoder.layers"))
        Layout(tensor={"blocks.*.up": "column", "blocks.*.down": "row"})

    blocks    paths of modules whose children are the units of sharding, compilation, recomputation and
              pipeline stages; None: the longest ModuleList or Sequential of the model
    tensor    how tp splits modules, by path, where * matches any part of a path. It overrides what
              Paceline finds in the model. Values: "column", "row", "gather" (by columns, with the
              output gathered), "vocabulary" (the rows of an embedding), "whole" (not split)
    buffers   how the changes that forward passes make to buffers combine over ranks and micro-batches, by
              pattern of their names. Values: "sum" (the changes add up, as counts do), "mean" (the values
              are averaged over the samples, as running means are), a `BufferSum` (moving averages of
              sums), "none" (each rank has its own values; checkpoints have those of rank 0)

    Training raises TaskError for a path that the model does not have, for an unknown style or combination,
    and for a pattern that matches no buffer.
    """

    blocks: tuple[str, ...] | None = None
    tensor: Mapping[str, str] | None = None
    buffers: Mapping[str, str | BufferSum] | None = None


class MapDataset(Protocol):
    """A data set with a length and samples by index, such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class PretrainedTensor:
    """The tensors in files from which a tensor of a model is made.

    keys: their names in the files.
    combine: returns the tensor of the model from them; None: there is one, and it is the tensor.
    """

    keys: tuple[str, ...]
    combine: Callable[[list[Tensor]], Tensor] | None = None


class PretrainedSource(Protocol):
    """Pretrained weights whose names in the files may differ from those in the model."""

    @property
    def path(self) -> Path:
        """A safetensors file, an index of several, or a folder with either."""

    def match(self, model: nn.Module, keys: Collection[str]) -> Mapping[str, PretrainedTensor]:
        """Return the tensors of the model that the files have, by name.

        model: on the meta device. keys: the names of all tensors in the files. Raises TaskError.
        """

    def find_added(self, model: nn.Module) -> Collection[str]:
        """Return the names of parameters that files of weights never have, such as those of adapters."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Task:
    """Base class of the user's training task: a model, a data set and a loss.

        class Line(paceline.Task):
            width: int = 16
            def model(self): return nn.Linear(self.width, 1)
            def dataset(self, split): return Points(1000, self.width) if split == "train" else None
            def loss(self, output, batch): return (output - batch[1]).square()

    A subclass must define `model`, `dataset` and `loss`, or `global_loss` or `updates` in place of `loss`;
    the other methods have defaults. It is a frozen dataclass: its fields are the hyper-parameters, and
    `--set width=32` sets them. Their types are checked.

    `inputs`, `loss`, `weights`, `batch_sums` and `metrics` may take another parameter `rng`, a `SampleRng`.
    Its random numbers are equal under every plan: `def loss(self, output, batch, rng)`.

    An exception in a method becomes a TaskError with the file and line; an exception of a sample becomes
    a DataError.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, arbitrary_types_allowed=True)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name in DRAWING:
            if (method := vars(cls).get(name)) is not None and _takes_rng(method):
                setattr(cls, name, draw_by_sample(method, name))
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def model(self) -> nn.Module:
        """Return the model, initialized in any way.

        Paceline calls this on the meta device and records what happens to the tensors. Each rank then
        repeats the recorded initialization for its part of the weights only, so that no rank needs
        memory for the whole model.
        """
        raise NotImplementedError

    def dataset(self, split: str) -> MapDataset | None:
        """Return the samples of a split, such as "train" or "test", as an object with `len()` and `[i]`.

        Return None if the split does not exist. If the object has a method `batch_of(indices)`, Paceline
        calls it to fetch a whole collated batch at once, and `collate` must not be defined. Random
        augmentation in `batch_of` depends on the number of ranks; in `[i]` it does not.
        """
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        """Return the batch that these samples make. The default is torch's `default_collate`.

        Define it if samples have different shapes or are not tensors. The first dim of tensors must count
        the samples. `paceline.Ragged` pads tensors of different shapes. `samples` is one rank's part of a
        micro-batch, so the result must not depend on which samples it has together. Random numbers are an
        error if the plan divides the batch; draw them in `[i]` of the dataset.

        It runs where samples are read, which may be a worker process. The batch is on the CPU.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def transform(self, sample: Any, rng: SampleRng) -> Any:
        """Return a training sample after random augmentation; evaluations do not call it.

        sample: what `[i]` of the dataset returned. rng: random numbers of this sample; their first dim is 1.
        torch on the CPU, numpy and random are seeded with the sample, too. It runs where samples are read,
        which may be a worker process.
        """
        return sample

    def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
        """Return a training batch after random augmentation; evaluations do not call it.

        batch: the collated samples, or a part of them, on the device of the model. rng: row i of what it
        draws belongs to sample i of the batch. Other random numbers are an error if the plan divides the
        batch.
        """
        return batch

    def loss(self, output: Any, batch: Any) -> Tensor | Mapping[str, Tensor]:
        """Return the loss of each item, in any shape whose first dim is the samples of the batch.

        A scalar counts as the mean over the samples. The mean over the whole global batch is minimized.
        output: what the model returns. batch: the collated samples, on the device of the model.

        Several losses are a dict, such as `{"reconstruction": …, "kl": …}`. The mean of each over the global
        batch is reported under its name, and the sum of these means, times `loss_weights`, is minimized. If
        the task defines `weights`, each loss has their shape.
        """
        raise NotImplementedError

    def loss_weights(self) -> Mapping[str, float]:
        """Return the weights of the losses that `loss` and `auxiliary_loss` return by name.

        A name without weight has 1.
        """
        return {}

    def global_loss(self, output: Any, batch: Any) -> Tensor:
        """Return the loss of a whole global batch as one number. Define it in place of `loss`.

        It is for losses that compare samples, such as contrastive losses. output: what the model returns, for
        all samples of the global batch, in the order of one process. batch: likewise. In both, only tensors
        can be read: those whose first dim counts the samples, and those of the output that do not depend on
        the samples, such as a temperature. All ranks call it with equal values.

        Its value in an evaluation is the mean over batches of `batch` samples, weighted by their samples.
        Pipelines, local SGD and parameter servers refuse it.
        """
        raise NotImplementedError

    def batch_sums(self, output: Any, batch: Any) -> Mapping[str, Tensor]:
        """Return sums over the samples of this batch, by name, for `auxiliary_loss`.

        The batch may be a part of the global batch, so each tensor must be a sum over its samples, such as
        the number of tokens of each expert, and not a mean. Shapes must not depend on the number of samples.
        `auxiliary_loss` gets integers as float64.
        """
        return {}

    def auxiliary_loss(self, sums: Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
        """Return a number to add to the loss, computed from the sums over the whole global batch.

        sums: what `batch_sums` returned, added up over the global batch; in an evaluation, over the split.
        Several numbers are a dict. Each is reported under its name ("auxiliary" if there is only a number),
        and weighted by `loss_weights`. Local SGD, parameter servers, and pipelines that begin backward passes
        before the last forward pass refuse it.
        """
        raise NotImplementedError

    def _has_auxiliary_loss(self) -> bool:
        return type(self).auxiliary_loss is not Task.auxiliary_loss

    def inputs(self, batch: Any) -> Any:
        """Return the arguments of the model: a tensor, a tuple or list, or a dict of keyword arguments.

        The default is the first element of the batch if it is a tuple or list, or else the batch itself.
        """
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def weights(self, batch: Any) -> Tensor | None:
        """Return the weights of the items of `loss`, in the same shape; None if all items weigh the same.

        `metrics` of the same shape are weighted, too.
        """
        return None

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Tensor | Accumulator | nn.Module]:
        """Return further metrics by name. Each sample of the validation split counts once.

        A tensor has a value for each item, and Paceline averages it over the split. A metric that is not such
        a mean, such as an F1 score, is an accumulator; `paceline.metrics` has Accumulator, Accuracy,
        TopKAccuracy and Perplexity. A metric of torchmetrics, updated with this batch, is accepted as well.
        The loss is always evaluated and need not be returned.
        """
        return {}

    def figures(self, output: Any, batch: Any) -> Mapping[str, Any]:
        """Return images by name, which are drawn at each evaluation.

        output: what the model returns for the first samples of the validation split, at most `batch` of them,
        in their order and whole under every plan. batch: likewise. Both are on the CPU. Only rank 0 calls it.

        An image is a tensor or array of shape (height, width) or (channels, height, width) with 1, 3 or 4
        channels, of uint8 or of floats from 0 to 1; or a figure of matplotlib. Pipelines, local SGD and
        parameter servers refuse it.
        """
        return {}

    def predict(self, output: Any, batch: Any) -> Any:
        """Return what `paceline predict` writes for each sample: a sequence or tensor with a value for each.

        A value is text, a number, True, False, None, a tensor, or a list or dict of values. A dict of such
        sequences is accepted too: `{"digit": output.argmax(-1), "logits": output}`. By default, the output of
        the model is written, which must be a tensor, or tensors in a tuple, list or dict, whose first dim
        counts the samples.
        """
        return output

    def read_files(self, files: Sequence[Path]) -> MapDataset:
        """Return the samples of the files that a user names for `paceline predict`, as `dataset` does.

        `inputs`, `collate` and `predict` get their batches; they need no targets.
        """
        raise NotImplementedError

    def space(self) -> Mapping[str, Any]:
        """Return what `paceline tune` searches if its command names no parameter: ranges by name.

        `{"width": "int:32:256:32", "depth": "int:1:4 if width>64", "optimizer.name": ["lamb", "adamw"]}`
        """
        return {}

    def layout(self) -> Layout:
        """Return how the model may be divided over ranks; by default Paceline finds it in the model."""
        return Layout()

    def optimizer(self, params: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        """Return an optimizer over the named parameters, or None for AdamW or SGD as the spec requests.

        The learning-rate schedule scales the learning rates of the returned optimizer.
        """
        return None

    def lr_factor(self, progress: float) -> float:
        """Return the factor on the learning rate for `--schedule task`. progress: of the schedule, 0 to 1.

        It may take `step` and `epoch`, too: `def lr_factor(self, progress, step, epoch)`. They are the steps
        and the whole epochs that are done.
        """
        return 1.0

    def _own_schedule(self) -> str | None:
        """Return the name of a schedule that requires `--schedule task`; None if any schedule will do."""
        return None

    def updates(self) -> Sequence[Update]:
        """Return several optimizers with the parameters and the loss of each, in the order of a step.

        For GANs and for parts of a model that are trained in different ways; see `paceline.Update`. `loss` is
        not required if each update has its own. Pipelines, `tp`, `cp`, local SGD and parameter servers refuse
        it.
        """
        return ()

    def after_step(self) -> Sequence[StepOperation]:
        """Return operations on weights after each step, such as `[Ema(0.999)]` of `paceline.after_step`."""
        return ()

    def pretrained(self) -> str | Path | PretrainedSource | None:
        """Return the path of initial weights in safetensors format, or None to initialize the model.

        The path is a file, or a folder with `model.safetensors` or an index of several files. The files
        contain whole tensors under the names of the model's parameters. Parameters without a tensor keep
        their initialization; a tensor without a parameter is an error.
        """
        return None


def _takes_rng(method: Any) -> bool:
    return inspect.isfunction(method) and "rng" in inspect.signature(method).parameters


def draw_by_sample(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the method with an `rng` for its batch, the argument before it, unless the caller passes one.

    name: of the stream of random numbers.
    """
    position = list(inspect.signature(method).parameters).index("rng")

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= position and "rng" not in kwargs:
            from paceline.sample_rng import open_stream  # imports torch

            kwargs["rng"] = open_stream(kwargs.get("batch", args[-1]), name)
        return method(*args, **kwargs)

    vars(call)["draws_by_sample"] = True
    return call


REQUIRED = ("model", "dataset", "loss")
DRAWING = (
    "inputs",
    "loss",
    "weights",
    "batch_sums",
    "metrics",
)  # methods of a batch, which may take an `rng`
METHODS = frozenset(name for name in vars(Task) if not name.startswith("_"))
AFTERWARDS = frozenset({"predict", "read_files", "space"})  # methods that a training never calls


_received: dict[str, Task] = {}  # tasks that another process sent to this one, by reference


def keep_received(reference: str, task: Task) -> None:
    """Let `load_task` return a task that another process sent, for the rest of this process."""
    _received[reference] = task


def load_task(reference: str, fields: Mapping[str, Any]) -> Task:
    """Return the task that `reference` names, with these fields. Raises TaskError."""
    if reference in _received:
        return _received[reference]
    return build_task(load_task_class(reference), reference, fields)


def build_task(kind: type[Task], reference: str, fields: Mapping[str, Any]) -> Task:
    """Return a task of a class, with these fields. `reference` names it in errors. Raises TaskError."""
    known = [field.name for field in dataclasses.fields(kind)]
    if reference == HF_TASK and isinstance(fields.get("folder"), str):
        reference = HF_PREFIX + relative_path(fields["folder"])
    for name, value in fields.items():
        if name not in known:
            raise TaskError(
                f"{reference} has no field {abbreviate(name, str)}{_suggest_field(name, value, known)}"
            )
    with UserCode(kind.__name__, kind.__init__):  # the fields may have validators
        try:
            # As JSON, because strict validation accepts a list for a tuple only there.
            return TypeAdapter(kind).validate_json(json.dumps(dict(fields), default=str))
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")  # raised by a validator of the task
            why = (
                describe_exception(cause)
                if isinstance(cause, Exception) and find_user_line(cause) is not None
                else describe_error(error, known, "field")
            )
            raise TaskError(f"{reference}: {why}") from error


def load_task_class(reference: str) -> type[Task]:
    """Return the class that `reference` names, after a check of its methods and fields. Raises TaskError."""
    kind = import_task_class(reference)
    check_task_class(kind, reference)
    return kind


def check_task_class(kind: type[Task], reference: str) -> None:
    """Raise TaskError if a class lacks methods or has unsuitable fields. `reference` names it in errors."""
    defined = {name for name in METHODS if getattr(kind, name) is not getattr(Task, name)}
    defined_or_replaced = defined | ({"loss"} if {"global_loss", "updates"} & defined else set())
    if missing := [name for name in REQUIRED if name not in defined_or_replaced]:
        raise TaskError(f"{reference} has no method {missing[0]}; a task requires {', '.join(REQUIRED)}")
    for name, hint in (
        ("loss", "keep loss if it is a mean over samples, or else global_loss"),
        ("weights", "apply the weights in global_loss"),
        ("loss_weights", "apply the weights in global_loss"),
        ("auxiliary_loss", "add it in global_loss"),
        ("updates", "give each Update a loss by item"),
    ):
        if {name, "global_loss"} <= defined:
            raise TaskError(f"{reference} defines both global_loss and {name}; {hint}")
    if {"updates", "auxiliary_loss"} <= defined:
        raise TaskError(f"{reference} defines both updates and auxiliary_loss; define one of them")
    for name, other in (("batch_sums", "auxiliary_loss"), ("auxiliary_loss", "batch_sums")):
        if name in defined and other not in defined:
            raise TaskError(f"{reference} defines {name} without {other}; define both")
    for name, what in (("transform", "sample"), ("batch_transform", "batch")):
        if name in defined and not _takes_rng(getattr(kind, name)):
            raise TaskError(f"{reference}: {name} has no parameter rng; define {name}(self, {what}, rng)")
    if clashing := [field.name for field in dataclasses.fields(kind) if field.name in METHODS]:
        raise TaskError(
            f"{reference}: the field {clashing[0]!r} has the name of a method of Task; rename the field"
        )


def _suggest_field(name: str, value: Any, fields: list[str]) -> str:
    """Return a hint for an unknown field: the nearest field, or the key of the request with that name."""
    hint = suggest(name, fields)
    first, _, rest = name.partition(".")
    if rest and first in fields:  # --set makes a table of such a name, a dict in Python does not
        return f"; write {{{first!r}: {{{rest!r}: …}}}}"
    if isinstance(value, dict) and not hint.startswith("; did"):  # of a dotted name, such as optimiser.lr
        table = suggest(name, sorted(TABLES - {"set"}))
        return f"{table[:-1]}.{next(iter(value), '')}?" if table.startswith("; did") else hint
    keys = [set_key(key) for key in KEYS if key.rpartition(".")[2] == name and key not in TABLES]
    return (
        f"; a key of the request is set by --set {keys[0]}=VALUE"
        if keys and not hint.startswith("; did")
        else hint
    )


def import_task_class(reference: str) -> type[Task]:
    """Import the file or module of `reference` and return the class of the task. Raises TaskError."""
    place, _, name = BUILT_IN.get(reference, reference).partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, reference)
    tasks = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Task) and value is not Task
    ]
    if not name:
        defined = [key for key in tasks if getattr(module, key).__module__ == module.__name__]
        if len(defined) != 1:
            raise TaskError(
                f"{place} has {len(defined)} tasks ({', '.join(defined) or 'none'});"
                f" specify the class: {place}:NAME"
            )
        name = defined[0]
    kind = getattr(module, name, None)
    if kind is None and place == "__main__":
        raise TaskError(
            f"the task {name} was defined in a notebook or an interactive session, which this process cannot "
            "import; save it in a file"
        )
    if kind is None:
        raise TaskError(f"{place} has no class {name}{suggest(name, tasks)}")
    if not (inspect.isclass(kind) and issubclass(kind, Task)):
        raise TaskError(f"{name} in {place} is not a subclass of paceline.Task")
    return kind


def resolve_reference(reference: str) -> str:
    """Return the reference in a form that works in any folder: a file with its absolute path and class.

    This imports the task if `reference` names no class. Raises TaskError.
    """
    place, _, name = reference.partition(":")
    if not place.endswith(".py"):
        return reference
    return f"{Path(place).resolve()}:{name or import_task_class(reference).__name__}"


def check_reference(reference: str) -> str:
    """Return the absolute form of a reference without importing the task or torch: the file is only parsed.

    Raises TaskError for errors that show without running the file.
    """
    place, _, name = reference.partition(":")
    if not place.endswith(".py"):
        if ":" not in BUILT_IN.get(reference, reference):
            raise _unknown_task(reference)
        return reference
    path = Path(place)
    if not path.is_file():
        raise TaskError(f"no such file: {path}{_suggest_file(path)}")
    try:
        names = list(_find_names(ast.parse(path.read_bytes())))
    except SyntaxError as error:
        raise TaskError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not Python: {error}") from error
    if name and name not in names and "*" not in names:
        raise TaskError(f"{place} has no class {name}{suggest(name, names)}")
    return f"{path.resolve()}:{name}" if name else str(path.resolve())


def _find_names(module: ast.Module) -> Iterator[str]:
    """Yield the names that the module may bind at its top level."""
    for node in ast.walk(module):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name


def read_layout(task: Task) -> Layout:
    """Return the task's layout. Raises TaskError."""
    with UserCode("layout()", task.layout):
        layout = task.layout()
    if not isinstance(layout, Layout):
        raise TaskError(f"layout() must return a paceline.Layout, got {type(layout).__name__}")
    return layout


def has_own_optimizer(task: Task) -> bool:
    """Return whether the task defines its optimizer, instead of that of the request."""
    return type(task).optimizer is not Task.optimizer


def has_figures(task: Task) -> bool:
    """Return whether the task defines `figures`."""
    return type(task).figures is not Task.figures


def field_values(task: Task) -> dict[str, Any]:
    """Return the fields of a task, by name. A field that is a table is a dict."""
    return {field.name: _as_table(getattr(task, field.name)) for field in dataclasses.fields(task)}


def _as_table(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    return value


def reference_to(task: Task) -> str:
    """Return the reference `module:Class` of a task."""
    return f"{type(task).__module__}:{type(task).__qualname__}"


def portable_reference_to(task: Task) -> str:
    """Return the reference of a task, with the file in place of the module `__main__` if there is a file."""
    module, _, name = reference_to(task).partition(":")
    file = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
    is_importable = file is not None and file.endswith(".py") and os.path.isfile(file)
    return f"{os.path.abspath(file)}:{name}" if file is not None and is_importable else f"{module}:{name}"


def storable_fields(task: Task) -> dict[str, Any] | None:
    """Return the fields of a task as a request stores them, or None if TOML cannot represent one of them."""
    kind = type(task)
    try:
        fields = TypeAdapter(kind).dump_python(task, mode="json", warnings="none", exclude_none=True)
        tomli_w.dumps(fields)
        loaded = build_task(kind, kind.__name__, fields)
    except Exception:  # a value of any class, whose methods are the user's
        return None
    return fields if repr(field_values(loaded)) == repr(field_values(task)) else None


def _load_file(path: Path) -> ModuleType:
    """Import a Python file, or return the module if it is imported already."""
    if not path.is_file():
        raise TaskError(f"no such file: {path}{_suggest_file(path)}")
    given_path, path = path, path.resolve()
    name = path.stem if importlib.util.find_spec(path.stem) is None else f"task_{path.stem}"
    for module in (sys.modules.get("__main__"), sys.modules.get(path.stem), sys.modules.get(name)):
        file = getattr(module, "__file__", None)
        if module is not None and file is not None and os.path.realpath(file) == str(path):
            return module
    if str(path.parent) not in sys.path:
        # The task may import files from its folder, in the workers of the data loader as well.
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing(str(given_path)):
            spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if is_passed_through(error):
            raise
        raise _import_error(f"cannot import {given_path}", error) from error
    return module


_imports: list[str] = []  # files and modules of tasks that are being imported


@contextlib.contextmanager
def _importing(place: str) -> Iterator[None]:
    _imports.append(place)
    try:
        yield
    finally:
        _imports.pop()


def check_not_importing(function: str) -> None:
    """Raise TaskError while the module of a task is imported, which must not call `function`."""
    if _imports:
        raise TaskError(
            f"{_imports[-1]} calls {function} when it is imported; put the call below "
            "'if __name__ == \"__main__\":', because other processes import the file for its task"
        )


def _suggest_file(path: Path) -> str:
    neighbours = [str(file) for file in path.parent.glob("*.py")]
    return suggest(str(path), neighbours[:50]) if neighbours else ""


def _unknown_task(reference: str) -> TaskError:
    hint = suggest(reference, BUILT_IN)
    return TaskError(
        f"no such task: {reference!r}; expected {', '.join(BUILT_IN)}, a file my.py:Class, a module "
        "package.module:Class or a Hugging Face model hf:FOLDER"
        f"{hint if hint.startswith('; did') else ''}"
    )


def _load_module(name: str, reference: str) -> ModuleType:
    if ":" not in BUILT_IN.get(reference, reference):
        raise _unknown_task(reference)
    try:
        with _importing(name):
            return importlib.import_module(name)
    except BaseException as error:
        if is_passed_through(error):
            raise
        raise _import_error(f"cannot import {name!r}, named by {reference}", error) from error


def _import_error(what: str, error: BaseException) -> TaskError:
    """Return a TaskError for an exception of an import, with file and line if the user's code raised it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return TaskError(f"{relative_path(error.filename)}, line {error.lineno}: {error.msg}")
    if find_user_line(error) is None and isinstance(error, (ImportError, ValueError, SyntaxError)):
        return TaskError(f"{what}: {error}")
    if isinstance(error, ImportError):
        return TaskError(f"{what}: {error} ({find_user_line(error)})")
    return TaskError(f"{what}: {describe_exception(error)}")
