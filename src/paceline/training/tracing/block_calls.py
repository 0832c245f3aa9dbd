"""Ranges around the calls of the blocks of a model."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from paceline.torch_compat import intercept_calls
from paceline.training.tracing.ranges import BLOCK, OpenRange


def open_block_ranges(blocks: Mapping[str, nn.Module], open_range: OpenRange) -> Callable[[], None]:
    """Let each call of a block open a range with the name of the block. Return what ends that.

    Hooks of torch's engines run inside the range, and neither the graph nor compiled code changes.
    """
    ends = [intercept_calls(block, _make_call(name, open_range)) for name, block in blocks.items()]

    def end() -> None:
        for end_one in ends:
            end_one()

    return end


def _make_call(name: str, open_range: OpenRange) -> Callable[..., Any]:
    def call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        close = open_range(BLOCK, name)
        try:
            return run(*args, **kwargs)
        finally:
            close()

    return call
