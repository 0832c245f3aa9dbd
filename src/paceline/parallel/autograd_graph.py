"""The autograd graph of a loss."""

from torch import Tensor


def find_reached_parameters(loss: Tensor) -> set[int]:
    """Return the ids of the parameters that the graph of `loss` reaches."""
    reached: set[int] = set()
    visited = set()
    queue = [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        queue += [parent for parent, _ in node.next_functions]
    return reached
