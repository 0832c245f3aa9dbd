"""Task: what a user writes. A task mentions no ranks, devices or plans."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, dataclass_transform

from pydantic import ConfigDict

from paceline.task.layout import Layout
from paceline.task.pretrained import PretrainedSource

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from paceline.after_step import StepOperation
    from paceline.metrics import Accumulator
    from paceline.sample_rng import SampleRng
    from paceline.updates import Update


class MapDataset(Protocol):
    """A data set with a length and samples by index, such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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
            if (method := vars(cls).get(name)) is not None and takes_rng(method):
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


def takes_rng(method: Any) -> bool:
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
