"""Which ranks hold corrupted weights, and since which step: a pure function of the digests of all ranks."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from paceline.units import numbered


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What a rank recorded since the last comparison. Equal digests mean equal bits."""

    copy: Hashable  # equal for ranks that hold the same weights
    weights: int  # digest of the present weights
    optimizer: int = 0  # digest of the present optimizer state; 0: not compared
    buffers: int = 0  # digest of the buffers and averages of which all replicas must have the same
    # The first step before whose update the weights were not as the previous update left them; 0: none.
    changed_in: int = 0
    # Digests of each step since the last comparison, if the guard locates faults.
    gradients: tuple[int, ...] = ()
    updated: tuple[int, ...] = ()  # of the weights after the step


@dataclass(frozen=True)
class Corruption:
    """A fault of one rank, or of one of several ranks that cannot be told apart."""

    ranks: tuple[int, ...]
    step: int | None  # in which it happened, if it is known
    what: str  # as a clause

    @property
    def is_certain(self) -> bool:
        """Whether the rank is known."""
        return len(self.ranks) == 1


def find_common_change(records: Sequence[RankRecord]) -> int | None:
    """Return the step before whose update the weights of all ranks changed; None if there is none.

    Memory does not fail on all ranks at once, so the task itself changes them.
    """
    steps = {record.changed_in for record in records}
    return steps.pop() or None if len(records) > 1 and len(steps) == 1 else None


def find_corruption(records: Sequence[RankRecord], first_step: int) -> list[Corruption]:
    """Return the faults that the records of all ranks show, by their first rank.

    first_step: the first step after the last comparison. Of replicas, the majority is right. If there is
    none, all are named, unless one of them noticed itself that its weights changed.
    """
    found = [
        Corruption(
            (rank,),
            record.changed_in,
            f"the weights of rank {rank} changed outside of an update, before the update of step "
            f"{record.changed_in}",
        )
        for rank, record in enumerate(records)
        if record.changed_in
    ]
    known = {rank for corruption in found for rank in corruption.ranks}
    copies: dict[Hashable, list[int]] = {}
    for rank, record in enumerate(records):
        copies.setdefault(record.copy, []).append(rank)
    for ranks in copies.values():
        if known.isdisjoint(ranks) and (corruption := _compare(records, ranks, first_step)) is not None:
            found.append(corruption)
    return sorted(found, key=lambda corruption: corruption.ranks)


def _compare(records: Sequence[RankRecord], ranks: Sequence[int], first_step: int) -> Corruption | None:
    """Return the fault of replicas whose digests differ, or None."""
    steps = min(len(records[rank].updated) for rank in ranks)
    for at in range(steps):
        step = first_step + at
        for name, values in (
            ("gradients", [records[rank].gradients[at] for rank in ranks]),
            ("weights", [records[rank].updated[at] for rank in ranks]),
        ):
            if len(set(values)) > 1:
                return _name(ranks, values, step, name)
    for name, values in (
        ("weights", [records[rank].weights for rank in ranks]),
        ("optimizer state", [records[rank].optimizer for rank in ranks]),
        ("buffers or averages", [records[rank].buffers for rank in ranks]),
    ):
        if len(set(values)) > 1:
            return _name(ranks, values, None, name)
    return None


def _name(ranks: Sequence[int], values: Sequence[int], step: int | None, name: str) -> Corruption:
    value, count = Counter(values).most_common(1)[0]
    since = f" since step {step}" if step is not None else ""
    if 2 * count <= len(ranks):
        named = numbered("rank", list(ranks))
        what = f"{named} hold different {name}{since}, and none is in the majority"
        return Corruption(tuple(ranks), step, what)
    wrong = [rank for rank, other in zip(ranks, values, strict=True) if other != value]
    right = [rank for rank in ranks if rank not in wrong]
    holds = "holds" if len(wrong) == 1 else "hold"
    what = f"{numbered('rank', wrong)} {holds} other {name} than {numbered('rank', right)}{since}"
    return Corruption(tuple(wrong), step, what)
