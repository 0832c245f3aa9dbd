"""A search for the activations between split layers that can be split too.

It traces a pass, and checks the result by a pass with the sizes of one rank.

Between the sums of tensor parallelism, all ranks hold the same activations (norms, dropout, residual sums).
Each rank can compute a part of them, along any dimension but the last: a sum becomes a reduce-scatter, and
the input of split layers is gathered (Korthikanti et al., Reducing activation recomputation in large
transformer models, 2022). Activations are scattered where the first block with split layers begins, and
gathered where the last block ends.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from paceline.parallel.op_rules import is_pointwise
from paceline.parallel.pytree import flatten
from paceline.parallel.tensor.sequence_comm import hook_block, map_marked
from paceline.parallel.tensor.styles import STYLES
from paceline.parallel.tensor.tracer import (
    LabelTracer,
    TraceResult,
    WholeFunctionTracer,
    find_first_difference,
    is_embedding,
    is_linear,
    is_loss_head,
    replaced_forwards,
)

ACTIVATIONS = ""  # the only group of labels
MAX_ATTEMPTS = 4


@dataclass(frozen=True)
class BlockEdges:
    """Which leaves of the arguments of a block and of its output are split."""

    arguments: tuple[bool, ...]
    output: tuple[bool, ...]


@dataclass(frozen=True)
class SequenceParallelPlan:
    """Where activations between split layers are scattered and gathered, by names of modules."""

    dim: int  # that is split
    blocks: Mapping[str, BlockEdges]  # in the order of their calls
    is_inside_blocks: bool  # only blocks operate on split activations
    scattered_sums: frozenset[str]  # row layers whose sum is scattered
    gathered_inputs: frozenset[str]  # split layers that gather their input
    # modules whose output is gathered, because only split layers take it
    gathered_outputs: frozenset[str]
    ready_inputs: frozenset[str]  # the split layers that take this output
    scattered_outputs: frozenset[str]  # modules whose output is whole and is scattered
    partial: frozenset[str]  # parameters that are combined with a part of the activations
    draws: tuple[tuple[str, bool], ...]  # module that draws random numbers, and whether it draws for a part


class NotSplittable(Exception):
    """The reason why activations cannot be split; empty if there are none between split layers."""


def find_sequence_parallel(
    model: nn.Module,
    run: Callable[[], Any],
    styles: Mapping[str, str],
    blocks: Mapping[str, nn.Module],
    order: Collection[str],
    tp: int,
) -> SequenceParallelPlan:
    """Return how the activations between split layers are split over `tp` ranks.

    run: calls the model, which is on the meta device.
    styles: split layer -> its style.
    order: linear layers in the order of their calls.

    Raises NotSplittable.
    """
    owners = [
        owner
        for name in order
        if styles.get(name) == "row"
        for owner in blocks
        if name.startswith(f"{owner}.")
    ]
    if not owners:
        raise NotSplittable
    failure = NotSplittable()
    for dim in (0, 1):  # the outer dimension first: its parts are contiguous
        try:
            scattered_outputs: frozenset[str] = frozenset()
            for _ in range(MAX_ATTEMPTS):
                trial = _SequenceTrial(
                    model, styles, blocks, owners[0], owners[-1], dim, tp, scattered_outputs
                )
                plan, missing = trial.find_plan(run)
                if plan is not None:
                    trial.check_plan(run, plan)
                    return plan
                scattered_outputs |= missing
        except NotSplittable as error:
            failure = failure if str(failure) else error
    raise failure


class _ActivationTracer(LabelTracer):
    """Records modules whose whole output meets split activations, and continues as if it were scattered."""

    def __init__(self, result: TraceResult):
        super().__init__(result)
        self.missing: set[str] = set()
        self.is_outside = False  # of blocks
        self.is_inside_blocks = True

    def propagate(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]
    ) -> list[int | None] | None:
        self.is_inside_blocks &= not self.is_outside
        dims = super().propagate(func, args, kwargs, tensors, results)
        if dims is not None or not is_pointwise(func):
            return dims
        split = next(tensor for tensor in tensors if self.label(tensor))
        whole = [tensor for tensor in tensors if not self.label(tensor) and tensor.shape == split.shape]
        if not whole or any(id(tensor) not in self.producers for tensor in whole):
            return None
        for tensor in whole:
            self.missing.add(self.producers[id(tensor)])
            self.set_label(tensor, self.labels[id(split)])
        return super().propagate(func, args, kwargs, tensors, results)


@dataclass
class _SequenceTrial:
    """One attempt to split activations along `dim`, from the block `first` to the block `last`."""

    model: nn.Module
    styles: Mapping[str, str]
    blocks: Mapping[str, nn.Module]
    first: str
    last: str
    dim: int
    tp: int
    scattered_outputs: frozenset[str]
    whole_shape: tuple[int, ...] | None = None  # of the first activations that are scattered
    is_split: bool = False  # from there to the end of the last block
    edges: dict[str, BlockEdges] = field(default_factory=dict)  # in the order of calls
    sums: dict[str, set[bool]] = field(default_factory=dict)  # row layer -> whether its sum is scattered
    # split layer, and the id of its input if that is split
    inputs: list[tuple[str, int | None]] = field(default_factory=list)
    edge_ids: set[int] = field(default_factory=set)  # of split arguments and outputs of blocks

    def find_plan(self, run: Callable[[], Any]) -> tuple[SequenceParallelPlan | None, set[str]]:
        """Return the plan; or None and the modules whose outputs must be scattered first."""
        self.tracer = _ActivationTracer(TraceResult(self.model, parents={ACTIVATIONS: ACTIVATIONS}))
        with (
            self._hooked_blocks(self._begin, self._end),
            replaced_forwards(self.model, self._wrap, self.scattered_outputs),
            WholeFunctionTracer(self.tracer),
            self.tracer,
        ):
            output = run()
        self.tracer.mark_unsplittable(
            [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], "the output"
        )
        trace = self.tracer.result
        if not any(operation.label for operation in trace.tape):
            raise NotSplittable
        if trace.unsplittable:
            raise NotSplittable(trace.unsplittable[ACTIVATIONS])
        if self.tracer.missing:
            return None, self.tracer.missing
        return self._build_plan(trace), set()

    def _build_plan(self, trace: TraceResult) -> SequenceParallelPlan:
        gathered = self._find_gathered_outputs()
        kinds: dict[str, set[str]] = {}
        for name, input_id in self.inputs:
            kinds.setdefault(name, set()).add(
                "whole" if input_id is None else "ready" if input_id in gathered else "gathered"
            )
        scattered_sums = frozenset(name for name, kinds_of_sum in self.sums.items() if True in kinds_of_sum)
        parameters = trace.partial.get(ACTIVATIONS, set()) | {f"{name}.bias" for name in scattered_sums}
        mixed = [name for name, kinds_of_input in kinds.items() if len(kinds_of_input) > 1] + [
            name for name, kinds_of_sum in self.sums.items() if len(kinds_of_sum) > 1
        ]
        if mixed or parameters & trace.whole:
            name = (mixed or sorted(parameters & trace.whole))[0]
            raise NotSplittable(f"{name}, which is used for split and for whole activations")
        return SequenceParallelPlan(
            dim=self.dim,
            blocks=self.edges,
            is_inside_blocks=self.tracer.is_inside_blocks,
            scattered_sums=scattered_sums,
            gathered_inputs=frozenset(
                name for name, kinds_of_input in kinds.items() if "gathered" in kinds_of_input
            ),
            gathered_outputs=frozenset(gathered.values()),
            ready_inputs=frozenset(
                name for name, kinds_of_input in kinds.items() if "ready" in kinds_of_input
            ),
            scattered_outputs=self.scattered_outputs,
            partial=frozenset(parameters),
            draws=tuple((name, label is not None) for name, label in trace.draws),
        )

    def _find_gathered_outputs(self) -> dict[int, str]:
        """Return the tensors, by id, that a module makes and only split layers take.

        They are gathered where they are made, because a forward may read their sizes.
        """
        tracer = self.tracer
        taken = {
            input_id
            for _, input_id in self.inputs
            if input_id is not None and not tracer.use_counts.get(input_id) and input_id not in self.edge_ids
        }
        produced = {
            input_id: tracer.producers[input_id]
            for input_id in taken
            if tracer.producers.get(input_id)
            not in (None, *self.blocks, *self.scattered_outputs, *self.styles)
        }
        others = {name for output_id, name in tracer.producers.items() if output_id not in produced}
        return {output_id: name for output_id, name in produced.items() if name not in others}

    @contextlib.contextmanager
    def _hooked_blocks(self, before: Any, after: Any) -> Iterator[None]:
        hooks = [
            hook
            for name, block in self.blocks.items()
            for hook in hook_block(block, partial(before, name), partial(after, name))
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, name: str, arguments: Any) -> Any:
        leaves, structure = flatten(arguments)
        if name == self.first and self.whole_shape is None:
            index = _find_activations(leaves)
            if index is None:
                raise NotSplittable
            self.whole_shape, self.is_split = tuple(leaves[index].shape), True
            if self.whole_shape[self.dim] % self.tp:
                raise NotSplittable(f"their shape {self.whole_shape}")
            leaves[index] = self._scatter(leaves[index])
        if self.is_split:
            if name in self.edges:
                raise NotSplittable(f"{name}, which is called more than once")
            self.tracer.is_outside = False
            self.edges[name] = BlockEdges(self._mark(leaves), ())
        return tree_unflatten(leaves, structure)

    def _end(self, name: str, output: Any) -> Any:
        if not self.is_split:
            return None
        leaves, _ = flatten(output)
        self.edges[name] = BlockEdges(self.edges[name].arguments, self._mark(leaves))
        self.tracer.is_outside = True
        if name != self.last:
            return None
        self.is_split = False
        with self.tracer.paused():
            whole = map_marked(lambda leaf: leaf.view_as(leaf), self.edges[name].output, output)
        self.tracer.keep_alive.append(whole)
        return whole

    def _mark(self, leaves: list[Any]) -> tuple[bool, ...]:
        """Return which leaves are split."""
        split = [leaf for leaf in leaves if self.tracer.label(leaf)]
        self.edge_ids |= {id(leaf) for leaf in split}
        if any(self.tracer.labels[id(leaf)][1] != self.dim for leaf in split):
            raise NotSplittable("blocks that transpose them")
        return tuple(self.tracer.label(leaf) is not None for leaf in leaves)

    def _scatter(self, whole: Tensor) -> Tensor:
        with self.tracer.paused():
            part = whole.view_as(whole)
        self.tracer.set_label(part, (ACTIVATIONS, self.dim))
        return part

    def _wrap(self, name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_linear(module) or is_embedding(module) or is_loss_head(module):
                with self.tracer.paused():
                    y = inner(*args, **kwargs)
                self.tracer.keep_alive.append(y)
                self._record_layer(name, module, tree_leaves((args, kwargs))[0], y)
            else:
                y = inner(*args, **kwargs)
            return self._scatter(y) if name in self.scattered_outputs and self.is_split else y

        return forward

    def _record_layer(self, name: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        tracer, style = self.tracer, self.styles.get(name)
        label = tracer.label(x)
        is_whole_loss = is_loss_head(module) and style is None
        if label is not None and (
            label[1] != self.dim or label[1] == x.dim() - 1 or style == "row" or is_whole_loss
        ):
            tracer.mark_unsplittable([x], name)
        if style is not None and STYLES[style].takes_whole_input:
            self.inputs.append((name, id(x) if label else None))
        elif style == "row":
            is_scattered = (
                self.is_split and self.whole_shape is not None and y.shape[:-1] == self.whole_shape[:-1]
            )
            self.sums.setdefault(name, set()).add(is_scattered)
            if is_scattered:
                tracer.set_label(y, (ACTIVATIONS, self.dim))
        else:
            parameters = {f"{name}.{key}" for key, _ in module.named_parameters()}
            if label is None:
                tracer.result.whole |= parameters
            else:
                tracer.set_label(y, label)
                tracer.result.partial.setdefault(ACTIVATIONS, set()).update(parameters)

    def check_plan(self, run: Callable[[], Any], plan: SequenceParallelPlan) -> None:
        """Run the pass with the sizes of one rank.

        Raises NotSplittable if its operations differ from those of the whole pass.
        """
        assert self.whole_shape is not None
        dim, tp, length = self.dim, self.tp, self.whole_shape[self.dim]
        tracer = LabelTracer(TraceResult(self.model))

        def scatter(whole: Tensor) -> Tensor:
            if whole.shape[dim] != length:
                raise RuntimeError(f"{tuple(whole.shape)} is not whole along {dim}")
            return whole.narrow(dim, 0, length // tp).clone()

        def gather(x: Tensor) -> Tensor:
            if x.shape[dim] * tp != length:
                raise RuntimeError(f"{tuple(x.shape)} is not a part along {dim}")
            return x.new_empty(*x.shape[:dim], length, *x.shape[dim + 1 :])

        def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
            def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if is_linear(module) or is_embedding(module) or is_loss_head(module):
                    with tracer.paused():
                        y = inner(gather(x) if name in plan.gathered_inputs else x, *args, **kwargs)
                else:
                    y = inner(x, *args, **kwargs)
                with tracer.paused():
                    if name in plan.gathered_outputs:
                        return gather(y)
                    return scatter(y) if name in plan.scattered_outputs or name in plan.scattered_sums else y

            return forward

        def begin(name: str, arguments: Any) -> Any:
            with tracer.paused():
                return (
                    map_marked(scatter, plan.blocks[name].arguments, arguments)
                    if name == self.first
                    else None
                )

        def end(name: str, output: Any) -> Any:
            with tracer.paused():
                return map_marked(gather, plan.blocks[name].output, output) if name == self.last else None

        tape = self.tracer.result.tape
        with (
            self._hooked_blocks(begin, end),
            replaced_forwards(self.model, wrap, plan.gathered_outputs | plan.scattered_outputs),
        ):
            index = find_first_difference(run, tracer, tape, lambda label: tp)
        if index is not None:
            raise NotSplittable(f"{tape[index].name}, which depends on their sizes")


def _find_activations(leaves: list[Any]) -> int | None:
    """Return the index of the argument of a block that is likely its activations."""
    likely = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 2
    ]
    return next((index for index in likely if leaves[index].requires_grad), likely[0] if likely else None)
