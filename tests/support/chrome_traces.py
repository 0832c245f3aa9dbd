"""A reader of traces in the Trace Event Format, which checks what viewers require.

It follows the public description of the format, and shares no code with the writer.
"""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Slice:
    """A range of time on a track, in ns, with the slices inside it."""

    name: str
    kind: str
    rank: int
    track: int
    begin: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)
    inside: list["Slice"] = field(default_factory=list, compare=False, repr=False)

    def find(self, kind: str) -> list["Slice"]:
        """Return the slices of a kind inside this one, at any depth, in order of time."""
        return [
            found
            for child in self.inside
            for found in ([child] if child.kind == kind else []) + child.find(kind)
        ]


@dataclass(frozen=True)
class Flow:
    """An arrow from a slice to another one, and the times of its ends."""

    source: Slice
    target: Slice
    begin: int
    end: int


@dataclass(frozen=True)
class ChromeTrace:
    """A trace: the outermost slices of each track by rank and track, the arrows, and the names of tracks."""

    tracks: dict[tuple[int, int], list[Slice]]
    flows: list[Flow]
    names: dict[tuple[int, int], str]
    facts: dict[str, Any]

    def find(self, kind: str, rank: int | None = None) -> list[Slice]:
        """Return all slices of a kind, in order of time on each track."""
        root = Slice("", "", 0, 0, 0, 0, {}, [top for tops in self.tracks.values() for top in tops])
        return [found for found in root.find(kind) if rank is None or found.rank == rank]


def read_trace(path: Path) -> ChromeTrace:
    return parse_trace(json.loads(gzip.decompress(path.read_bytes())))


def parse_trace(tree: dict[str, Any]) -> ChromeTrace:
    """Return the trace. Raises AssertionError if a viewer would show it wrongly."""
    slices: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    ends: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    names = {}
    for event in tree["traceEvents"]:
        where = event["pid"], event["tid"]
        match event["ph"]:
            case "X":
                begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
                assert length >= 0, f"{event} has a negative duration"
                slices[where].append(
                    Slice(event["name"], event["cat"], *where, begin, begin + length, event.get("args", {}))
                )
            case "s" | "f":
                assert event["ph"] == "s" or event["bp"] == "e", f"{event} would end at the next slice"
                ends[event["cat"], event["id"]][event["ph"]].append(event)
            case "M":
                if event["name"] == "thread_name":
                    names[where] = event["args"]["name"]
            case other:
                raise AssertionError(f"unexpected phase {other}")
    tracks = {where: nest(found) for where, found in slices.items()}
    assert tracks.keys() <= names.keys(), "a track has no name"
    return ChromeTrace(
        tracks, [read_flow(parts, slices) for parts in ends.values()], names, tree["otherData"]
    )


def nest(slices: list[Slice]) -> list[Slice]:
    """Return the outermost slices of a track. Slices that overlap and do not nest are an error."""
    tops: list[Slice] = []
    stack: list[Slice] = []
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        while stack and stack[-1].end <= one.begin:
            stack.pop()
        if stack:
            assert one.end <= stack[-1].end, f"{one} crosses the end of {stack[-1]}"
            stack[-1].inside.append(one)
        else:
            tops.append(one)
        stack.append(one)
    return tops


def read_flow(parts: dict[str, list[dict[str, Any]]], slices: dict[tuple[int, int], list[Slice]]) -> Flow:
    assert [len(parts["s"]), len(parts["f"])] == [1, 1], f"an arrow must have two ends, got {dict(parts)}"
    bound = []
    for event in (parts["s"][0], parts["f"][0]):
        at = round(event["ts"] * 1000)
        around = [one for one in slices[event["pid"], event["tid"]] if one.begin <= at < one.end]
        assert around, f"{event} is outside of all slices"
        bound.append((max(around, key=lambda one: one.begin), at))
    (source, begin), (target, end) = bound
    assert begin <= end, f"an arrow goes back in time by {begin - end} ns: {source} to {target}"
    return Flow(source, target, begin, end)
