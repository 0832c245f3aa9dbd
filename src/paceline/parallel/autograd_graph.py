"""What the autograd graph of a loss leads to."""

from torch import Tensor


def find_reached_parameters(loss: Tensor) -> set[int]:
    """Ids of the parameters that the graph of `loss` leads to."""
    found: set[int] = set()
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return found
