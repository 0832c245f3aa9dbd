"""Gates: parts of a model whose calls somebody else answers, while they keep their own names and classes."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from paceline.errors import TaskError
from paceline.spec import nearest
from paceline.task import Layout

Run = Callable[..., Any]
Visitor = Callable[
    [str, Run, Any, Any], Any
]  # name of the part, what runs it, args, kwargs -> what the call returns
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class CallInterceptor:
    """`visitor` answers the calls of the parts of a model; None: they run as they are."""

    def __init__(self, parts: dict[str, nn.Module]):
        self.parts = parts
        self.visitor: Visitor | None = None
        self.inside = False  # of a part: what it calls itself is its own affair
        for name, part in parts.items():
            part.__dict__["_gate"] = (self, name)
            part.__class__ = _intercepted_class(type(part))  # type: ignore[arg-type]  # mypy takes it for an unhashable instance

    def pass_through(self, name: str, run: Run, args: Any, kwargs: Any) -> Any:
        if self.visitor is None or self.inside:
            return run(*args, **kwargs)
        return self.visitor(name, run, args, kwargs)


@cache
def _intercepted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Before hooks, so that those of torch's engines do not see calls that are not theirs."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gates, name = self.__dict__["_gate"]
        return gates.pass_through(name, lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    return type(
        kind.__name__,
        (kind,),
        {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def find_parts(model: nn.Module, layout: Layout) -> dict[str, nn.Module]:
    """The modules that stay whole under every cut, by name: the blocks, and what else has parameters or buffers around them.

    The children of lists are blocks, but for one that has more than half of all parameters: that is the model in a wrapping."""
    named = (
        {_find_submodule(layout, model, path) for path in layout.blocks}
        if layout.blocks is not None
        else None
    )
    most = _count_elements(model) / 2
    found: dict[str, nn.Module] = {}

    def is_open(module: nn.Module, is_block: bool) -> bool:
        if module is model or type(module) in LISTS:
            return True
        if named is not None:
            return any(inner is not module and inner in named for inner in module.modules())
        has_lists = any(isinstance(inner, LISTS) for inner in module.modules())
        return (has_lists and not is_block) or (
            _count_elements(module) > most and any(map(_has_state, module.children()))
        )

    def visit(path: str, module: nn.Module, is_block: bool) -> None:
        if not is_open(module, is_block):
            found[path] = module
            return
        for key, child in module.named_children():
            if _has_state(child):
                visit(f"{path}.{key}" if path else key, child, isinstance(module, LISTS))

    visit("", model, False)
    return found


def _find_submodule(layout: Layout, model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        known = [name for name, _ in model.named_modules() if name]
        raise TaskError(
            f"layout().blocks names {path!r}, which the model has not{nearest(path, known)}"
        ) from None


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _count_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
