"""Activations between split layers, split over the same ranks: what is found by watching, and proved by a pass as one rank makes it.

What lies between the sums of tensor parallelism (norms, dropout, residual sums) is the same on all of its ranks, and each could do a
part of it along any dimension but the last: a sum becomes a reduce-scatter, and what enters split layers is gathered (Korthikanti et
al., Reducing activation recomputation in large transformer models, 2022). Activations are cut where the first block with split layers
begins, and are whole again where the last one ends.
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
from paceline.parallel.tensor.tracer import (
    LabelTracer,
    TraceResult,
    WholeFunctionTracer,
    find_first_difference,
    is_embedding,
    is_linear,
    replaced_forwards,
)

ACTIVATIONS = ""  # the one group of labels
GATHERING = ("column", "gather", "head")
MAX_ATTEMPTS = 4


@dataclass(frozen=True)
class BlockEdges:
    """Which leaves of the arguments of a block and of its output are split."""

    arguments: tuple[bool, ...]
    output: tuple[bool, ...]


@dataclass(frozen=True)
class SequenceParallelPlan:
    """What is done with activations between split layers, by names of modules."""

    dim: int  # that is cut
    blocks: Mapping[str, BlockEdges]  # in the order of their calls
    closed: bool  # only blocks do something with what is split
    exits: frozenset[str]  # row layers whose sum is scattered
    entrances: frozenset[str]  # split layers that gather their input
    gathers: frozenset[
        str
    ]  # modules whose output is gathered, since split layers take it and nothing else does
    fed: frozenset[str]  # these layers
    scatters: frozenset[str]  # modules whose output is whole, and is cut
    partial: frozenset[str]  # parameters that see a part of the activations
    draws: tuple[tuple[str, bool], ...]  # module that draws at random, and whether it does for a part


class NotSplittable(Exception):
    """Says why activations cannot be split; nothing where there are none between split layers."""


def find_sequence_parallel(
    model: nn.Module,
    run: Callable[[], Any],
    styles: Mapping[str, str],
    blocks: Mapping[str, nn.Module],
    order: Collection[str],
    tp: int,
) -> SequenceParallelPlan:
    """`run` calls the model, which is on the meta device; `order`: linear layers as they are called. Raises NotFound."""
    owners = [
        owner
        for name in order
        if styles.get(name) == "row"
        for owner in blocks
        if name.startswith(f"{owner}.")
    ]
    if not owners:
        raise NotSplittable
    failed = NotSplittable()
    for dim in (0, 1):  # the outer one first: its parts lie in one piece each
        try:
            scatters: frozenset[str] = frozenset()
            for _ in range(MAX_ATTEMPTS):
                watching = _SequenceTrial(model, styles, blocks, owners[0], owners[-1], dim, tp, scatters)
                found, missing = watching.find(run)
                if found is not None:
                    watching.prove(run, found)
                    return found
                scatters |= missing
        except NotSplittable as error:
            failed = failed if str(failed) else error
    raise failed


class _ActivationTracer(LabelTracer):
    """Notes what is whole where a part is needed, if it can be cut where a module returns it; and goes on as if it were."""

    def __init__(self, seen: TraceResult):
        super().__init__(seen)
        self.missing: set[str] = set()
        self.outside = False  # of blocks
        self.closed = True

    def follow(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]
    ) -> list[int | None] | None:
        self.closed &= not self.outside
        dims = super().follow(func, args, kwargs, tensors, results)
        if dims is not None or not is_pointwise(func):
            return dims
        split = next(tensor for tensor in tensors if self.label(tensor))
        whole = [tensor for tensor in tensors if not self.label(tensor) and tensor.shape == split.shape]
        if not whole or any(id(tensor) not in self.made for tensor in whole):
            return None
        for tensor in whole:
            self.missing.add(self.made[id(tensor)])
            self.put(tensor, self.labels[id(split)])
        return super().follow(func, args, kwargs, tensors, results)


@dataclass
class _SequenceTrial:
    model: nn.Module
    styles: Mapping[str, str]
    blocks: Mapping[str, nn.Module]
    first: str
    last: str
    dim: int
    tp: int
    scatters: frozenset[str]
    whole_shape: tuple[int, ...] | None = None  # of what is cut first
    open: bool = False  # from there to the end of the last block
    edges: dict[str, BlockEdges] = field(default_factory=dict)  # in the order of calls
    exits: dict[str, set[bool]] = field(default_factory=dict)
    entered: list[tuple[str, int | None]] = field(
        default_factory=list
    )  # split layer, id of its input if that is split
    at_edges: set[int] = field(default_factory=set)

    def find(self, run: Callable[[], Any]) -> tuple[SequenceParallelPlan | None, set[str]]:
        """What is done with activations; or modules whose outputs have to be cut first."""
        self.watch = _ActivationTracer(TraceResult(self.model, root_of={ACTIVATIONS: ACTIVATIONS}))
        with (
            self._at_blocks(self._begin, self._end),
            replaced_forwards(self.model, self._wrap, self.scatters),
            WholeFunctionTracer(self.watch),
            self.watch,
        ):
            output = run()
        self.watch.spoil([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], "the output")
        seen = self.watch.seen
        if not any(one.label for one in seen.tape):
            raise NotSplittable
        if seen.spoiled:
            raise NotSplittable(seen.spoiled[ACTIVATIONS])
        if self.watch.missing:
            return None, self.watch.missing
        return self._found(seen), set()

    def _found(self, seen: TraceResult) -> SequenceParallelPlan:
        gathered = self._gathered()
        kinds: dict[str, set[str]] = {}
        for name, at in self.entered:
            kinds.setdefault(name, set()).add(
                "whole" if at is None else "fed" if at in gathered else "entrance"
            )
        exits = frozenset(name for name, ways in self.exits.items() if True in ways)
        parameters = seen.partial.get(ACTIVATIONS, set()) | {f"{name}.bias" for name in exits}
        twice = [name for name, ways in kinds.items() if len(ways) > 1] + [
            name for name, ways in self.exits.items() if len(ways) > 1
        ]
        if twice or parameters & seen.whole:
            raise NotSplittable(
                f"{(twice or sorted(parameters & seen.whole))[0]}, which is used in several ways"
            )
        return SequenceParallelPlan(
            dim=self.dim,
            blocks=self.edges,
            closed=self.watch.closed,
            exits=exits,
            entrances=frozenset(name for name, ways in kinds.items() if "entrance" in ways),
            gathers=frozenset(gathered.values()),
            fed=frozenset(name for name, ways in kinds.items() if "fed" in ways),
            scatters=self.scatters,
            partial=frozenset(parameters),
            draws=tuple((name, label is not None) for name, label in seen.draws),
        )

    def _gathered(self) -> dict[int, str]:
        """Tensors that are made by a module and taken by split layers alone: a forward may go by their sizes."""
        watch = self.watch
        taken = {
            at
            for _, at in self.entered
            if at is not None and not watch.uses.get(at) and at not in self.at_edges
        }
        made = {
            at: watch.made[at]
            for at in taken
            if watch.made.get(at) not in (None, *self.blocks, *self.scatters, *self.styles)
        }
        others = {name for at, name in watch.made.items() if at not in made}
        return {at: name for at, name in made.items() if name not in others}

    @contextlib.contextmanager
    def _at_blocks(self, before: Any, after: Any) -> Iterator[None]:
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
            at = _find_activations(leaves)
            if at is None:
                raise NotSplittable
            self.whole_shape, self.open = tuple(leaves[at].shape), True
            if self.whole_shape[self.dim] % self.tp:
                raise NotSplittable(f"their shape {self.whole_shape}")
            leaves[at] = self._cut(leaves[at])
        if self.open:
            if name in self.edges:
                raise NotSplittable(f"{name}, which is called more than once")
            self.watch.outside = False
            self.edges[name] = BlockEdges(self._marks(leaves), ())
        return tree_unflatten(leaves, structure)

    def _end(self, name: str, output: Any) -> Any:
        if not self.open:
            return None
        leaves, _ = flatten(output)
        self.edges[name] = BlockEdges(self.edges[name].arguments, self._marks(leaves))
        self.watch.outside = True
        if name != self.last:
            return None
        self.open = False
        with self.watch.apart():
            whole = map_marked(lambda leaf: leaf.view_as(leaf), self.edges[name].output, output)
        self.watch.kept.append(whole)
        return whole

    def _marks(self, leaves: list[Any]) -> tuple[bool, ...]:
        split = [leaf for leaf in leaves if self.watch.label(leaf)]
        self.at_edges |= {id(leaf) for leaf in split}
        if any(self.watch.labels[id(leaf)][1] != self.dim for leaf in split):
            raise NotSplittable("how blocks turn them")
        return tuple(self.watch.label(leaf) is not None for leaf in leaves)

    def _cut(self, whole: Tensor) -> Tensor:
        with self.watch.apart():
            part = whole.view_as(whole)
        self.watch.put(part, (ACTIVATIONS, self.dim))
        return part

    def _wrap(self, name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_linear(module) or is_embedding(module):
                with self.watch.apart():
                    y = inner(*args, **kwargs)
                self.watch.kept.append(y)
                self._layer(name, module, tree_leaves((args, kwargs))[0], y)
            else:
                y = inner(*args, **kwargs)
            return self._cut(y) if name in self.scatters and self.open else y

        return forward

    def _layer(self, name: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        watch, style = self.watch, self.styles.get(name)
        label = watch.label(x)
        if label is not None and (label[1] != self.dim or label[1] == x.dim() - 1 or style == "row"):
            watch.spoil([x], name)
        if style in GATHERING:
            self.entered.append((name, id(x) if label else None))
        elif style == "row":
            fits = self.open and self.whole_shape is not None and y.shape[:-1] == self.whole_shape[:-1]
            self.exits.setdefault(name, set()).add(fits)
            if fits:
                watch.put(y, (ACTIVATIONS, self.dim))
        else:
            met = {f"{name}.{key}" for key in module._parameters}
            if label is None:
                watch.seen.whole |= met
            else:
                watch.put(y, label)
                watch.seen.partial.setdefault(ACTIVATIONS, set()).update(met)

    def prove(self, run: Callable[[], Any], found: SequenceParallelPlan) -> None:
        """Make the pass as one rank would. Raises NotFound where that does something else."""
        assert self.whole_shape is not None
        dim, tp, length = self.dim, self.tp, self.whole_shape[self.dim]
        part = LabelTracer(TraceResult(self.model))

        def cut(whole: Tensor) -> Tensor:
            if whole.shape[dim] != length:
                raise RuntimeError(f"{tuple(whole.shape)} is not whole along {dim}")
            return whole.narrow(dim, 0, length // tp).clone()

        def gather(x: Tensor) -> Tensor:
            if x.shape[dim] * tp != length:
                raise RuntimeError(f"{tuple(x.shape)} is no part along {dim}")
            return x.new_empty(*x.shape[:dim], length, *x.shape[dim + 1 :])

        def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
            def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if is_linear(module) or is_embedding(module):
                    with part.apart():
                        y = inner(gather(x) if name in found.entrances else x, *args, **kwargs)
                else:
                    y = inner(x, *args, **kwargs)
                with part.apart():
                    if name in found.gathers:
                        return gather(y)
                    return cut(y) if name in found.scatters or name in found.exits else y

            return forward

        def begin(name: str, arguments: Any) -> Any:
            with part.apart():
                return (
                    map_marked(cut, found.blocks[name].arguments, arguments) if name == self.first else None
                )

        def end(name: str, output: Any) -> Any:
            with part.apart():
                return map_marked(gather, found.blocks[name].output, output) if name == self.last else None

        tape = self.watch.seen.tape
        with self._at_blocks(begin, end), replaced_forwards(self.model, wrap, found.gathers | found.scatters):
            at = find_first_difference(run, part, tape, lambda label: tp)
        if at is not None:
            raise NotSplittable(f"{tape[at].name}, which goes by their sizes")


def _find_activations(leaves: list[Any]) -> int | None:
    """Which argument of a block are the activations."""
    likely = [
        at
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 2
    ]
    return next((at for at in likely if leaves[at].requires_grad), likely[0] if likely else None)
