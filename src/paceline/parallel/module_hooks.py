"""Intercept calls to parts of a model, which keep their names and classes."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from paceline.errors import TaskError
from paceline.spec import suggest
from paceline.task import Layout

Run = Callable[..., Any]
# (name of the part, the original call, args, kwargs) -> what the call returns
Visitor = Callable[[str, Run, Any, Any], Any]
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class CallInterceptor:
    """Passes each call to a part of a model to `visitor`; without a visitor the parts run unchanged."""

    def __init__(self, parts: dict[str, nn.Module]):
        self.parts = parts
        self.visitor: Visitor | None = None
        self.inside = False  # of a part: its inner calls are not intercepted
        for name, part in parts.items():
            part.__dict__["_interceptor"] = (self, name)
            # mypy takes the class for an unhashable instance.
            part.__class__ = _intercepted_class(type(part))  # type: ignore[arg-type]

    def intercept(self, name: str, run: Run, args: Any, kwargs: Any) -> Any:
        if self.visitor is None or self.inside:
            return run(*args, **kwargs)
        return self.visitor(name, run, args, kwargs)


@cache
def _intercepted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` whose calls are intercepted before hooks.

    So the hooks of torch's engines do not see calls that the visitor answers otherwise.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor, name = self.__dict__["_interceptor"]
        return interceptor.intercept(name, lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    return type(
        kind.__name__,
        (kind,),
        {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def find_parts(model: nn.Module, layout: Layout) -> dict[str, nn.Module]:
    """Return the modules that stay whole under every plan, by name.

    They are the blocks, and the other modules with parameters or buffers.

    The children of lists are blocks. A child with more than half of all parameters is not: it is a model in a
    wrapper.
    """
    named = (
        {_find_submodule(layout, model, path) for path in layout.blocks}
        if layout.blocks is not None
        else None
    )
    half = _count_elements(model) / 2
    parts: dict[str, nn.Module] = {}

    def is_open(module: nn.Module, is_block: bool) -> bool:
        if module is model or type(module) in LISTS:
            return True
        if named is not None:
            return any(inner is not module and inner in named for inner in module.modules())
        has_lists = any(isinstance(inner, LISTS) for inner in module.modules())
        return (has_lists and not is_block) or (
            _count_elements(module) > half and any(map(_has_state, module.children()))
        )

    def visit(path: str, module: nn.Module, is_block: bool) -> None:
        if not is_open(module, is_block):
            parts[path] = module
            return
        for key, child in module.named_children():
            if _has_state(child):
                visit(f"{path}.{key}" if path else key, child, isinstance(module, LISTS))

    visit("", model, False)
    return parts


def _find_submodule(layout: Layout, model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        known = [name for name, _ in model.named_modules() if name]
        raise TaskError(f"layout().blocks: no such module: {path!r}{suggest(path, known)}") from None


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _count_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
