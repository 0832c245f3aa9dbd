"""Let ranks call a model different numbers of times, although a call has collectives of all ranks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Arguments = Mapping[str, Any]


@contextlib.contextmanager
def in_lockstep(
    model: nn.Module, device: torch.device, shorten: Callable[[Arguments], Arguments]
) -> Iterator[None]:
    """Keep all ranks at the same call of `model` in this context. Its exit is a collective.

    Before each call, the ranks agree on whether any of them still calls. A rank that leaves the context
    repeats short calls, whose results do not count, until all ranks leave it. Each rank must call the model
    at least once, with keyword arguments.

    shorten: returns the keyword arguments of a short call from those of the last call.
    """
    last: dict[str, Any] = {}
    is_done = False

    def is_any_calling() -> bool:
        calling = torch.tensor([float(not is_done)], device=device)
        dist.all_reduce(calling)
        return bool(calling)

    def before_call(module: nn.Module, args: Any, kwargs: Arguments) -> None:
        if not is_done:
            last.clear()
            last.update(kwargs)
            is_any_calling()

    handle = model.register_forward_pre_hook(before_call, prepend=True, with_kwargs=True)
    try:
        yield
        is_done = True
        while is_any_calling():
            model(**shorten(last))
    finally:
        handle.remove()
