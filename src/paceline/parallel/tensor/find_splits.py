"""A search for the layers that tensor parallelism can split, by tracing one forward pass on the meta device.

The output of each linear layer gets the label "split along its last dimension", and labels are propagated
through the operations of the model: elementwise operations keep them, a view moves them to the heads, and
attention treats heads independently. If all uses of a label end in the inputs of other linear layers, the
first layers may be split by columns and the others by rows, with one sum at the end (Shoeybi et al.,
Megatron-LM, 2019). Then the pass runs again with the sizes of one rank: a forward with fixed sizes (`view(B,
T, 12, 64)`) would do something different there, and is not split.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import PlanError
from paceline.parallel.tensor.tracer import (
    LabelTracer,
    TraceResult,
    WholeFunctionTracer,
    find_first_difference,
    is_linear,
    is_loss_head,
    linear_features,
    replaced_forwards,
)


@dataclass(frozen=True)
class SplitCandidates:
    """Names of modules by the way they can be split."""

    columns: frozenset[str]
    rows: frozenset[str]
    heads: frozenset[str]  # layers whose output the model returns, split along its last dimension
    # linear layers, loss heads and embeddings that run as modules, with parameters not used elsewhere
    called: tuple[str, ...]
    # small parameter that is combined with a part of the features -> column layers that these come from
    partial: Mapping[str, frozenset[str]]
    # module that draws random numbers -> column layers whose features it draws for
    draws: tuple[tuple[str, frozenset[str]], ...]
    notes: tuple[str, ...]


def find_candidates(model: nn.Module, run: Callable[[], Any], tp: int) -> SplitCandidates:
    """Return which layers can be split over `tp` ranks.

    run: calls the model, which is on the meta device.

    Raises PlanError if `tp` does not divide the heads or hidden sizes.
    """
    trace = _trace(model, run)
    rejected: set[str] = set()
    while True:
        columns, rows, groups = _pair_layers(trace, rejected)
        _check_divisible(trace, columns, tp, groups)
        mismatch = _find_difference(model, run, trace, columns, rows, groups, tp) if columns else None
        if mismatch is None:
            break
        rejected |= {root for root in groups if number_pattern(root) == number_pattern(mismatch)}
    fixed = sorted({number_pattern(name) for name, root in trace.parents.items() if root in rejected})
    notes = (
        (f"tp: {', '.join(fixed)} cannot be split in pairs, because the forward fixes their sizes",)
        if fixed
        else ()
    )
    members = {root: frozenset(name for name in columns if trace.root(name) == root) for root in groups}
    partial: dict[str, frozenset[str]] = {}
    for layer, names in trace.partial.items():
        for name in names if trace.root(layer) in groups else ():
            partial[name] = partial.get(name, frozenset()) | members[trace.root(layer)]
    draws = tuple(
        (name, members.get(trace.root(layer), frozenset()) if layer is not None else frozenset())
        for name, layer in trace.draws
    )
    called = tuple(name for name in trace.calls if name not in trace.used_outside)
    return SplitCandidates(
        frozenset(columns), frozenset(rows), frozenset(trace.heads - rows), called, partial, draws, notes
    )


def number_pattern(name: str) -> str:
    """Return a module name with * for each number, so that all blocks share one pattern."""
    return re.sub(r"\d+", "*", name)


def _trace(model: nn.Module, run: Callable[[], Any]) -> TraceResult:
    trace = TraceResult(model)
    tracer = LabelTracer(trace)

    def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            trace.calls[name] = trace.calls.get(name, 0) + 1
            with tracer.paused():
                y = inner(x, *args, **kwargs)
            tracer.keep_alive.append(y)
            if is_linear(module):
                label = tracer.label(x)
                if label is not None and label[1] != x.dim() - 1:
                    tracer.mark_unsplittable([x], name)
                trace.inputs.setdefault(name, set()).add(label[0] if label else None)
                trace.parents.setdefault(name, name)
                tracer.set_label(y, (name, y.dim() - 1))
            elif is_loss_head(module):
                tracer.mark_unsplittable([x], name)
            return y

        return forward

    with replaced_forwards(model, wrap), WholeFunctionTracer(tracer), tracer:
        output = run()
    for tensor in tree_leaves(output):
        if label := tracer.label(tensor):
            trace.unsplittable.setdefault(label[0], "the output")
            if label[1] == tensor.dim() - 1:
                trace.heads.add(label[0])
    return trace


def _pair_layers(trace: TraceResult, rejected: set[str]) -> tuple[set[str], set[str], set[str]]:
    """Return column layers, row layers, and the roots of groups whose every use ends in a row layer."""
    members: dict[str, list[str]] = {}
    for name in trace.parents:
        members.setdefault(trace.root(name), []).append(name)
    # These parameters meet both split and whole tensors: no sum of their gradients would be right.
    both = {trace.root(name) for name, partial in trace.partial.items() if partial & trace.whole}
    unsplittable = {trace.root(name) for name in trace.unsplittable} | both | rejected
    columns: set[str] = set()
    rows: set[str] = set()
    groups: set[str] = set()
    consumers = {
        root: [
            name
            for name, inputs in trace.inputs.items()
            if root in {trace.root(layer) for layer in inputs if layer}
        ]
        for root in members
    }
    # The sum after the consumers is the largest cost, so groups with few consumers come first.
    for root in sorted(members, key=lambda root: (len(consumers[root]), -len(members[root]))):
        names, ends = {*members[root]}, {*consumers[root]}
        have_one_input = all(
            {trace.root(layer) if layer is not None else None for layer in trace.inputs[name]} == {root}
            for name in ends
        )
        is_free = not (names & rows or ends & columns or (names | ends) & trace.used_outside or names & ends)
        if root not in unsplittable and ends and have_one_input and is_free:
            columns |= names
            rows |= ends
            groups.add(root)
    return columns, rows, groups


def _check_divisible(trace: TraceResult, columns: set[str], tp: int, groups: set[str]) -> None:
    for name in (name for name in trace.calls if name in columns):
        hidden = linear_features(trace.model.get_submodule(name))[1]
        for size in sorted(trace.sizes[name] | {hidden}):
            if size % tp:
                what = f"{size} heads" if size != hidden else f"{size} features"
                fitting = [
                    str(n) for n in range(2, size + 1) if not any(s % n for s in trace.sizes[name] | {hidden})
                ]
                hint = (
                    f"use tp={' or '.join(fitting[:3])}"
                    if fitting
                    else "use a plan without tp, such as zero3"
                )
                raise PlanError(f"tp={tp} does not divide the {what} of {name}; {hint}")


def _find_difference(
    model: nn.Module,
    run: Callable[[], Any],
    trace: TraceResult,
    columns: set[str],
    rows: set[str],
    groups: set[str],
    tp: int,
) -> str | None:
    """Run the pass with the sizes of one rank, and return the group whose operations differ, if any."""
    tracer = LabelTracer(TraceResult(model))

    def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with tracer.paused():
                if name in rows:
                    features_in, features_out = linear_features(module)
                    if x.shape[-1] * tp != features_in:
                        raise RuntimeError(f"{name} got {x.shape[-1]} features")
                    return x.new_empty(*x.shape[:-1], features_out)
                y = inner(x, *args, **kwargs)
                return y.narrow(-1, 0, y.shape[-1] // tp).clone() if name in columns else y

        return forward

    with replaced_forwards(model, wrap):
        index = find_first_difference(
            run, tracer, trace.tape, lambda label: tp if trace.root(label[0]) in groups else 1
        )
    if index is None:
        return None
    before = [
        trace.root(operation.label[0]) for operation in trace.tape[: index + 1] if operation.label is not None
    ]
    return next((root for root in reversed(before) if root in groups), next(iter(groups)))
