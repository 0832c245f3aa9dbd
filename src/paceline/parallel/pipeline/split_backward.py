"""The two halves of a backward pass that zero-bubble schedules run apart: gradients of a stage's inputs first, those of its weights later.

torch's own split (`torch.distributed.pipelining._backward`, 2.13) drops the gradients of parameters that no input of the stage leads
to, counts some twice that several operations share, and lets equal gradients of two parameters be one tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

Grads = Sequence[Tensor | None]


@dataclass
class _Deferred:
    """Parameters whose gradients wait, and the operation that all of these gradients come through."""

    node: Node
    parameters: list[Tensor]
    grads: Grads = ()  # of the results of the operation

    def keep(self, grads: Grads) -> None:
        self.grads = grads

    def run(self) -> None:
        edges = [GradientEdge(self.node, index) for index, grad in enumerate(self.grads) if grad is not None]
        # A hook that the user put on a tensor runs again; what it made of the gradient the first time counts.
        clamp = self.node.register_prehook(lambda grads: self.grads)
        try:
            _backward(edges, [grad for grad in self.grads if grad is not None], self.parameters)
        finally:
            clamp.remove()


@dataclass
class WeightGradients:
    """What is left to do of a backward pass."""

    deferred: list[_Deferred]
    roots: list[tuple[GradientEdge, Tensor | None]]  # outputs that no input leads to, and their gradients
    parameters: list[Tensor]  # of these alone
    done: bool = field(default=False, init=False)

    def run(self) -> None:
        """Add to the gradients of the weights; once."""
        assert not self.done
        self.done = True
        for each in self.deferred:
            each.run()
        _backward([edge for edge, _ in self.roots], [grad for _, grad in self.roots], self.parameters)
        self.deferred, self.roots = [], []


def backward_inputs(
    outputs: Sequence[Tensor], output_grads: Grads | None, inputs: Iterable[Any]
) -> tuple[tuple[Tensor | None, ...], WeightGradients]:
    """Return the gradients of `inputs`, which are leaves, None where there is none; and what computes those of all other leaves.

    The graph falls into operations that lead to an input, which run now, and the rest. A parameter whose gradient comes through one
    operation of the first kind waits with it; where it comes through several, it is computed now, since later they would all run again.
    """
    inputs = list(inputs)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    roots = [
        (get_gradient_edge(output), output, at) for at, output in enumerate(outputs) if output.requires_grad
    ]
    graph = _Graph([edge.node for edge, _, _ in roots], {get_gradient_edge(value).node for value in wanted})
    owners: dict[
        Node, set[Node | None]
    ] = {}  # leaf -> the operations that its gradient comes through; None: outputs alone
    for node in graph.nodes:
        if node in graph.leading:
            for following in _next(node):
                for leaf in graph.leaves.get(following, ()):
                    owners.setdefault(leaf, set()).add(node)
    outside = [(edge, output, at) for edge, output, at in roots if edge.node not in graph.leading]
    for edge, _, _ in outside:
        for leaf in graph.leaves[edge.node]:
            owners.setdefault(leaf, set()).add(None)
    now: list[Tensor] = []
    later: dict[Node | None, list[Tensor]] = {}
    for leaf, through in owners.items():
        [owner, *more] = through
        (now if more else later.setdefault(owner, [])).append(leaf.variable)  # type: ignore[attr-defined]

    def grad_of(output: Tensor, at: int) -> Tensor | None:
        return torch.ones_like(output) if output_grads is None else output_grads[at]

    rest = WeightGradients(
        [], [(edge, grad_of(output, at)) for edge, output, at in outside], later.pop(None, [])
    )
    rest.deferred = [_Deferred(owner, parameters) for owner, parameters in later.items() if owner is not None]
    hooks = [each.node.register_prehook(each.keep) for each in rest.deferred]
    try:
        given = [(edge, grad_of(output, at)) for edge, output, at in roots]
        _backward(
            [edge for edge, _ in given], [grad for _, grad in given], [*wanted, *now], retain_graph=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(value.grad if isinstance(value, Tensor) else None for value in inputs), rest


class _Graph:
    """The operations between outputs and leaves. `leading`: those that lead to an input; `leaves`: what each of the others leads to."""

    def __init__(self, roots: Sequence[Node], inputs: set[Node]):
        self.nodes = _inputs_first(roots)
        self.leading: set[Node] = set()
        self.leaves: dict[Node, frozenset[Node]] = {}
        for node in self.nodes:
            following = _next(node)
            if node in inputs or any(each in self.leading for each in following):
                self.leading.add(node)
            elif hasattr(node, "variable"):  # where a gradient is accumulated
                self.leaves[node] = frozenset([node])
            else:
                self.leaves[node] = frozenset().union(*(self.leaves[each] for each in following))


def _inputs_first(roots: Sequence[Node]) -> list[Node]:
    """All operations behind `roots`, each after those that its gradient goes to."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(each, False) for each in _next(node) if each not in seen]
    return order


def _next(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _backward(
    edges: Sequence[GradientEdge], grads: Grads, leaves: Sequence[Tensor], retain_graph: bool = False
) -> None:
    """Add to `.grad` of `leaves` what comes of these gradients."""
    pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if grad is not None]
    if pairs and leaves:
        torch.autograd.backward(
            [edge for edge, _ in pairs], [grad for _, grad in pairs], retain_graph, inputs=list(leaves)
        )


class SplitStage(PipelineStage):
    """torch's stage, with this split in place of its own."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(
            self.submod, FSDPModule
        ):  # as torch's: the schedule reduces the gradients when all are there
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            outputs, bwd_kwargs["stage_output"] = (
                bwd_kwargs["stage_output"],
                (),
            )  # what does not wait is let go of
            return backward_inputs(outputs, bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        bwd_kwargs["param_groups"].run()
        return (), None
