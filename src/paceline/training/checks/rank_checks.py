"""Checks across ranks before the first step: software, data, threads, clocks, links between nodes."""

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

CLOCKS_S = 1.0  # by which two clocks may differ
MESSAGE_BYTES = 2**22
REPEATS = 3  # of a message; the quickest counts, since other traffic only makes it slower
SLOW = 3.0  # times what the quicker links take
ROUNDS = (
    3  # in which each node exchanges messages with both neighbours on a ring; an odd number of nodes needs 3
)
TASK_FILE = "the file of the task"


class NeighbourLink(NamedTuple):
    """Two neighbours on the ring of nodes, and the seconds in which they exchange a message."""

    nodes: tuple[str, str]
    seconds: float


def check_ranks(task: Task, world: World, samples: Mapping[str, int]) -> tuple[str, ...]:
    """Return notes on differences between ranks that slow the training down. A collective.

    samples: of each split. Raises LaunchError if ranks run different software, and DataError if they see
    different data.
    """
    if world.size == 1:
        return ()
    facts = {
        "host": platform.node(),
        "threads": torch.get_num_threads(),
        "samples": dict(samples),
        "software": _read_software(task),
    }
    by_rank = _all_gather(facts, world.size)
    hosts = [facts["host"] for facts in by_rank]
    check_software([facts["software"] for facts in by_rank], hosts)
    check_samples([facts["samples"] for facts in by_rank])
    times = _all_gather(
        (_measure_meeting(world.size), _measure_links(world.rank, first_rank_by_host(hosts))), world.size
    )
    meetings, link_times = zip(*times, strict=True)
    return (
        *find_uneven_threads([facts["threads"] for facts in by_rank], hosts),
        *find_wrong_clocks(meetings, hosts),
        *find_slow_links(_merge_links(link_times, hosts)),
    )


def _all_gather(value: Any, ranks: int) -> list[Any]:
    """Return the values of all ranks.

    Values travel as objects, since torch finds a back end for objects also in a process group that the
    caller of `train` has created.
    """
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value)
    return values


def _read_software(task: Task) -> dict[str, str]:
    """Return by name what must be the same on all ranks."""
    file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    source = (
        f"{Path(file).name} with CRC {zlib.crc32(Path(file).read_bytes()):08x}"
        if file is not None
        else "none"
    )
    return {"torch": str(torch.__version__), "paceline": __version__, TASK_FILE: source}


def check_software(by_rank: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Raise LaunchError if the software of a rank differs from that of rank 0. `hosts`: by rank."""
    for rank, software in enumerate(by_rank):
        for name, first in by_rank[0].items():
            if software[name] != first:
                hint = (
                    "all nodes must see the same file"
                    if name == TASK_FILE
                    else "use one installation for all nodes"
                )
                raise LaunchError(
                    f"{name} is {first} on rank 0 ({hosts[0]}) and {software[name]} on rank {rank} "
                    f"({hosts[rank]}); {hint}"
                )


def check_samples(by_rank: Sequence[Mapping[str, int]]) -> None:
    """Raise DataError if a rank sees another number of samples of a split than rank 0."""
    for rank, samples in enumerate(by_rank):
        for split, first in by_rank[0].items():
            if samples[split] != first:
                raise DataError(
                    f"dataset({split!r}) has {first} samples on rank 0 and {samples[split]} on rank {rank}; "
                    "every rank must see the whole dataset, Paceline splits it"
                )


def find_uneven_threads(threads: Sequence[int], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a note if a rank has fewer threads than others. `threads`, `hosts`: by rank."""
    fewest = min(threads)
    if fewest < max(threads):
        rank = threads.index(fewest)
        yield (
            f"rank {rank} ({hosts[rank]}) computes on {several(fewest, 'thread')}, others on up to "
            f"{max(threads)}, and wait for it; give all ranks the same number of cores, or set threads="
        )


def _measure_meeting(ranks: int) -> tuple[float, float]:
    """Return when this rank came to a meeting of all ranks and when it left, by its clock.

    At some moment in between, all ranks were there.
    """
    came = time.time()
    _all_gather(None, ranks)
    return came, time.time()


def find_wrong_clocks(meetings: Sequence[tuple[float, float]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a note for each host whose clock differs from the median clock.

    meetings: by rank, of `_measure_meeting`.

    Clocks certainly differ as far as the intervals of two ranks at the meeting do not overlap. So neither a
    slow network nor a late rank looks like a wrong clock.
    """
    middles = [(came + left) / 2 for came, left in meetings]
    median = sorted(range(len(middles)), key=middles.__getitem__)[(len(middles) - 1) // 2]
    reported = set()
    for rank, (came, left) in enumerate(meetings):
        difference_s = max(came - meetings[median][1], meetings[median][0] - left)
        if difference_s > CLOCKS_S and hosts[rank] not in reported:
            reported.add(hosts[rank])
            offset_s = middles[rank] - middles[median]
            yield (
                f"the clock of {hosts[rank]} (rank {rank}) is {abs(offset_s):.1f} s "
                f"{'ahead of' if offset_s > 0 else 'behind'} that of {hosts[median]} (rank {median}), so "
                "their times cannot be compared; check that NTP runs there"
            )


def first_rank_by_host(hosts: Sequence[str]) -> dict[str, int]:
    """Return the first rank of each host, in the order of the ranks."""
    return {host: list(hosts).index(host) for host in dict.fromkeys(hosts)}


def pair_neighbours(nodes: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    """Return the pairs of neighbours on a ring of nodes, each with the round of its exchange of messages.

    No node has two partners in a round. Fewer than three nodes have no pairs: there is nothing to compare.
    """
    if len(nodes) < 3:
        return []
    pairs = [*pairwise(nodes), (nodes[-1], nodes[0])]
    last_is_odd = len(nodes) % 2
    return [
        (2 if last_is_odd and index == len(nodes) - 1 else index % 2, pair)
        for index, pair in enumerate(pairs)
    ]


def _measure_links(rank: int, first_ranks: Mapping[str, int]) -> list[float]:
    """Return the seconds of a message in each round, over gloo; 0 if this rank has no partner in it.

    first_ranks: by node, the rank that exchanges messages.
    """
    seconds = [0.0] * ROUNDS
    if "cpu:" not in dist.get_backend_config():  # a process group of the caller of `train`, without gloo
        return seconds
    for round_, (node, neighbour) in sorted(pair_neighbours(list(first_ranks))):
        if rank in (first_ranks[node], first_ranks[neighbour]):
            peer = first_ranks[neighbour] if rank == first_ranks[node] else first_ranks[node]
            seconds[round_] = _measure_exchange(peer)
    return seconds


def _measure_exchange(peer: int) -> float:
    """Return the seconds in which this rank and `peer` send each other a message.

    The first message may wait for the peer to come, the others do not.
    """
    sent, received = (
        torch.zeros(MESSAGE_BYTES, dtype=torch.uint8),
        torch.empty(MESSAGE_BYTES, dtype=torch.uint8),
    )
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        sending = dist.isend(sent, peer)
        dist.recv(received, peer)
        assert sending is not None
        sending.wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _merge_links(link_times: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[NeighbourLink]:
    """Return each link with the longer of the times that its two ends measured.

    link_times: by rank, of `_measure_links`.
    """
    first_ranks = first_rank_by_host(hosts)
    return [
        NeighbourLink(pair, max(link_times[first_ranks[node]][round_] for node in pair))
        for round_, pair in pair_neighbours(list(first_ranks))
    ]


def find_slow_links(links: Iterable[NeighbourLink]) -> Iterator[str]:
    """Yield a note for each node all of whose links are slow, and for each other slow link.

    A slow link takes several times as long as the quicker quarter. (Not as the median: of three nodes, one
    slow network card makes two of three links slow.)
    """
    links = [link for link in links if link.seconds]
    if not links:
        return
    usual_s = sorted(link.seconds for link in links)[(len(links) - 1) // 4]
    slow_links = [link for link in links if link.seconds > SLOW * usual_s]
    others = f"others {_format_rate(usual_s)}: all wait for the slowest"
    nodes = [
        node
        for node in dict.fromkeys(node for link in slow_links for node in link.nodes)
        if _links_of(node, links) <= {*slow_links}
    ]
    for node in nodes:
        best_s = min(link.seconds for link in _links_of(node, links))
        yield (
            f"{node} exchanges {_format_rate(best_s)} with its neighbours, {others}; check its network, or "
            f"leave it out: --exclude={node}"
        )
    for link in slow_links:
        if not {*link.nodes} & {*nodes}:
            yield (
                f"{' and '.join(link.nodes)} exchange {_format_rate(link.seconds)}, {others}; check the "
                "connection between them"
            )


def _links_of(node: str, links: Iterable[NeighbourLink]) -> set[NeighbourLink]:
    return {link for link in links if node in link.nodes}


def _format_rate(seconds: float) -> str:
    return f"{MESSAGE_BYTES / seconds / 1e6:,.0f} MB/s"
