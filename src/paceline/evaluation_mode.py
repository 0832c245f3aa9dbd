"""Set a model to evaluation for a while, and restore the mode of each of its modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation, and each module to its own mode again when the context ends.

    A task may keep a part in evaluation mode, such as a frozen encoder with dropout.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
