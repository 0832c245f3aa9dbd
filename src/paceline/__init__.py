"""Paceline plans, runs and accounts for distributed PyTorch training: one task, any number of ranks, the same result."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.version import __version__ as __version__

if TYPE_CHECKING:
    from paceline.distributed.world import World as World
    from paceline.errors import Error as Error
    from paceline.plan.plan import Plan as Plan
    from paceline.run import RunFolder as RunFolder
    from paceline.spec import Spec as Spec
    from paceline.task import Layout as Layout
    from paceline.task import Task as Task
    from paceline.training.loop import train as train

# Imported when they are first used: `train` takes torch with it, which takes a second.
_PLACES = {
    "Error": "errors",
    "Layout": "task",
    "Plan": "plan.plan",
    "RunFolder": "run",
    "Spec": "spec",
    "Task": "task",
    "World": "distributed.world",
    "train": "training.loop",
}
__all__ = ["Error", "Layout", "Plan", "RunFolder", "Spec", "Task", "World", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
