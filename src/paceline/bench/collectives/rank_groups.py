"""Groups of ranks along the axes of a mesh: those of a plan, or inside of the nodes and across them."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from paceline.errors import BenchError
from paceline.plan.plan import ResolvedPlan, parse
from paceline.spec import nearest

WORLD = "world"
OF_NODES = ("node", "across")
OF_PLANS = ("pp", "replicate", "shard", "cp", "tp")


@dataclass(frozen=True)
class Axis:
    """All groups are measured at the same time, as in a training; each rank is in one of them."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    spans: str  # node: each group lies on one; across: one rank of a group on each; both

    @property
    def ranks(self) -> int:
        return len(self.groups[0])


def axes(names: Sequence[str], plan: str | None, hosts: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """The axes with these names, without names those of the plan, or all ranks; and why some are left out. `hosts`: of each rank."""
    found, notes = [], []
    for name in names or (OF_PLANS if plan is not None else (WORLD,)):
        groups = _grouped(len(hosts), _key(name, plan, hosts))
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            notes.append(f"axis {name} is left out: its groups have {min(sizes)} to {max(sizes)} ranks")
        elif sizes == {1}:
            if names:
                notes.append(f"axis {name} is left out: it has one rank in each group, {_nodes(hosts)}")
        else:
            found.append(Axis(name, groups, _spans(groups, hosts)))
    if not found:
        raise BenchError(
            f"nothing to measure among {len(hosts)} ranks: "
            + ("; ".join(notes) or "no axis of the plan has two")
        )
    return found, notes


def check(names: Sequence[str], plan: str | None, ranks: int) -> None:
    """What can be known before ranks are there. Raises BenchError or PlanError."""
    known = (WORLD, *OF_NODES, *(OF_PLANS if plan is not None else ()))
    for name in names:
        if name in OF_PLANS and plan is None:
            raise BenchError(f"axis {name} is one of a plan's mesh: say which with --plan")
        if name not in known:
            raise BenchError(f"unknown axis {name}{nearest(name, known)}")
    if plan is not None:
        parse(plan).resolve(ranks)
    if ranks < 2:
        raise BenchError("one rank has nobody to talk to: use --ranks 2 or more")


def _key(name: str, plan: str | None, hosts: Sequence[str]) -> Callable[[int], Hashable]:
    """What the ranks of a group have in common."""
    if name == WORLD:
        return lambda rank: 0
    if name == "node":
        return lambda rank: hosts[rank]
    if name == "across":
        return lambda rank: [*hosts[:rank]].count(hosts[rank])
    assert plan is not None
    laid_out = parse(plan).resolve(len(hosts))
    return lambda rank: tuple(
        at for axis, at in _coordinates(laid_out, rank, name == "cp").items() if axis != name
    )


def _coordinates(plan: ResolvedPlan, rank: int, context: bool) -> dict[str, int]:
    """On the axes of the mesh, by the names that paceline comms has for them; the ranks of cp are data ranks to everything else."""
    place = plan.place(rank)
    if context:
        return {"pp": place.pp, "dp": place.dp, "cp": place.cp, "tp": place.tp}
    shards = plan.dp * plan.cp // plan.replicate if plan.zero >= 2 else 1
    replicate, shard = divmod(place.dp * plan.cp + place.cp, shards)
    return {"pp": place.pp, "replicate": replicate, "shard": shard, "tp": place.tp}


def _grouped(ranks: int, key: Callable[[int], Hashable]) -> tuple[tuple[int, ...], ...]:
    groups: dict[Hashable, list[int]] = {}
    for rank in range(ranks):
        groups.setdefault(key(rank), []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def _spans(groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    on_a_node = {max(Counter(hosts[rank] for rank in group).values()) for group in groups}
    nodes = {len({hosts[rank] for rank in group}) for group in groups}
    return "node" if nodes == {1} else "across" if on_a_node == {1} else "both"


def _nodes(hosts: Sequence[str]) -> str:
    count = len({*hosts})
    return f"and all ranks are on {next(iter(hosts))}" if count == 1 else f"and there are {count} nodes"
