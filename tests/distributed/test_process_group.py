"""How ranks without a store of their launcher meet: slow starts are reported, missing ranks are named."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.distributed import process_group
from paceline.distributed.process_group import meet_through_file
from paceline.distributed.store import open_store
from paceline.distributed.world import World
from paceline.errors import LaunchError

NOTE = ".meet-slurm-1-0-0"


def make_world(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_size=size, launcher="slurm", job="1-0-0")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        second = executor.submit(meet_through_file, make_world(1, 4), timedelta(seconds=60), tmp_path)
        with pytest.raises(
            LaunchError,
            match=r"^2 of 4 nodes \(2, 3, counted from 0\) did not connect to 127\.0\.0\.1:\d+ within 5 s",
        ):
            meet_through_file(make_world(0, 4), timedelta(seconds=5), tmp_path, noun="node")
        second.result()


def test_a_slow_start_is_reported_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_group, "SLOW_START_S", 0.1)
    printed = ""
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(meet_through_file, make_world(0, 2), timedelta(seconds=60), tmp_path)
        while "\n" not in printed:
            assert not first.done()
            printed += capsys.readouterr().err
        meet_through_file(make_world(1, 2), timedelta(seconds=60), tmp_path)
        first.result()
    line = r"paceline: still waiting for 1 of 2 ranks \(1, counted from 0\) to connect to 127\.0\.0\.1:\d+\n"
    assert re.fullmatch(line, printed), "it is reported once"


def test_an_absent_first_rank_and_a_cut_network_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"waited 1 s for rank 0 to write .*{NOTE}; check that rank 0 runs"):
        meet_through_file(make_world(1, 2), timedelta(seconds=1), tmp_path)
    port = open_store().port  # closed at once
    (tmp_path / NOTE).write_text(f"127.0.0.1:{port} {'0' * 64}")
    (tmp_path / NOTE).chmod(0o600)
    with pytest.raises(
        LaunchError, match=rf"could not connect to rank 0 at 127\.0\.0\.1:{port} for 1 s; check the network"
    ):
        meet_through_file(make_world(1, 2), timedelta(seconds=1), tmp_path)
