"""CommVolume: what one training step sends, by collective, mesh axis and module."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.plan.plan import ResolvedPlan

MODEL = "(model)"  # what belongs to no submodule
PACELINE = "paceline"  # communication outside of the model: metrics, norms, weights of batches


@dataclass(frozen=True, order=True)
class Entry:
    """Calls of one collective by one rank in one step.

    axis: mesh axis or axes along which the ranks of the group differ. ranks: number of ranks of the group.
    module: whose parameters or gradients are sent; for anything else the module that runs.
    bytes: of all calls together, each with the size S that nccl-tests gives a call: all-reduce, broadcast,
    reduce, send and recv the tensor; all-gather the whole output; reduce-scatter and all-to-all the whole
    input; gather and scatter the whole tensor at the root.
    """

    collective: str
    axis: str
    ranks: int
    module: str
    calls: int
    bytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends in a ring, by `RING_FACTORS`."""
        return RING_FACTORS[self.collective](self.ranks) * self.bytes


# Bytes that each rank sends in a ring of n ranks, divided by the size S of the call (nccl-tests,
# PERFORMANCE.md).
RING_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: float(n > 1),
    "reduce": lambda n: float(n > 1),
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
    "barrier": lambda n: 0.0,
}


@dataclass(frozen=True)
class CommVolume:
    """What one rank sends in one step."""

    rank: int
    entries: tuple[Entry, ...]  # each (collective, axis, module) once, in order

    @property
    def calls(self) -> int:
        return sum(entry.calls for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    @property
    def sent_bytes(self) -> float:
        return sum(entry.sent_bytes for entry in self.entries)

    def of(self, collective: str, axis: str | None = None) -> "CommVolume":
        """Return the entries of a collective, on all axes or on one axis."""
        return CommVolume(
            self.rank, tuple(e for e in self.entries if e.collective == collective and axis in (None, e.axis))
        )

    def as_json(self) -> dict[str, Any]:
        entries = [asdict(entry) | {"sent_bytes": round(entry.sent_bytes)} for entry in self.entries]
        return {
            "rank": self.rank,
            "calls": self.calls,
            "bytes": self.bytes,
            "sent_bytes": round(self.sent_bytes),
            "entries": entries,
        }


def sum_entries(calls: Iterable[tuple[str, str, int, str, int, int]]) -> tuple[Entry, ...]:
    """Return entries from (collective, axis, ranks, module, calls, bytes); calls and bytes are added up."""
    sums: dict[tuple[str, str, int, str], tuple[int, int]] = {}
    for *key, count, size in calls:
        at = tuple(key)
        before = sums.get(at, (0, 0))  # type: ignore[arg-type]
        sums[at] = before[0] + count, before[1] + size  # type: ignore[index]
    return tuple(sorted(Entry(*key, *both) for key, both in sums.items()))


def block_pattern(module: str) -> str:
    """Return `blocks.*.mlp.*` for `blocks.11.mlp.0`, so that similar blocks have equal names."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def axis_of(plan: ResolvedPlan, group: Iterable[int]) -> str:
    """Return the mesh axis (`pp`, `replicate`, `shard`, `cp`, `tp`) along which the ranks of a group differ.

    `world`: all ranks of a plan with several axes; `a×b`: another group over several axes; `self`: one rank.
    """
    shards = plan.dp * plan.cp // plan.replicate if plan.zero >= 2 else 1
    seen: dict[str, set[int]] = {}
    members = list(group)
    for rank in members:
        place = plan.place(rank)
        replicate, shard = divmod(place.dp * plan.cp + place.cp, shards)
        at = {
            "pp": place.pp,
            "replicate": replicate,
            "shard": shard,
            "tp": place.tp,
            "dp": place.dp,
            "cp": place.cp,
        }
        for name, index in at.items():
            seen.setdefault(name, set()).add(index)
    varied = {name for name, indices in seen.items() if len(indices) > 1}
    if "cp" in varied and "dp" not in varied:
        varied -= {"replicate", "shard"}
    else:
        varied -= {"cp"}
    axes = [name for name in ("pp", "replicate", "shard", "cp", "tp") if name in varied]
    if len(axes) > 1 and len(members) == plan.dp * plan.cp * plan.tp * plan.pp:
        return "world"
    return "×".join(axes) or "self"
