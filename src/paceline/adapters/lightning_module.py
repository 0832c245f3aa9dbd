"""A LightningModule as the model of a task: its forward pass is its training or validation step."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.batch import count_samples, find_leaves
from paceline.errors import TaskError

BASE_NAMES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
HOOK_CLASSES = ("ModelHooks", "DataHooks", "CheckpointHooks")
# Methods of LightningModule that its Trainer calls during a training.
CALLED_BY_TRAINER = (
    "backward",
    "clip_gradients",
    "configure_callbacks",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_epoch_end",  # of Lightning 1, as the next
    "validation_epoch_end",
)
# A task has its own samples, and never tests.
UNUSED_HOOKS = {
    *("prepare_data", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    "teardown",
}
UNUSED_PREFIXES = ("on_test_", "on_predict_")
HINTS = {
    "configure_gradient_clipping": "use --set optimizer.clip=1",
    "configure_model": "build the layers in __init__",
    "setup": "build the layers in __init__, and the samples in dataset()",
    "on_load_checkpoint": "keep the state in a buffer, which checkpoints have",
    "on_save_checkpoint": "keep the state in a buffer, which checkpoints have",
    "on_after_batch_transfer": "define batch_transform(batch, rng) of the task",
    "optimizer_step": "use a schedule, or Update of paceline.updates",
}


def find_base(kind: type) -> type | None:
    """Return the class LightningModule from which a class inherits; None if it does not."""
    return next(
        (
            base
            for base in kind.__mro__
            if base.__name__ == "LightningModule" and base.__module__ in BASE_NAMES
        ),
        None,
    )


def adapt(module: Any) -> nn.Module:
    """Return the module, changed so that it can be trained by a task. Parameters keep their names.

    Raises TaskError for a module that needs the Trainer of Lightning, with what needs it.
    """
    kind: Any = type(module)
    base = find_base(kind)
    if base is None:
        raise TaskError(f"module() must return a LightningModule, got {kind.__name__}; inherit from it")
    check_module(module, base)
    module.__class__ = _adapted_class(kind)
    module._trainer = NoTrainer(kind.__name__)
    module._in_step = module._in_validation = False
    adapted: nn.Module = module
    return adapted


def check_module(module: Any, base: Any) -> None:
    """Raise TaskError for what a training without the Trainer of Lightning cannot call."""
    kind = type(module)
    name = kind.__name__
    if not module.automatic_optimization:
        raise TaskError(
            f"{name} sets automatic_optimization=False, so that training_step runs its own optimizers; write "
            "a task with updates() instead (paceline.Update)"
        )
    if kind.training_step is base.training_step:
        raise TaskError(f"{name} has no training_step; define training_step(self, batch, batch_idx)")
    if kind.configure_optimizers is base.configure_optimizers:
        raise TaskError(
            f"{name} has no configure_optimizers, so that nothing would be trained; define it, and return an "
            "optimizer"
        )
    hooks = [
        hook
        for parent in base.__mro__
        if parent.__name__ in HOOK_CLASSES
        for hook, value in vars(parent).items()
        if not hook.startswith("_") and callable(value)
    ]
    for hook in (*CALLED_BY_TRAINER, *hooks):
        if hook in UNUSED_HOOKS or hook.startswith(UNUSED_PREFIXES):
            continue
        if hook in vars(module) or getattr(kind, hook, None) is not getattr(base, hook, None):
            hint = HINTS.get(hook, "leave it out, or write a task (docs/tasks.md)")
            raise TaskError(
                f"{name} defines {hook}, which the Trainer of Lightning calls and Paceline does not; {hint}"
            )
    for path, child in module.named_modules():
        if any(
            parent.__name__ == "Metric" and parent.__module__.startswith("torchmetrics")
            for parent in type(child).__mro__
        ):
            raise TaskError(
                f"{name} holds the metric {path!r} of torchmetrics, whose state is not that of a model; "
                "build it in metrics() of the task, and return it updated with the batch"
            )


class NoTrainer:
    """Stands for the Trainer of Lightning. Each use raises TaskError with what was used."""

    def __init__(self, owner: str):
        self._owner = owner

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise TaskError(
            f"{self._owner} uses trainer.{name} of Lightning, directly or through a property of the module, "
            "and no Trainer exists; pass the value as a field of the task"
        )


class NoBatchIndex:
    """Stands for batch_idx. It may be passed on, and each use as a number raises TaskError."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise TaskError(
            "training_step or validation_step uses batch_idx, which depends on ranks and micro-batches; "
            "compute the loss from the batch alone"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __int__ = __index__ = __bool__ = __float__ = __str__ = __format__ = _refuse

    def __hash__(self) -> int:
        return id(self)


class _StepAsForward:
    """Methods that come before those of the user's LightningModule."""

    _in_step: bool
    _in_validation: bool
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The module calls itself in its step: hooks of sharding belong to the step as a whole.
        call = super().forward if self._in_step else super().__call__  # type: ignore[misc]
        return call(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_step:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self._run_step(*args, **kwargs)

    def _run_step(self, batch: Any) -> dict[str, Any]:
        """Return the loss of a batch, what validation_step logged, and the dict that it returned."""
        module: Any = self
        tensor = next((leaf for leaf in find_leaves(batch) if isinstance(leaf, Tensor)), None)
        if tensor is not None:
            module._device = tensor.device
        self._logged: dict[str, Tensor] = {}
        self._samples = count_samples(batch)
        self._in_step = True
        try:
            if _has_validation_step(module) and not self.training:
                output = self._validate(batch)
            else:
                result = (
                    _call_step(module.training_step, batch)
                    if self.training
                    else _call_unchanged(module, batch)
                )
                output = {"loss": _find_loss(result), "logged": {}, "returned": {}}
        finally:
            self._in_step, self._in_validation, self._logged = False, False, {}
        if output["loss"] is None:
            raise TaskError(
                f"{type(self).__name__}.training_step returned no loss, which skips a batch on one "
                "rank only; return a tensor, or a dict with the key 'loss'"
            )
        return output

    def _validate(self, batch: Any) -> dict[str, Any]:
        module: Any = self
        self._in_validation = True
        result = _call_step(module.validation_step, batch)
        self._in_validation = False
        logged, self._logged = self._logged, {}
        loss = _find_loss(result)
        if loss is None:
            loss = _find_loss(_call_unchanged(module, batch))
        returned = dict(result) if isinstance(result, Mapping) else {}
        return {"loss": loss, "logged": logged, "returned": returned}

    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Keep a value as a metric of the validation; of the training, Paceline reports the losses."""
        options = dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False))
        options |= kwargs
        if self._in_validation and options.get("on_epoch") is False:
            raise TaskError(
                f"log({name!r}, on_epoch=False) in validation_step keeps the value of a single batch, and "
                "Paceline averages over the samples; leave out on_epoch"
            )
        reduce_fx = options.get("reduce_fx", "mean")
        if self._in_validation and reduce_fx not in ("mean", "avg", torch.mean):
            shown = getattr(reduce_fx, "__name__", reduce_fx)
            raise TaskError(
                f"log({name!r}, reduce_fx={shown}): Paceline averages over the samples; return the value in "
                "metrics() of the task, as an accumulator with this reduction"
            )
        if batch_size is not None and batch_size != self._samples:
            raise TaskError(
                f"log({name!r}, batch_size={batch_size}) weighs a value by another number than the "
                f"{self._samples} samples of the batch; return it by item in metrics() of the task"
            )
        if callable(getattr(value, "compute", None)):
            raise TaskError(
                f"log({name!r}) of the metric {type(value).__name__}, which the Trainer of Lightning "
                "computes and resets; return it from metrics() of the task, updated with the batch"
            )
        number = torch.as_tensor(value).detach()
        if number.numel() != 1:
            raise TaskError(
                f"log({name!r}) of a tensor of shape {tuple(number.shape)}; log a number, such as its mean"
            )
        self._logged[name] = number.reshape(())

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)


@functools.cache
def _adapted_class(kind: type) -> type:
    return type(kind.__name__, (_StepAsForward, kind), {"__module__": kind.__module__})


def _has_validation_step(module: Any) -> bool:
    kind = type(module)
    base: Any = find_base(kind)
    return kind.validation_step is not base.validation_step


def _call_step(step: Callable[..., Any], batch: Any) -> Any:
    """Call a step, with batch_idx if it takes it."""
    needed = [p for p in inspect.signature(step).parameters.values() if p.default is p.empty]
    if any(p.name == "dataloader_iter" for p in needed):
        raise TaskError(
            f"{getattr(step, '__name__', 'a step')} takes dataloader_iter, which reads batches by itself; "
            "take a batch"
        )
    takes_index = len(inspect.signature(step).parameters) > 1
    if len([p for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > 2:
        raise TaskError(
            f"{getattr(step, '__name__', 'a step')} takes {needed[2].name}, which Paceline does not "
            "pass; use a batch alone (evaluate_splits has several loaders, updates() several optimizers)"
        )
    return step(batch, NoBatchIndex()) if takes_index else step(batch)


def _call_unchanged(module: Any, batch: Any) -> Any:
    """Call training_step in an evaluation, for its loss. Raises TaskError if it changes the module."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    versions = [tensor._version for _, tensor in tensors]
    result = _call_step(module.training_step, batch)
    for (name, tensor), version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise TaskError(
                f"training_step changes {name!r}, also in an evaluation, where it computes the loss; return "
                "the loss from validation_step"
            )
    return result


def _find_loss(result: Any) -> Tensor | None:
    """Return the loss of what a step returned: a tensor, a dict with a loss, or nothing."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    if result is not None and not isinstance(result, Tensor):
        raise TaskError(
            f"a step of the LightningModule returned {type(result).__name__} as its loss; return a tensor"
        )
    return result.mean() if result is not None and result.dim() else result
