"""The collectives of a trace: their process groups, and their numbers, which all ranks of a group share."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from paceline.training.tracing.profiled_ops import ProfiledOp

NAME = re.compile("(gloo|nccl|mpi|ucc):")
# In which no rank ends before each has begun.
WAITS_FOR_ALL = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier")
CLEAR = 2.0  # how many times longer a thread of another group would have waited for its collectives
RACE_NS = 200_000  # within which two threads may begin in the wrong order

Entry = Mapping[str, Any]  # of torch's flight recorder


class TracedCollective(NamedTuple):
    """A collective of a rank. What cannot be decided has no group.

    group: name of its process group, the same on all ranks of the group. ranks: of the group.
    number: of the collective in its group. shapes: of its inputs.
    """

    op: ProfiledOp
    group: str = ""
    ranks: tuple[int, ...] = ()
    number: int = 0
    shapes: str = ""

    @property
    def waits_for_all(self) -> bool:
        """Whether no rank of the group ends before each has begun."""
        return len(self.ranks) > 1 and WAITS_FOR_ALL.search(self.op.name) is not None


def find_collectives(
    ops: Sequence[ProfiledOp], recorded: Sequence[Entry], groups: Mapping[str, Sequence[int]]
) -> list[TracedCollective]:
    """Return the collectives of a profile with their groups, in order of time.

    ops: in order of time. recorded: entries of the flight recorder. groups: ranks by name of a group.

    The threads of gloo run the collectives of one group each, in order. Messages between two ranks are not
    recorded.
    """
    began_ns = min((op.begin_ns for op in ops), default=0)
    requested: dict[str, list[Entry]] = defaultdict(list)  # by name of the collective
    for entry in recorded:
        if entry["time_created_ns"] >= began_ns and not entry["is_p2p"]:
            requested[entry["profiling_name"]].append(entry)
    calls = [op for op in ops if op.is_async and NAME.match(op.name)]
    threads = {thread: _find_group(calls, requested, thread) for thread in {op.thread for op in calls}}
    found = {id(op): TracedCollective(op) for op in calls}
    for name, entries in requested.items():
        for group in {_group_of(entry) for entry in entries}:
            own = [op for op in calls if op.name == name and threads[op.thread] == group]
            of_group = [entry for entry in entries if _group_of(entry) == group]
            for op, entry in _match(own, of_group):
                shapes = " ".join(map(str, entry.get("input_sizes", [])))
                number = entry["collective_seq_id"]
                found[id(op)] = TracedCollective(op, group, tuple(groups.get(group, ())), number, shapes)
    return [found[id(op)] for op in calls]


class KnownNumbers(NamedTuple):
    """The numbers of the collectives of a group that a rank knows: those from `first` to `last`."""

    first: int
    last: int
    missing: frozenset[int]

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.first <= number <= self.last and number not in self.missing


def find_known_numbers(collectives: Sequence[TracedCollective]) -> dict[str, KnownNumbers]:
    """Return the numbers of `collectives` by group."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for collective in collectives:
        if collective.ranks:
            numbers[collective.group].add(collective.number)
    return {
        group: KnownNumbers(min(own), max(own), frozenset(range(min(own), max(own))) - own)
        for group, own in numbers.items()
    }


def _group_of(entry: Entry) -> str:
    name: str = entry["process_group"][0]
    return name


def _find_group(
    calls: Sequence[ProfiledOp], requested: Mapping[str, Sequence[Entry]], thread: int
) -> str | None:
    """Return the group whose collectives a thread runs: its requests came shortly before they began.

    Requests from before the profile are unknown.
    """
    own = [op for op in calls if op.thread == thread]
    waits: list[tuple[int, int, str]] = []  # number of unknown requests, sum of waiting times in ns, group
    for group in {_group_of(entry) for entries in requested.values() for entry in entries}:
        unknown = total_ns = 0
        for op in own:
            times = [
                entry["time_created_ns"] for entry in requested.get(op.name, ()) if _group_of(entry) == group
            ]
            before = bisect_right(times, op.begin_ns)
            if before:
                total_ns += op.begin_ns - times[before - 1]
            else:
                unknown += 1
        if unknown < len(own):
            waits.append((unknown, total_ns, group))
    if not waits:
        return None
    waits.sort()
    unknown, total_ns, group = waits[0]
    is_clear = len(waits) == 1 or waits[1][0] > unknown or waits[1][1] >= CLEAR * total_ns
    return group if is_clear else None


def _match(ops: Sequence[ProfiledOp], entries: Sequence[Entry]) -> list[tuple[ProfiledOp, Entry]]:
    """Return the entry of each operation; none if they cannot belong together.

    The flight recorder may have forgotten the first ones. Two threads that begin at nearly the same time may
    have begun in the other order, if both collectives were already requested.
    """
    if not ops or len(entries) < len(ops):
        ops = ops[len(ops) - len(entries) :]
    if len(entries) != len(ops):
        return []
    pairs = list(zip(ops, entries, strict=True))
    if any(entry["time_created_ns"] > op.begin_ns for op, entry in pairs):
        return []
    uncertain = {
        at
        for first, ((op, _), (after, entry)) in enumerate(pairwise(pairs))
        if op.thread != after.thread
        and after.begin_ns - op.begin_ns < RACE_NS
        and entry["time_created_ns"] <= op.begin_ns
        for at in (first, first + 1)
    }
    return [pair for at, pair in enumerate(pairs) if at not in uncertain]
