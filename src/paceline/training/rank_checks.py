"""The ranks meet before the first step: the same software and data, clocks that agree, no link between nodes that holds all up."""

import platform
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.distributed.world import World
from paceline.errors import DataError, LaunchError
from paceline.task import Task
from paceline.units import several
from paceline.version import __version__

CLOCKS_S = 1.0  # that two clocks may be apart
MESSAGE_BYTES = 2**22
TIMES = 3  # a message is sent, the quickest counts: whatever else goes on makes it slower
SLOW = 3.0  # times what the quicker links take
ROUNDS = 3  # in which each node exchanges messages with both of its neighbours on a ring, an odd one included


class NeighbourLink(NamedTuple):
    """Two neighbours, and the seconds in which each sends the other a message."""

    nodes: tuple[str, str]
    seconds: float


def roll_call(task: Task, world: World, samples: Mapping[str, int]) -> tuple[str, ...]:
    """What the user should know of how the ranks are together. A collective; on one rank there is nothing to know.

    samples: of each split. Raises LaunchError where ranks run other software, DataError where they see other data.
    """
    if world.size == 1:
        return ()
    mine = {
        "host": platform.node(),
        "threads": torch.get_num_threads(),
        "samples": dict(samples),
        "software": _software(task),
    }
    everyone = _told(mine, world.size)
    hosts = [one["host"] for one in everyone]
    check_software([one["software"] for one in everyone], hosts)
    check_samples([one["samples"] for one in everyone])
    found = _told((_moment(world.size), _exchange(world.rank, first_of_each(hosts))), world.size)
    moments, taken_s = zip(*found, strict=True)
    return (
        *uneven([one["threads"] for one in everyone], hosts),
        *apart(moments, hosts),
        *slow(_links(taken_s, hosts)),
    )


def _told(mine: Any, ranks: int) -> list[Any]:
    """By rank, what each says. As objects, for which torch finds a back end also in a process group that others have made."""
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, mine)
    return found


def _software(task: Task) -> dict[str, str]:
    """What must be the same everywhere, by its name."""
    file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    source = (
        f"{Path(file).name} with CRC {zlib.crc32(Path(file).read_bytes()):08x}"
        if file is not None
        else "none"
    )
    return {"torch": str(torch.__version__), "paceline": __version__, SOURCE: source}


SOURCE = "the file of the task"


def check_software(found: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """By rank, what `_software` says. Raises LaunchError."""
    for rank, there in enumerate(found):
        for name, first in found[0].items():
            if there[name] != first:
                hint = (
                    "all nodes must see the same file"
                    if name == SOURCE
                    else "use one installation for all nodes"
                )
                raise LaunchError(
                    f"{name} is {first} on rank 0 ({hosts[0]}) and {there[name]} on rank {rank} ({hosts[rank]}); {hint}"
                )


def check_samples(found: Sequence[Mapping[str, int]]) -> None:
    """By rank, the samples of each split. Raises DataError."""
    for rank, there in enumerate(found):
        for split, first in found[0].items():
            if there[split] != first:
                raise DataError(
                    f"dataset({split!r}) has {first} samples on rank 0 and {there[split]} on rank {rank}; "
                    "every rank must see the whole dataset, Paceline splits it"
                )


def uneven(threads: Sequence[int], hosts: Sequence[str]) -> Iterator[str]:
    """By rank."""
    few = min(threads)
    if few < max(threads):
        rank = threads.index(few)
        yield (
            f"rank {rank} ({hosts[rank]}) computes on {several(few, 'thread')}, others on up to {max(threads)}, and wait for it; "
            "give all ranks as many cores, or say threads="
        )


def _moment(ranks: int) -> tuple[float, float]:
    """When this rank came to a meeting and when it left, by its own clock. There is a moment at which all of them were there."""
    came = time.time()
    _told(None, ranks)
    return came, time.time()


def apart(moments: Sequence[tuple[float, float]], hosts: Sequence[str]) -> Iterator[str]:
    """`moments`: by rank, of `_moment`. Clocks are known to differ as far as the times at which ranks were there do not overlap, so
    that neither a slow network nor a late rank looks like a wrong clock."""
    middles = [(came + left) / 2 for came, left in moments]
    usual = sorted(range(len(middles)), key=middles.__getitem__)[(len(middles) - 1) // 2]
    said = set()
    for rank, (came, left) in enumerate(moments):
        surely_s = max(came - moments[usual][1], moments[usual][0] - left)
        if surely_s > CLOCKS_S and hosts[rank] not in said:
            said.add(hosts[rank])
            off_s = middles[rank] - middles[usual]
            yield (
                f"the clock of {hosts[rank]} (rank {rank}) is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} that of "
                f"{hosts[usual]} (rank {usual}): times of the two do not compare; is NTP at work there?"
            )


def first_of_each(hosts: Sequence[str]) -> dict[str, int]:
    """The first rank of each host, in the order of the ranks."""
    return {host: list(hosts).index(host) for host in dict.fromkeys(hosts)}


def ring(nodes: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    """Neighbours on a ring, each with the round in which they meet: nobody meets two at once. Of two nodes nothing can be compared."""
    if len(nodes) < 3:
        return []
    pairs = [*pairwise(nodes), (nodes[-1], nodes[0])]
    last_is_odd = len(nodes) % 2
    return [(2 if last_is_odd and at == len(nodes) - 1 else at % 2, pair) for at, pair in enumerate(pairs)]


def _exchange(rank: int, firsts: Mapping[str, int]) -> list[float]:
    """Seconds of a message in each round, over the network of gloo; 0 where this rank has no part. `firsts`: the ranks that exchange."""
    found = [0.0] * ROUNDS
    if "cpu:" not in dist.get_backend_config():  # somebody else's process group, without gloo
        return found
    for at, (one, other) in sorted(ring(list(firsts))):
        if rank in (firsts[one], firsts[other]):
            found[at] = _seconds(firsts[other] if rank == firsts[one] else firsts[one])
    return found


def _seconds(peer: int) -> float:
    """The first message may wait for the other side to come, the others do not."""
    out, back = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        sending = dist.isend(out, peer)
        dist.recv(back, peer)
        assert sending is not None
        sending.wait()
        found.append(time.perf_counter() - began)
    return min(found)


def _links(taken_s: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[NeighbourLink]:
    """`taken_s`: by rank, of `_exchange`."""
    firsts = first_of_each(hosts)
    return [
        NeighbourLink(pair, max(taken_s[firsts[node]][at] for node in pair))
        for at, pair in ring(list(firsts))
    ]


def slow(links: Iterable[NeighbourLink]) -> Iterator[str]:
    """A node of which all links are slow, and each other slow link. Slow is what takes several times as long as the quicker quarter: of
    three nodes one slow card makes two of three links slow."""
    links = [link for link in links if link.seconds]
    if not links:
        return
    usual_s = sorted(link.seconds for link in links)[(len(links) - 1) // 4]
    slow_ones = [link for link in links if link.seconds > SLOW * usual_s]
    others = f"others {_rate(usual_s)}: all wait for the slowest"
    nodes = [
        node
        for node in dict.fromkeys(node for link in slow_ones for node in link.nodes)
        if _all_of(node, links) <= {*slow_ones}
    ]
    for node in nodes:
        best_s = min(link.seconds for link in _all_of(node, links))
        yield f"{node} exchanges {_rate(best_s)} with its neighbours, {others}; have its network seen to, or leave it out: --exclude={node}"
    for link in slow_ones:
        if not {*link.nodes} & {*nodes}:
            yield f"{' and '.join(link.nodes)} exchange {_rate(link.seconds)}, {others}; have the way between them looked at"


def _all_of(node: str, links: Iterable[NeighbourLink]) -> set[NeighbourLink]:
    return {link for link in links if node in link.nodes}


def _rate(seconds: float) -> str:
    return f"{MESSAGE_BYTES / seconds / 1e6:,.0f} MB/s"
