"""The identity of a training, kept in each checkpoint so that a resume can report changes."""

import dataclasses
import hashlib
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from paceline.optimizer_options import OPTIMIZERS
from paceline.plan.plan import ResolvedPlan
from paceline.spec import DEFAULT_EPOCHS, Optimizer, Spec
from paceline.task import AFTERWARDS, METHODS, Task, field_values
from paceline.training.optimization.optimizer import local_optimizer
from paceline.training.optimization.read_updates import read_updates
from paceline.training.optimization.schedule import depends_on_length

MODULES, CODE = "modules of the model", "code of "
# Keys of the optimizer besides the options that only some have.
OPTIMIZER_KEYS = [key for key in Optimizer.model_fields if not any(key in own for own in OPTIMIZERS.values())]


def describe_modules(model: nn.Module) -> str:
    """Return how many modules of each kind a model has, and a digest of their names and settings.

    Call it before a plan distributes the model.
    """
    lines = [
        f"{name} {type(module).__name__} {module.extra_repr()}" for name, module in model.named_modules()
    ]
    counts = Counter(type(module).__name__ for module in model.modules())
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return f"{kinds} [{_digest(chr(10).join(lines))}]"


def describe_identity(
    spec: Spec, task: Task, modules: str, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, str]:
    """Return each property of a training that may change its results, as text or as a digest.

    modules: of its model.
    """
    identity = {name: repr(getattr(spec, name)) for name in ("precision", "tf32", "batch_norm")}
    optimizer = spec.optimizer
    options = {key: getattr(optimizer, key) for key in OPTIMIZER_KEYS}
    identity |= {f"optimizer.{key}": repr(value) for key, value in (options | optimizer.options).items()}
    identity |= {f"schedule.{key}": repr(value) for key, value in spec.schedule}
    if depends_on_length(spec.schedule):
        length = (
            f"{spec.steps} steps" if spec.steps is not None else f"{spec.epochs or DEFAULT_EPOCHS:g} epochs"
        )
        identity["length of the schedule"] = length
    identity |= {f"field {name}": repr(value)[:200] for name, value in field_values(task).items()}
    kinds = [type(local_optimizer(optimizer)).__name__ for optimizer in optimizers]
    identity |= {"optimizer": ", ".join(kinds), MODULES: modules, **_describe_updates(task)}
    return identity | {f"{CODE}{name}": _digest(text) for name, text in _sources(task).items()}


def _describe_updates(task: Task) -> dict[str, str]:
    """Return each field of the updates of the task as text."""
    updates = read_updates(task, ResolvedPlan())
    identity = {"updates": ", ".join(update.name for update in updates)} if updates else {}
    for update in updates:
        for field in dataclasses.fields(update):
            value = getattr(update, field.name)
            if field.name != "name":
                text = getattr(value, "__name__", "a function") if callable(value) else repr(value)
                identity[f"update {update.name}.{field.name}"] = text
    return identity


def _sources(task: Task) -> dict[str, str]:
    """Return the source of each method of the task, and of its file.

    (A class defined at a prompt has no source.)
    """
    methods = {}
    for name in sorted(METHODS - AFTERWARDS):
        method = getattr(type(task), name)
        if method is not getattr(Task, name):
            methods[f"{name}()"] = method
    module = inspect.getmodule(type(task))
    if getattr(module, type(task).__name__, None) is not type(
        task
    ):  # sent from the script of another process
        module = None
    sources = {}
    for name, item in [*methods.items(), ("the task's file", module)]:
        try:
            sources[name] = inspect.getsource(item) if item is not None else ""
        except (OSError, TypeError):
            continue
    return sources


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class _Change:
    name: str
    then: str
    now: str

    def __str__(self) -> str:
        if self.name.startswith(CODE):
            return f"the {self.name} changed"
        then, now = (
            value.partition(" [")[0] if self.name == MODULES else value for value in (self.then, self.now)
        )
        return (
            f"{self.name} was {then}, is {now}" if then != now else f"the settings of the {self.name} changed"
        )


def describe_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a few words for each property that differs between two identities."""
    changes = [
        _Change(name, then[name], now[name]) for name in now if name in then and then[name] != now[name]
    ]
    code = [change for change in changes if change.name.startswith(CODE)]
    if len(code) > 1:  # the file changed because its methods did
        changes = [change for change in changes if not change.name.endswith("file")]
    return [str(change) for change in changes]
