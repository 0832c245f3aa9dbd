"""Ranks use the cores that other processes leave free, and report settings without effect."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import events_of_kind, succeed, write_task
from paceline.cluster import limits
from paceline.cluster.limits import busy_cores, free_cores, usable_cores
from paceline.events import Started

pytestmark = pytest.mark.processes

CORES = len(os.sched_getaffinity(0))
OPTIONS = ("train", "my.py:Regression", "--batch", "24", "--steps", "3", "--device", "cpu", "--run-dir", "r")


@contextlib.contextmanager
def keep_busy(cores: list[int]) -> Iterator[None]:
    """Keep the cores busy."""
    with contextlib.ExitStack() as stack:
        for core in cores:
            process = stack.enter_context(subprocess.Popen(["sh", "-c", "while :; do :; done"]))
            stack.callback(process.kill)
            os.sched_setaffinity(process.pid, {core})
        yield


@pytest.mark.skipif(usable_cores() < CORES, reason="a quota keeps cores from being busy")
def test_busy_cores_are_counted_for_other_processes() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with keep_busy(cores):
        count = busy_cores(0.3)
        assert count is not None
        assert count > 0.9 * len(cores)
        assert free_cores(count) < 0.1 * len(cores)
    assert free_cores(0.0) == usable_cores()


@pytest.mark.skipif(
    not 2 <= usable_cores() == CORES,
    reason="requires two cores, and a quota keeps cores from being busy",
)
def test_threads_equal_the_free_cores_and_do_not_change_in_a_run(tmp_path: Path) -> None:
    write_task(tmp_path)
    with keep_busy(sorted(os.sched_getaffinity(0))):
        output = succeed(*OPTIONS, at=tmp_path).out
        [first] = events_of_kind(tmp_path / "r", Started)
        assert first.threads == 1
        assert "this machine is oversubscribed: other processes keep " in " ".join(first.notes)
        assert (
            f"threads=1 on each rank in place of {usable_cores()}; "
            f"--set spec.threads={usable_cores()} sets them" in first.notes
        )
        assert "note: this machine is oversubscribed" in output
        specified = succeed(*OPTIONS[:-1], "w", "--set", "spec.threads=2", "--tf32", at=tmp_path).out
        [second] = events_of_kind(tmp_path / "w", Started)
        assert (second.threads, second.notes) == (
            2,
            ("tf32 has no effect: it applies to CUDA devices, and this training runs on the CPU",),
        )
        assert "note: tf32 has no effect" in specified
    succeed("resume", "r", "--steps", "5", at=tmp_path)
    resumed = events_of_kind(tmp_path / "r", Started)[-1]
    assert (resumed.step, resumed.threads) == (3, 1), "the result must not depend on free cores"


def test_ticks_are_read_for_each_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns: user nice system idle iowait irq softirq steal guest guest_nice; user includes guest."""
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 3 100 20 4 5 6 7 8\ncpu7 0 0 0 1 0 0 0 0 0 0\nintr 5\n"
    )
    monkeypatch.setattr(limits, "Path", lambda path: stat if path == "/proc/stat" else Path(path))
    assert limits.core_ticks() == {0: (21, 120), 7: (0, 1)}
