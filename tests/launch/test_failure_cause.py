"""The cause of the end of a training is found among what its ranks wrote, in whatever order they wrote it."""

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline import RankError, TaskError, events
from paceline.events import Failed, Started
from paceline.launch.failure_cause import find_cause, read_failures
from paceline.run import RunFolder, create
from paceline.spec import Launch, Spec

STARTED = Started(
    task="digits",
    plan="ddp",
    ranks=2,
    batch=8,
    step=0,
    steps=8,
    samples=21,
    parameters=99,
    device="cpu",
    precision="fp32",
    threads=1,
)
CAUSE = Failed(what="run", step=0, rank=1, message="rank 1: no such number", meant=True, error="TaskError")
LOST = Failed(what="run", step=0, rank=0, message="Connection closed by peer", lost_peer=True)
RESTART = Failed(what="rank", step=0, rank=1, message="rank 1 failed; all ranks are restarted")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create(tmp_path / "r", Spec(task="digits"), Launch())


def write(run: RunFolder, *written: events.Event) -> None:
    for event in written:
        events.append(run.events, event)


def find(run: RunFolder) -> Exception:
    failures = {rank: ProcessFailure(rank, 1000 + rank, 1, os.devnull) for rank in range(2)}
    return find_cause(run, failures, 0, (), None)


@pytest.mark.parametrize(
    "order",
    [(STARTED, CAUSE, LOST), (STARTED, LOST, CAUSE), (CAUSE, STARTED, LOST), (CAUSE, LOST)],
    ids=["cause first", "cause last", "before the start is reported", "start not reported"],
)
def test_the_error_of_the_task_is_the_cause(order: tuple[events.Event, ...], run: RunFolder) -> None:
    """Rank 1 may fail in its first step before rank 0 reports that they started."""
    write(run, *order)
    error = find(run)
    assert isinstance(error, TaskError)
    assert str(error) == "rank 1: no such number"


def test_a_lost_connection_without_a_cause_is_an_error_of_a_rank(run: RunFolder) -> None:
    write(run, STARTED, LOST)
    assert isinstance(find(run), RankError)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ((STARTED, CAUSE, LOST, RESTART, STARTED), {}),
        ((STARTED, CAUSE, LOST, STARTED), {}),  # nodes joined
        ((CAUSE, RESTART, STARTED), {}),
        ((STARTED, LOST, RESTART, CAUSE, STARTED, LOST), {0: LOST, 1: CAUSE}),
        ((STARTED, CAUSE, RESTART, LOST, STARTED), {}),  # late, from another node
        ((STARTED, CAUSE, RESTART), {1: CAUSE}),  # there was no room for the restart
    ],
    ids=["restart", "regrouped", "early and restart", "early after restart", "late", "not restarted"],
)
def test_failures_of_earlier_starts_do_not_count(
    written: tuple[events.Event, ...], expected: dict[int, Failed], run: RunFolder
) -> None:
    write(run, *written)
    assert read_failures(run, 0) == (expected, 0)
