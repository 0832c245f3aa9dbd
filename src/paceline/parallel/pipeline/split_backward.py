"""The backward pass in two halves, for zero-bubble schedules: gradients of inputs, then of weights.

torch's split (`torch.distributed.pipelining._backward`, 2.13) has three defects. It drops the gradients
of parameters that no input of the stage leads to. It counts some gradients twice if several operations
share them. It lets equal gradients of two parameters be one tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from paceline.parallel.pipeline.actions import BACKWARD, FORWARD, WEIGHTS, ActionObserver

Grads = Sequence[Tensor | None]


@dataclass
class _DeferredGradients:
    """Parameters whose gradients are computed later.

    `node`: the operation that all these gradients pass through.
    """

    node: Node
    parameters: list[Tensor]
    grads: Grads = ()  # of the results of the operation

    def save_grads(self, grads: Grads) -> None:
        self.grads = grads

    def run(self) -> None:
        edges = [GradientEdge(self.node, index) for index, grad in enumerate(self.grads) if grad is not None]
        # A hook that the user registered on a tensor runs again here; the gradient from its first run counts.
        restore = self.node.register_prehook(lambda grads: self.grads)
        try:
            _backward(edges, [grad for grad in self.grads if grad is not None], self.parameters)
        finally:
            restore.remove()


@dataclass
class WeightGradients:
    """The rest of a backward pass: the gradients of the weights."""

    deferred: list[_DeferredGradients]
    roots: list[tuple[GradientEdge, Tensor | None]]  # outputs that no input leads to, and their gradients
    parameters: list[Tensor]  # that only these outputs depend on
    done: bool = field(default=False, init=False)

    def run(self) -> None:
        """Add to the gradients of the weights. Call it once."""
        assert not self.done
        self.done = True
        for deferred in self.deferred:
            deferred.run()
        _backward([edge for edge, _ in self.roots], [grad for _, grad in self.roots], self.parameters)
        self.deferred, self.roots = [], []


def backward_inputs(
    outputs: Sequence[Tensor], output_grads: Grads | None, inputs: Iterable[Any]
) -> tuple[tuple[Tensor | None, ...], WeightGradients]:
    """Return the gradients of `inputs`, and the deferred computation of those of all other leaves.

    `inputs` are leaves; the gradient of an input that gets none is None.

    Operations that lead to an input run now, the others later. If the gradient of a parameter passes
    through exactly one operation that runs now, the rest of its computation is deferred. If it passes
    through several, the gradient is computed now: later, all of these operations would run again.
    """
    inputs = list(inputs)
    differentiable = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    roots = [
        (get_gradient_edge(output), output, at) for at, output in enumerate(outputs) if output.requires_grad
    ]
    graph = _Graph(
        [edge.node for edge, _, _ in roots], {get_gradient_edge(value).node for value in differentiable}
    )
    # For each leaf, the operations that its gradient passes through; None: it comes from outputs alone.
    owners: dict[Node, set[Node | None]] = {}
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

    weight_grads = WeightGradients(
        [], [(edge, grad_of(output, at)) for edge, output, at in outside], later.pop(None, [])
    )
    weight_grads.deferred = [
        _DeferredGradients(owner, parameters) for owner, parameters in later.items() if owner is not None
    ]
    hooks = [deferred.node.register_prehook(deferred.save_grads) for deferred in weight_grads.deferred]
    try:
        given = [(edge, grad_of(output, at)) for edge, output, at in roots]
        _backward(
            [edge for edge, _ in given],
            [grad for _, grad in given],
            [*differentiable, *now],
            retain_graph=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(value.grad if isinstance(value, Tensor) else None for value in inputs), weight_grads


class _Graph:
    """The operations between outputs and leaves.

    `leading`: the operations that lead to an input. `leaves`: the leaves that each other operation leads to.
    """

    def __init__(self, roots: Sequence[Node], inputs: set[Node]):
        self.nodes = _sort_inputs_first(roots)
        self.leading: set[Node] = set()
        self.leaves: dict[Node, frozenset[Node]] = {}
        for node in self.nodes:
            following = _next(node)
            if node in inputs or any(after in self.leading for after in following):
                self.leading.add(node)
            elif hasattr(node, "variable"):  # it accumulates a gradient
                self.leaves[node] = frozenset([node])
            else:
                self.leaves[node] = frozenset().union(*(self.leaves[after] for after in following))


def _sort_inputs_first(roots: Sequence[Node]) -> list[Node]:
    """Return all operations that `roots` lead to, each after those that receive its gradient."""
    order: list[Node] = []
    visited: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(after, False) for after in _next(node) if after not in visited]
    return order


def _next(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _backward(
    edges: Sequence[GradientEdge], grads: Grads, leaves: Sequence[Tensor], retain_graph: bool = False
) -> None:
    """Propagate `grads` back from `edges`, and add the results to `.grad` of `leaves`."""
    pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if grad is not None]
    if pairs and leaves:
        torch.autograd.backward(
            [edge for edge, _ in pairs], [grad for _, grad in pairs], retain_graph, inputs=list(leaves)
        )


class SplitStage(PipelineStage):
    """torch's stage, with the split of this module instead of torch's, and an observer of its actions."""

    def __init__(self, *args: Any, actions: ActionObserver, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._actions = actions

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._actions.during(FORWARD, fwd_chunk_id, self.stage_index):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._actions.during(BACKWARD, bwd_chunk_id, self.stage_index):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._actions.during(WEIGHTS, bwd_chunk_id, self.stage_index):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # As in torch: the schedule reduces the gradients when they are complete.
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            outputs = bwd_kwargs["stage_output"]
            bwd_kwargs["stage_output"] = ()  # frees the part of the graph that is not deferred
            return backward_inputs(outputs, bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        bwd_kwargs["param_groups"].run()
        return (), None
