"""Forward hooks that keep outputs of parts, such as the hidden states that transformers collects.

A stage does not run the parts of other stages, nor their hooks. Hooks that only keep what they see are called
there with placeholders, so that a list of outputs has the same elements on all stages.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Hook = Callable[..., Any]


@dataclass(frozen=True)
class HookCall:
    """A call of a hook: which hook of which module, and what it saw."""

    module: str  # its path in the part
    index: int  # among the hooks of the module that are no engine's
    leaves: list[Any]  # of (args, kwargs, output)
    structure: TreeSpec


def find_hooks(module: nn.Module) -> list[tuple[int, Hook]]:
    """Return key and function of the forward hooks that neither torch nor Paceline registered."""
    return [(key, hook) for key, hook in module._forward_hooks.items() if not _is_of_engine(hook)]


def _is_of_engine(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0] in ("torch", "paceline")


@contextmanager
def record_hooks(part: nn.Module, count_operations: Callable[[], int]) -> Iterator[list[HookCall]]:
    """Record the calls of hooks in a part that only keep what they see.

    count_operations: returns the operations so far. A hook that computes is not recorded: the tracer knows
    what depends on its results.
    """
    calls: list[HookCall] = []
    wrapped: list[tuple[nn.Module, int, Hook]] = []

    def wrap(path: str, module: nn.Module, index: int, key: int, hook: Hook) -> None:
        @functools.wraps(hook)
        def recorder(module: nn.Module, *seen: Any) -> Any:
            before = count_operations()
            result = hook(module, *seen)
            if result is None and count_operations() == before:
                with_kwargs = seen if len(seen) == 3 else (seen[0], {}, seen[1])
                calls.append(HookCall(path, index, *tree_flatten(with_kwargs)))
            return result

        module._forward_hooks[key] = recorder
        wrapped.append((module, key, hook))

    for path, module in part.named_modules():
        for index, (key, hook) in enumerate(find_hooks(module)):
            wrap(path, module, index, key, hook)
    try:
        yield calls
    finally:
        for module, key, hook in wrapped:
            if key in module._forward_hooks:
                module._forward_hooks[key] = hook


def replay_hooks(part: nn.Module, calls: Sequence[HookCall], stand_in: Callable[[Any], Any]) -> None:
    """Call the hooks again, with `stand_in(leaf)` for each leaf of a recorded call."""
    for call in calls:
        module = part.get_submodule(call.module)
        hooks = find_hooks(module)
        if call.index < len(hooks):
            key, hook = hooks[call.index]
            args, kwargs, output = tree_unflatten(list(map(stand_in, call.leaves)), call.structure)
            takes_kwargs = key in module._forward_hooks_with_kwargs
            hook(module, args, kwargs, output) if takes_kwargs else hook(module, args, output)
