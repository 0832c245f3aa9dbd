"""Groups of ranks along an axis: an axis of a plan's mesh, or within nodes and across nodes."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from paceline.errors import BenchError
from paceline.plan.plan import ResolvedPlan, parse
from paceline.spec import suggest

WORLD = "world"
NODE_AXES = ("node", "across")
PLAN_AXES = ("pp", "replicate", "shard", "cp", "tp")


@dataclass(frozen=True)
class Axis:
    """The groups of ranks along one axis.

    Each rank is in one group. All groups are measured at the same time, as in a training.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    spans: str  # node: each group is on one node; across: each rank of a group is on another node; both

    @property
    def ranks(self) -> int:
        return len(self.groups[0])


def find_axes(names: Sequence[str], plan: str | None, hosts: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """Return the axes with these names, and notes on axes that are left out.

    names: if empty, the axes of the plan; without a plan, all ranks.
    hosts: the host of each rank.

    Raises BenchError if no axis is left.
    """
    axes, notes = [], []
    for name in names or (PLAN_AXES if plan is not None else (WORLD,)):
        groups = _group_ranks(len(hosts), _group_key(name, plan, hosts))
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            notes.append(f"axis {name} is left out: its groups have {min(sizes)} to {max(sizes)} ranks")
        elif sizes == {1}:
            if names:
                notes.append(f"axis {name} is left out: one rank per group, because {_describe_nodes(hosts)}")
        else:
            axes.append(Axis(name, groups, _spans(groups, hosts)))
    if not axes:
        reason = "; ".join(notes) or "no axis of the plan has two ranks"
        raise BenchError(f"nothing to measure on {len(hosts)} ranks: {reason}")
    return axes, notes


def check_axes(names: Sequence[str], plan: str | None, ranks: int) -> None:
    """Check axes and plan before ranks are started. Raises BenchError or PlanError."""
    known = (WORLD, *NODE_AXES, *(PLAN_AXES if plan is not None else ()))
    for name in names:
        if name in PLAN_AXES and plan is None:
            raise BenchError(f"axis {name} requires a plan; add --plan, e.g. --plan tp=2")
        if name not in known:
            raise BenchError(f"unknown axis {name}{suggest(name, known)}")
    if plan is not None:
        parse(plan).resolve(ranks)
    if ranks < 2:
        raise BenchError(f"collectives require at least 2 ranks, got {ranks}; use --ranks 2 or more")


def _group_key(name: str, plan: str | None, hosts: Sequence[str]) -> Callable[[int], Hashable]:
    """Return a function from a rank to the key that all ranks of its group share."""
    if name == WORLD:
        return lambda rank: 0
    if name == "node":
        return lambda rank: hosts[rank]
    if name == "across":
        return lambda rank: [*hosts[:rank]].count(hosts[rank])
    assert plan is not None
    resolved = parse(plan).resolve(len(hosts))
    return lambda rank: tuple(
        position for axis, position in _coordinates(resolved, rank, name == "cp").items() if axis != name
    )


def _coordinates(plan: ResolvedPlan, rank: int, context: bool) -> dict[str, int]:
    """Return the position of a rank on each axis of the mesh, by the axis names of `paceline comms`.

    context: keep cp as an axis. Otherwise its ranks are data-parallel ranks, as for all axes but cp.
    """
    coordinate = plan.place(rank)
    if context:
        return {"pp": coordinate.pp, "dp": coordinate.dp, "cp": coordinate.cp, "tp": coordinate.tp}
    shards = plan.dp * plan.cp // plan.replicate if plan.zero >= 2 else 1
    replicate, shard = divmod(coordinate.dp * plan.cp + coordinate.cp, shards)
    return {"pp": coordinate.pp, "replicate": replicate, "shard": shard, "tp": coordinate.tp}


def _group_ranks(ranks: int, key: Callable[[int], Hashable]) -> tuple[tuple[int, ...], ...]:
    groups: dict[Hashable, list[int]] = {}
    for rank in range(ranks):
        groups.setdefault(key(rank), []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def _spans(groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    ranks_on_a_node = {max(Counter(hosts[rank] for rank in group).values()) for group in groups}
    nodes = {len({hosts[rank] for rank in group}) for group in groups}
    return "node" if nodes == {1} else "across" if ranks_on_a_node == {1} else "both"


def _describe_nodes(hosts: Sequence[str]) -> str:
    count = len({*hosts})
    return f"all ranks are on {next(iter(hosts))}" if count == 1 else f"there are {count} nodes"
