"""Checks across ranks before the first step: software, clocks, GPUs, slow links."""

import contextlib
import os
import platform
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import models
import network
import paceline
from command import PACELINE, events_of_kind, write_task
from harness import ranks, train_on_this_rank
from paceline import Spec
from paceline.distributed.process_group import claim_gpu
from paceline.errors import LaunchError
from paceline.events import Started
from paceline.training.checks import rank_checks
from paceline.training.checks.rank_checks import (
    NeighbourLink,
    check_software,
    find_slow_links,
    find_uneven_threads,
    find_wrong_clocks,
    pair_neighbours,
)

pytestmark = pytest.mark.processes

SPEC = Spec(task="models:Points", steps=1, batch=6)
HOSTS = ("n1", "n1", "n2", "n2", "n3")


# On real ranks, the last of which differs


@contextlib.contextmanager
def skewed(by_s: float):
    """Let rank 1 be on another host, whose clock is wrong."""
    if os.environ["RANK"] != "1":
        yield
        return
    right = time.time
    with (
        patch.object(platform, "node", lambda: "elsewhere"),
        patch.object(rank_checks.time, "time", lambda: right() + by_s),
    ):
        yield


def three_seconds_off():
    return skewed(-3.0)


def nearly_right():
    return skewed(0.4)


@contextlib.contextmanager
def another_version():
    wrong = os.environ["RANK"] == "1"
    with patch.object(rank_checks, "__version__", "0.0.1" if wrong else paceline.__version__):
        yield


@contextlib.contextmanager
def another_file():
    wrong = os.environ["RANK"] == "1"
    with patch.object(models, "__file__", __file__ if wrong else models.__file__):
        yield


def notes_with(fault) -> list[tuple[str, ...]]:
    return [trained.notes for trained in ranks(2)(train_on_this_rank, models.Points(), SPEC, "ddp", fault)]


def test_a_wrong_clock_is_reported():
    host = platform.node()
    possible = (
        f"the clock of elsewhere (rank 1) is 3.0 s behind that of {host}",
        f"the clock of {host} (rank 0) is 3.0 s ahead of that of else",
    )
    for (note,) in notes_with(three_seconds_off):
        assert note.startswith(possible)
    assert notes_with(nearly_right) == [(), ()]
    assert notes_with(contextlib.nullcontext) == [(), ()]


def error_with(fault) -> str:
    with pytest.raises(LaunchError) as caught:
        train_on_this_rank(models.Points(), SPEC, "ddp", fault)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "part"),
    [(another_version, "and 0.0.1 on"), (another_file, "and test_rank_checks.py with CRC ")],
)
def test_different_software_is_refused_on_all_ranks(fault, part):
    first, second = ranks(2)(error_with, fault)
    assert first == second
    assert part in first
    assert f" on rank 1 ({platform.node()}); " in first


def claim_error(gpu: str) -> str | None:
    store = dist.distributed_c10d._get_default_store()
    try:
        claim_gpu(store, gpu, dist.get_rank())
    except LaunchError as error:
        return str(error)
    return None


def separate_gpu_error() -> str | None:
    return claim_error(f"GPU-{dist.get_rank()}")


def test_two_ranks_cannot_share_a_gpu():
    first, second = sorted(ranks(2)(claim_error, "GPU-5"), key=bool)
    assert first is None
    assert second is not None
    assert second.startswith("ranks ")
    assert "both have GPU GPU-5, but each rank requires a different GPU" in second
    assert ranks(2)(separate_gpu_error) == [None, None]


# On facts of five ranks


def test_software():
    same = {"torch": "2.13.0", "paceline": "0.1.0", rank_checks.TASK_FILE: "my.py with CRC 0000abcd"}
    check_software([same] * 5, HOSTS)
    with pytest.raises(
        LaunchError,
        match=r"^torch is 2\.13\.0 on rank 0 \(n1\) and 2\.12\.1 on rank 3 \(n2\); use one installation",
    ):
        check_software([same, same, same, same | {"torch": "2.12.1"}, same], HOSTS)
    with pytest.raises(
        LaunchError,
        match=r"^the file of the task is my\.py with CRC 0000abcd on rank 0 \(n1\) and .* on rank 4 \(n3\); "
        r"all",
    ):
        check_software(
            [same, same, same, same, same | {rank_checks.TASK_FILE: "my.py with CRC 0000ffff"}], HOSTS
        )


def test_threads():
    assert [*find_uneven_threads([2, 2, 2, 2, 2], HOSTS)] == []
    (note,) = find_uneven_threads([4, 4, 1, 1, 4], HOSTS)
    assert note.startswith("rank 2 (n2) computes on 1 thread, others on up to 4, and wait for it")


def test_a_late_rank_does_not_look_like_a_wrong_clock():
    """The other ranks wait for it, so that their intervals overlap."""
    late = [(0.0, 20.0), (0.0, 20.0), (19.9, 20.0), (19.9, 20.1), (5.0, 20.0)]
    assert [*find_wrong_clocks(late, HOSTS)] == []
    wrong = [(100.0, 100.1), (100.0, 100.1), (107.0, 107.1), (107.0, 107.1), (100.0, 100.1)]
    (note,) = find_wrong_clocks(wrong, HOSTS)
    assert note.startswith("the clock of n2 (rank 2) is 7.0 s ahead of that of n")


@pytest.mark.parametrize("count", range(1, 9))
def test_no_node_has_two_partners_in_a_round(count):
    pairs = pair_neighbours([f"n{at}" for at in range(count)])
    assert len(pairs) == (count if count > 2 else 0)
    for round_ in range(rank_checks.ROUNDS):
        busy = [node for at, pair in pairs if at == round_ for node in pair]
        assert len(busy) == len({*busy})
    assert all(
        sum(node in pair for _, pair in pairs) == 2 for node in {node for _, pair in pairs for node in pair}
    )


def make_links(count: int, **seconds: float) -> list[NeighbourLink]:
    """Return the links of a ring of nodes, of 0.01 s each unless `seconds` names them, such as n1_n2=0.05."""
    return [
        NeighbourLink(pair, seconds.get("_".join(pair), 0.01))
        for _, pair in pair_neighbours([f"n{at}" for at in range(count)])
    ]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (make_links(2), []),
        (make_links(5), []),
        (make_links(5, n1_n2=0.029), []),
        (make_links(5, n1_n2=0.05), ["n1 and n2 exchange 84 MB/s, others 419 MB/s"]),
        (make_links(3, n1_n2=0.05), ["n1 and n2 exchange 84 MB/s, others 419 MB/s"]),
        (
            make_links(3, n0_n1=0.05, n1_n2=0.04),
            ["n1 exchanges 105 MB/s with its neighbours, others 419 MB/s"],
        ),
        (
            make_links(6, n0_n1=0.05, n5_n0=0.05, n2_n3=0.04),
            ["n0 exchanges 84 MB/s", "n2 and n3 exchange 105 MB/s"],
        ),
    ],
)
def test_slow_links_and_nodes_are_reported(links, expected):
    notes = [*find_slow_links(links)]
    assert len(notes) == len(expected)
    for note, begin in zip(notes, expected, strict=True):
        assert note.startswith(begin)


# Over links that are slow

PORT = 29533


def notes_of(nodes: list[network.Node], run: Path) -> list[str]:
    """Of a training with a rank on each node."""
    words = [
        *PACELINE,
        "train",
        "my.py:Regression",
        "--steps",
        "1",
        "--batch",
        "12",
        "--device",
        "cpu",
        "--run-dir",
        run.name,
    ]
    network.succeed(network.start_ranks(nodes, words, run.parent, PORT))
    (started,) = events_of_kind(run, Started)
    return [note for note in started.notes if "MB/s" in note]


@pytest.mark.network
@pytest.mark.slow
def test_node_with_a_slow_network_card_is_named(tmp_path):
    write_task(tmp_path)
    with network.nodes(4, rate="1gbit") as nodes:
        assert notes_of(nodes, tmp_path / "equal") == []
        network.throttle(nodes[2], "100mbit")
        (note,) = notes_of(nodes, tmp_path / "slow")
    assert note.startswith(f"{nodes[2].name} exchanges ")
    assert f"--exclude={nodes[2].name}" in note
