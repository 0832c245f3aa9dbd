"""Threads of a rank by what other processes leave free; what has no effect is reported."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import of_kind, succeed, write_task
from paceline.cluster import limits
from paceline.cluster.limits import busy_cores, free_cores, usable_cores
from paceline.events import Started

pytestmark = pytest.mark.processes

CORES = len(os.sched_getaffinity(0))
WORDS = ("train", "my.py:Regression", "--batch", "24", "--steps", "3", "--device", "cpu", "--run-dir", "r")


@contextlib.contextmanager
def busy(cores: list[int]) -> Iterator[None]:
    """Keep these cores busy in the context."""
    with contextlib.ExitStack() as over:
        for core in cores:
            process = over.enter_context(subprocess.Popen(["sh", "-c", "while :; do :; done"]))
            over.callback(process.kill)
            os.sched_setaffinity(process.pid, {core})
        yield


@pytest.mark.skipif(usable_cores() < CORES, reason="a quota keeps cores from being busy")
def test_busy_cores_counts_other_processes() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with busy(cores):
        found = busy_cores(0.3)
        assert found is not None
        assert found > 0.9 * len(cores)
        assert free_cores(found) < 0.1 * len(cores)
    assert free_cores(0.0) == usable_cores()


@pytest.mark.skipif(
    not 2 <= usable_cores() == CORES,
    reason="one core is not to be shared, and a quota keeps cores from being busy",
)
def test_threads_use_free_cores_and_stay_constant_in_a_run(tmp_path: Path) -> None:
    write_task(tmp_path)
    with busy(sorted(os.sched_getaffinity(0))):
        said = succeed(*WORDS, at=tmp_path).out
        [first] = of_kind(tmp_path / "r", Started)
        assert first.threads == 1
        assert "this machine is oversubscribed: other processes keep " in " ".join(first.notes)
        assert (
            f"threads=1 on each rank in place of {usable_cores()}; --set spec.threads={usable_cores()} sets them"
            in first.notes
        )
        assert "note: this machine is oversubscribed" in said
        wished = succeed(*WORDS[:-1], "w", "--set", "spec.threads=2", "--tf32", at=tmp_path).out
        [own] = of_kind(tmp_path / "w", Started)
        assert (own.threads, own.notes) == (
            2,
            ("tf32 has no effect: it applies to CUDA devices, and this training runs on the CPU",),
        )
        assert "note: tf32 has no effect" in wished
    succeed("resume", "r", "--steps", "5", at=tmp_path)
    again = of_kind(tmp_path / "r", Started)[-1]
    assert (again.step, again.threads) == (3, 1), "bit for bit, whatever is free by now"


def test_ticks_of_each_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns: user nice system idle iowait irq softirq steal guest guest_nice. User includes the guests."""
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 3 100 20 4 5 6 7 8\ncpu7 0 0 0 1 0 0 0 0 0 0\nintr 5\n"
    )
    monkeypatch.setattr(limits, "Path", lambda path: stat if path == "/proc/stat" else Path(path))
    assert limits._core_ticks() == {0: (21, 120), 7: (0, 1)}
