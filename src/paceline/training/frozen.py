"""Parameters that get no gradients for a while."""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


@contextlib.contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute no gradients of these parameters, which are trained otherwise, in this context."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
