"""Rules about samples of GPUs and nodes find their faults, and not healthy samples close to them."""

import math
import random
from pathlib import Path

import pytest

from paceline.events import Failed
from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import Missing
from paceline.inspect.read_facts import read_recorded_facts
from paceline.spec import Loading, Spec
from run_facts import (
    BY_NAME,
    make_beats,
    make_facts,
    make_saves,
    make_windows,
    outcome_of,
    sentences,
)


def test_an_idle_gpu_in_a_recording(tmp_path: Path) -> None:
    rows = {"gpu0 utilization [%]": [95.0] * 120, "gpu1 utilization [%]": [0.0] * 120}
    facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, rows))
    assert sentences("device-idle", facts) == ["GPU 1 was idle (0 %) for the whole 2:00"]
    # The recording began before the job, and went on after it.
    pauses = {
        "gpu0 utilization [%]": [0.0] * 40 + [90.0] * 120 + [0.0] * 40,
        "gpu1 utilization [%]": [0.0] * 40 + [85.0] * 120 + [0.0] * 40,
    }
    facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, pauses, begin=None, end=None))
    assert sentences("device-idle", facts) == []
    # Evaluations and checkpoints are pauses.
    busy = [0.0 if k % 10 < 2 else 97.0 for k in range(120)]
    facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, {"gpu0 utilization [%]": busy}))
    assert sentences("device-idle", facts) == []
    starved = [100.0 if k % 4 == 0 else 0.0 for k in range(120)]
    facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, {"gpu0 utilization [%]": starved}))
    assert sentences("device-idle", facts) == ["GPU 0 worked for 25 % of 2:00 and waited for the rest"]
    few = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, {"gpu0 utilization [%]": [0.0] * 5}))
    assert isinstance(outcome_of("device-idle", few), Missing)


def test_memory_that_grows_in_a_short_run(tmp_path: Path) -> None:
    """Ten samples suffice if nearly all parts of them rise; a single jump or a cache does not."""
    for memory, expected in (
        ([500.0 + 40 * k for k in range(10)], 1),
        ([500.0] * 6 + [900.0] * 4, 0),
        ([500.0 + 300 * (1 - 0.6**k) for k in range(10)], 0),
        ([500.0 + 40 * (k % 3) for k in range(12)], 0),
    ):
        windows = make_windows(tmp_path, {"rank0 memory [MiB]": memory})
        assert len(sentences("memory-growth", make_facts(windows=windows))) == expected, memory
    for step_MiB, expected in ((60.0, 1), (15.0, 0)):
        windows = make_windows(tmp_path, {"rank0 memory [MiB]": [500.0 + step_MiB * k for k in range(7)]})
        assert len(sentences("memory-growth", make_facts(windows=windows))) == expected, step_MiB
    few = make_windows(tmp_path, {"rank0 memory [MiB]": [500.0 + 40 * k for k in range(5)]})
    assert isinstance(outcome_of("memory-growth", make_facts(windows=few)), Missing)


def test_workers_that_take_the_cores_from_the_ranks(tmp_path: Path) -> None:
    """Two ranks with 8 workers each on 4 cores. Workers that wait, and other programs, are no fault."""

    def find(cpu: float, wait_s: float, workers: int = 8) -> list[str]:
        rows = {f"rank{rank} workers cpu [%]": [cpu] * 20 for rank in (0, 1)}
        facts = make_facts(
            windows=make_windows(tmp_path, rows),
            spec=Spec(data=Loading(workers=workers)),
            beats=make_beats({"forward": 0.05}, {"forward": 0.05}, core_wait_s=wait_s),
        )
        return sentences("threads", facts)

    [sentence] = find(150.0, 2.0)
    assert sentence == (
        "2 ranks with 8 workers each share 4 cores: the workers use 3.0 cores, and a rank waits for a core "
        "for 40% of the time"
    )
    assert find(10.0, 2.0) == find(150.0, 0.1) == find(150.0, 2.0, workers=1) == []


def test_a_gpu_that_disappears_is_noted(tmp_path: Path) -> None:
    lines = ["timestamp, index, utilization.gpu [%]"]
    for second in range(90):
        stamp = f"2026/01/05 10:{second // 60:02}:{second % 60:02}.000"
        lines += [f"{stamp}, {gpu}, 93 %" for gpu in (0, 1) if gpu == 0 or second < 30]
    (tmp_path / "gpu.csv").write_text("\n".join(lines) + "\n")
    notes = read_recorded_facts(tmp_path / "gpu.csv").notes
    assert notes == ("GPU 1 has no samples after 29.0 s of 1:29: it or its sensor disappeared",)
    (tmp_path / "gpu.csv").write_text("\n".join(lines[:60]) + "\n")
    assert read_recorded_facts(tmp_path / "gpu.csv").notes == ()


def test_a_short_job_in_a_long_recording(tmp_path: Path) -> None:
    """Memory that is in use only during the job shows when the job began and ended."""
    used = [0.0] * 100 + [92.0] * 60 + [0.0] * 100
    for held, expected in ((600.0, 0), (30_000.0, 1)):  # a job that holds memory and does not compute
        memory = [held] * 100 + [31_000.0] * 60 + [held] * 100
        rows = {"gpu0 utilization [%]": used, "gpu0 memory used [MiB]": memory}
        facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, rows, begin=None, end=None))
        assert len(sentences("device-idle", facts)) == expected


def test_memory_of_mapped_files_does_not_grow(tmp_path: Path) -> None:
    """Samples that are read from a mapped file occupy memory that the system can free."""
    memory = [600.0 + 5 * k for k in range(100)]
    rows = {"rank0 memory [MiB]": memory, "rank0 file memory [MiB]": [200.0 + 5 * k for k in range(100)]}
    assert sentences("memory-growth", make_facts(windows=make_windows(tmp_path, rows))) == []
    for leak in ({**rows, "rank0 file memory [MiB]": [200.0] * 100}, {"rank0 memory [MiB]": memory}):
        assert len(sentences("memory-growth", make_facts(windows=make_windows(tmp_path, leak)))) == 1


def test_many_idle_gpus_are_named_in_four_lines(tmp_path: Path) -> None:
    rows = {f"gpu{gpu} utilization [%]": [95.0 if gpu == 0 else 0.0] * 60 for gpu in range(8)}
    facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, rows))
    found = outcome_of("device-idle", facts)
    assert len(found) == 4
    assert found[-1].sentence == "GPU 4 was idle (0 %) for the whole 1:00; so were 3 more GPUs"
    assert sum(evidence.share for evidence in found) == pytest.approx(7 / 8)


GPU_CASES = {
    "throttling": (
        {"gpu0 throttle [bits]": [64.0] * 40, "gpu0 clock sm [MHz]": [900.0] * 40},
        {"gpu0 throttle [bits]": [4.0, 1.0] * 20, "gpu0 clock sm [MHz]": [1900.0] * 40},
    ),
    "gpu-memory": (
        {"gpu0 memory used [MiB]": [80000.0] * 40, "gpu0 memory total [MiB]": [81559.0] * 40},
        {"gpu0 memory used [MiB]": [76000.0] * 40, "gpu0 memory total [MiB]": [81559.0] * 40},
    ),
    "gpu-memory-growth": (
        {"gpu0 memory used [MiB]": [20000.0 + 400 * k for k in range(40)]},
        {"gpu0 memory used [MiB]": [60000.0 - 40000 * 0.8**k for k in range(40)]},
    ),
    "batch-size": (
        {
            "gpu0 memory used [MiB]": [8000.0] * 40,
            "gpu0 memory total [MiB]": [81559.0] * 40,
            "gpu0 utilization [%]": [55.0] * 40,
        },
        {
            "gpu0 memory used [MiB]": [8000.0] * 40,
            "gpu0 memory total [MiB]": [81559.0] * 40,
            "gpu0 utilization [%]": [95.0] * 40,
        },
    ),
    "shared-gpu": (
        {"gpu0 other processes [processes]": [1.0] * 40},
        {"gpu0 other processes [processes]": [1.0] * 3 + [0.0] * 37},
    ),
    "tensor-cores": (
        {"gpu0 tensor active [%]": [0.0] * 40, "gpu0 sm active [%]": [80.0] * 40},
        {"gpu0 tensor active [%]": [20.0] * 40, "gpu0 sm active [%]": [80.0] * 40},
    ),
    "gpu-errors": (
        {"gpu0 ecc uncorrected [errors]": [0.0] * 20 + [2.0] * 20},
        {"gpu0 ecc uncorrected [errors]": [7.0] * 40},
    ),
}


@pytest.mark.parametrize("name", [*GPU_CASES])
def test_samples_of_gpus(name: str, tmp_path: Path) -> None:
    for rows, count in zip(GPU_CASES[name], (1, 0), strict=True):
        facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, rows))
        assert len(sentences(name, facts)) == count, rows
    assert isinstance(outcome_of(name, RunFacts(path=Path("gpu.csv"))), Missing)
    assert BY_NAME[name].is_simulated


def test_low_clocks_without_reasons(tmp_path: Path) -> None:
    low = {
        "gpu0 utilization [%]": [99.0] * 40,
        "gpu0 clock sm [MHz]": [900.0] * 40,
        "gpu0 clock sm limit [MHz]": [1980.0] * 40,
    }
    facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, low))
    assert sentences("throttling", facts) == ["GPU 0 ran at 45% of its highest clock under load"]
    # One of two GPUs is slower than the other, and a clock falls. The highest clock is unknown.
    columns = [f"gpu{k} {what}" for k in (0, 1) for what in ("utilization [%]", "clock sm [MHz]")]
    for clocks, found in (
        (([1900.0] * 40, [1100.0] * 40), ["GPU 1 ran at 1100 MHz under load, the other GPUs at 1900 MHz"]),
        (([1900.0] * 20 + [900.0] * 20,), ["GPU 0 lowered its clock under load from 1900 to 900 MHz"]),
        (([1980.0] * 20 + [1400.0] * 20, [1500.0] * 40), []),
    ):
        values = [series for clock in clocks for series in ([99.0] * 40, clock)]
        windows = make_windows(tmp_path, dict(zip(columns, values, strict=False)))
        assert sentences("throttling", RunFacts(path=Path("gpu.csv"), windows=windows)) == found
    idle = {**low, "gpu0 utilization [%]": [0.0] * 40}
    facts = RunFacts(path=Path("gpu.csv"), windows=make_windows(tmp_path, idle))
    assert sentences("throttling", facts) == []


def test_growing_memory(tmp_path: Path) -> None:
    draw = random.Random(0)
    cases = {
        "leak": ([500 + 4.0 * k + draw.gauss(0, 2) for k in range(60)], 1),
        "steady": ([500 + draw.gauss(0, 10) for k in range(60)], 0),
        "leak of a training that becomes slower": ([500 + 300 * (k / 60) ** 0.7 for k in range(60)], 1),
        "cache that fills": ([900 - 400 * math.exp(-k / 8) for k in range(60)], 0),
        "saw of a garbage collector": ([500 + 10.0 * (k % 12) for k in range(60)], 0),
        "slow": ([500 + 0.3 * k for k in range(60)], 0),
    }
    for what, (series, count) in cases.items():
        facts = make_facts(windows=make_windows(tmp_path, {"rank1 memory [MiB]": series}))
        found = sentences("memory-growth", facts)
        assert len(found) == count, (what, found)
        assert not found or found[0].startswith("the memory of rank 1 grows by "), found
    assert isinstance(outcome_of("memory-growth", make_facts()), Missing)


def test_full_memory(tmp_path: Path) -> None:
    total = {"memory total [MiB]": [16000.0] * 30}
    ours = {"memory used [MiB]": [15600.0] * 30, "rank0 memory [MiB]": [12000.0] * 30}
    assert len(sentences("memory", make_facts(windows=make_windows(tmp_path, total | ours)))) == 1
    others = {"memory used [MiB]": [15600.0] * 30, "rank0 memory [MiB]": [500.0] * 30}
    assert sentences("memory", make_facts(windows=make_windows(tmp_path, total | others))) == []
    limit = {"job memory used [MiB]": [3950.0] * 30, "job memory limit [MiB]": [4000.0] * 30}
    assert len(sentences("memory", make_facts(windows=make_windows(tmp_path, limit)))) == 1


def test_swapping(tmp_path: Path) -> None:
    pressed = {"memory used [MiB]": [15000.0] * 30, "memory total [MiB]": [16000.0] * 30}
    swaps = {"swap in [MB/s]": [20.0, 0.0] * 15}
    assert len(sentences("swapping", make_facts(windows=make_windows(tmp_path, pressed | swaps)))) == 1
    rarely = {"swap in [MB/s]": [20.0] + [0.0] * 29}
    assert sentences("swapping", make_facts(windows=make_windows(tmp_path, pressed | rarely))) == []
    spare = {"memory used [MiB]": [5000.0] * 30, "memory total [MiB]": [16000.0] * 30}
    assert sentences("swapping", make_facts(windows=make_windows(tmp_path, spare | swaps))) == []


def test_disks(tmp_path: Path) -> None:
    failed = Failed(what="save", message="checkpoint step_20 was not saved: No space left on device", step=20)
    assert len(sentences("disk", make_facts(failures=(failed,)))) == 1
    saves = make_saves(0.1, size=10**9)
    assert len(sentences("disk", make_facts(saved=saves, disk_free_bytes=10**9))) == 1
    assert sentences("disk", make_facts(saved=saves, disk_free_bytes=10**10)) == []
    filling = {"disk free [MiB]": [1000.0 - 10 * k for k in range(60)]}
    windows = make_windows(tmp_path, filling)
    assert len(sentences("disk", make_facts(windows=windows, remaining_s=3600.0))) == 1
    assert sentences("disk", make_facts(windows=windows, remaining_s=10.0)) == []
    assert isinstance(outcome_of("disk", make_facts()), Missing)
