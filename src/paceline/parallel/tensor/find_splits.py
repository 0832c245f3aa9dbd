"""What tensor parallelism can split in a model, found by watching one forward pass on the meta device.

The output of each linear layer is labelled as "split along its last dimension", and the labels are followed through the operations
that the model makes of it: elementwise ones keep them, a view moves them to the heads, attention keeps the heads apart. Where
all that becomes of a label ends in the input of other linear layers, the first may be split by columns and the others by rows, with one
sum at the end (Shoeybi et al., Megatron-LM, 2019). Then the pass is made again with the sizes that one rank would see: a forward that
says its sizes itself (`view(B, T, 12, 64)`) would do something else there, and is not split.
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
    linear_features,
    replaced_forwards,
)


@dataclass(frozen=True)
class SplitCandidates:
    """Names of modules by what is to be done with them."""

    columns: frozenset[str]
    rows: frozenset[str]
    heads: frozenset[str]  # what the model returns is split along its last dimension
    called: tuple[
        str, ...
    ]  # linear layers and embeddings that are run as modules, and whose parameters nobody else looks at
    partial: Mapping[
        str, frozenset[str]
    ]  # small parameter that sees only a part of the features -> columns that these come from
    draws: tuple[
        tuple[str, frozenset[str]], ...
    ]  # module that draws at random -> columns that the features come from it draws for
    notes: tuple[str, ...]


def find_candidates(model: nn.Module, run: Callable[[], Any], tp: int) -> SplitCandidates:
    """`run` calls the model, which is on the meta device. Raises PlanError for heads or hidden sizes that tp does not divide."""
    seen = _trace(model, run)
    rejected: set[str] = set()
    while True:
        columns, rows, groups = _pair_layers(seen, rejected)
        _check_divisible(seen, columns, tp, groups)
        wrong = _find_difference(model, run, seen, columns, rows, groups, tp) if columns else None
        if wrong is None:
            break
        rejected |= {root for root in groups if number_pattern(root) == number_pattern(wrong)}
    own = sorted({number_pattern(name) for name, root in seen.root_of.items() if root in rejected})
    notes = (
        (f"tp: {', '.join(own)} cannot be split in pairs, because the forward says their sizes itself",)
        if own
        else ()
    )
    members = {root: frozenset(name for name in columns if seen.root(name) == root) for root in groups}
    partial: dict[str, frozenset[str]] = {}
    for one, names in seen.partial.items():
        for name in names if seen.root(one) in groups else ():
            partial[name] = partial.get(name, frozenset()) | members[seen.root(one)]
    draws = tuple(
        (name, members.get(seen.root(one), frozenset()) if one is not None else frozenset())
        for name, one in seen.draws
    )
    called = tuple(name for name in seen.calls if name not in seen.looked_at)
    return SplitCandidates(
        frozenset(columns), frozenset(rows), frozenset(seen.heads - rows), called, partial, draws, notes
    )


def number_pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _trace(model: nn.Module, run: Callable[[], Any]) -> TraceResult:
    seen = TraceResult(model)
    watch = LabelTracer(seen)

    def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.calls[name] = seen.calls.get(name, 0) + 1
            with watch.apart():
                y = inner(x, *args, **kwargs)
            watch.kept.append(y)
            if is_linear(module):
                label = watch.label(x)
                if label is not None and label[1] != x.dim() - 1:
                    watch.spoil([x], name)
                seen.inputs.setdefault(name, set()).add(label[0] if label else None)
                seen.root_of.setdefault(name, name)
                watch.put(y, (name, y.dim() - 1))
            return y

        return forward

    with replaced_forwards(model, wrap), WholeFunctionTracer(watch), watch:
        output = run()
    for tensor in tree_leaves(output):
        if label := watch.label(tensor):
            seen.spoiled.setdefault(label[0], "the output")
            if label[1] == tensor.dim() - 1:
                seen.heads.add(label[0])
    return seen


def _pair_layers(seen: TraceResult, rejected: set[str]) -> tuple[set[str], set[str], set[str]]:
    """Columns, rows, and the names of their groups: those whose every use ends in a row."""
    members: dict[str, list[str]] = {}
    for name in seen.root_of:
        members.setdefault(seen.root(name), []).append(name)
    both = {
        seen.root(name) for name, partial in seen.partial.items() if partial & seen.whole
    }  # no sum would be right for them
    spoiled = {seen.root(name) for name in seen.spoiled} | both | rejected
    columns: set[str] = set()
    rows: set[str] = set()
    groups: set[str] = set()
    ends_of = {
        root: [
            name for name, given in seen.inputs.items() if root in {seen.root(one) for one in given if one}
        ]
        for root in members
    }
    for root in sorted(
        members, key=lambda root: (len(ends_of[root]), -len(members[root]))
    ):  # a sum costs most: first where there are few
        names, ends = {*members[root]}, {*ends_of[root]}
        alike = all(
            {seen.root(one) if one is not None else None for one in seen.inputs[name]} == {root}
            for name in ends
        )
        free = not (names & rows or ends & columns or (names | ends) & seen.looked_at or names & ends)
        if root not in spoiled and ends and alike and free:
            columns |= names
            rows |= ends
            groups.add(root)
    return columns, rows, groups


def _check_divisible(seen: TraceResult, columns: set[str], tp: int, groups: set[str]) -> None:
    for name in (name for name in seen.calls if name in columns):
        hidden = linear_features(seen.model.get_submodule(name))[1]
        for size in sorted(seen.sizes[name] | {hidden}):
            if size % tp:
                what = f"{size} heads" if size != hidden else f"{size} features"
                fitting = [
                    str(n) for n in range(2, size + 1) if not any(s % n for s in seen.sizes[name] | {hidden})
                ]
                hint = f"use tp={' or '.join(fitting[:3])}" if fitting else "use pp or zero3 in place of tp"
                raise PlanError(f"tp={tp} does not divide the {what} of {name}; {hint}")


def _find_difference(
    model: nn.Module,
    run: Callable[[], Any],
    seen: TraceResult,
    columns: set[str],
    rows: set[str],
    groups: set[str],
    tp: int,
) -> str | None:
    """Make the pass as one rank would; the group where it does something else than the whole pass, if there is one."""
    part = LabelTracer(TraceResult(model))

    def wrap(name: str, module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with part.apart():
                if name in rows:
                    taken, out = linear_features(module)
                    if x.shape[-1] * tp != taken:
                        raise RuntimeError(f"{name} was given {x.shape[-1]} features")
                    return x.new_empty(*x.shape[:-1], out)
                y = inner(x, *args, **kwargs)
                return y.narrow(-1, 0, y.shape[-1] // tp).clone() if name in columns else y

        return forward

    with replaced_forwards(model, wrap):
        at = find_first_difference(
            run, part, seen.tape, lambda label: tp if seen.root(label[0]) in groups else 1
        )
    if at is None:
        return None
    before = [seen.root(one.label[0]) for one in seen.tape[: at + 1] if one.label is not None]
    return next((root for root in reversed(before) if root in groups), next(iter(groups)))
