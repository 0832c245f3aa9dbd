"""What makes a training what it is, beside its data: kept in each checkpoint, so that a resume can report what is another now."""

import dataclasses
import hashlib
import inspect
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from paceline.spec import Spec
from paceline.task import Task, field_values
from paceline.training.optimizer import local_optimizer

METHODS = ("model", "dataset", "inputs", "loss", "weights", "metrics", "layout", "optimizer")
MODULES, CODE = "modules of the model", "code of "


def modules_of(model: nn.Module) -> str:
    """Return how many modules of each kind a model has, and a digest of all with their settings. To be asked before it is laid out."""
    each = [f"{name} {type(module).__name__} {module.extra_repr()}" for name, module in model.named_modules()]
    counts = Counter(type(module).__name__ for module in model.modules())
    return f"{', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))} [{_digest(chr(10).join(each))}]"


def identity(spec: Spec, task: Task, modules: str, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what each thing is, in words or as a digest."""
    found = {name: repr(getattr(spec, name)) for name in ("precision", "tf32", "batch_norm")}
    found |= {f"optimizer.{key}": repr(value) for key, value in spec.optimizer}
    found |= {f"schedule.{key}": repr(value) for key, value in spec.schedule}
    found |= {f"field {name}": repr(value)[:200] for name, value in field_values(task).items()}
    found |= {"optimizer": type(local_optimizer(optimizer)).__name__, MODULES: modules}
    return found | {f"{CODE}{name}": _digest(text) for name, text in _sources(task).items()}


def _sources(task: Task) -> dict[str, str]:
    """Of what can be read; a class made at a prompt has no source."""
    found = {}
    for name in METHODS:
        method = getattr(type(task), name)
        if method is not getattr(Task, name):
            found[f"{name}()"] = method
    kept = {}
    for name, item in [*found.items(), ("the task's file", inspect.getmodule(type(task)))]:
        try:
            kept[name] = inspect.getsource(item) if item is not None else ""
        except (OSError, TypeError):
            continue
    return kept


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


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a few words for each thing that is another now."""
    found = [_Change(name, then[name], now[name]) for name in now if name in then and then[name] != now[name]]
    code = [change for change in found if change.name.startswith(CODE)]
    if len(code) > 1:  # the file changed with its methods
        found = [change for change in found if not change.name.endswith("file")]
    return [str(change) for change in found]
