"""Results as files, timing of repetitions, comparison of two results."""

import json
import subprocess
import sys

import pytest

from paceline.bench.compare import compare, quartiles
from paceline.bench.result import Result, read, write
from paceline.bench.timer import Budget, Clock, measure, summarize_times
from paceline.errors import BenchError
from paceline.plotting.figure import check_picture, figure
from paceline.plotting.paths import check_path


def result(*times_s: float, kind: str = "collectives", **more: object) -> Result:
    rows = tuple(
        {
            "operation": "all-reduce",
            "bytes": 2**at,
            "median_s": time_s,
            "min_s": time_s,
            "p95_s": time_s,
            "spread": 0.1,
            "n": 5,
        }
        for at, time_s in enumerate(times_s)
    )
    return Result(kind=kind, keys=("operation", "bytes"), rows=rows, **more)


class Device:
    """A device whose time passes only while something runs; each repetition takes the given seconds."""

    def __init__(self, *seconds: float):
        self.seconds, self.now, self.runs = seconds, 0.0, 0
        self.clock = Clock(lambda: self.now, lambda marks: [mark - marks[0] for mark in marks])

    def run(self) -> None:
        self.now += self.seconds[min(self.runs, len(self.seconds) - 1)]
        self.runs += 1


def test_write_read_roundtrip(tmp_path):
    written = result(1e-3, 2e-3, settings={"ranks": 2, "sizes": [1, 2]}, notes=("something was left out",))
    write(written, tmp_path / "a.json")
    assert read(tmp_path / "a.json", "collectives") == written
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert written.machine["cores"]
    assert written.torch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "has version 0, but this Paceline reads version 1; measure again"),
        ({"version": 2}, "has version 2, but this Paceline reads version 1; use the Paceline that wrote it"),
        ({"schema": "other"}, "is not a result of paceline bench: its schema must be 'paceline.bench'"),
        ({"rows": 3}, "rows must be an array, got 3"),
        ({"more": 3}, "unknown key more"),
        ({"kind": "storage"}, "is a result of bench storage, but bench collectives is required"),
    ],
)
def test_invalid_result_file_is_refused(change, message, tmp_path):
    path = tmp_path / "a.json"
    write(result(1e-3), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BenchError, match=message):
        read(path, "collectives")


def test_unreadable_or_unwritable_file(tmp_path):
    with pytest.raises(BenchError, match=r"cannot read .*none.json: No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"schema": "paceline.be')
    with pytest.raises(BenchError, match="is not JSON"):
        read(tmp_path / "torn.json")
    with pytest.raises(BenchError, match="no such folder:"):
        check_path(tmp_path / "none" / "a.json")
    with pytest.raises(BenchError, match="it is a folder"):
        check_path(tmp_path)
    with pytest.raises(BenchError, match="no such folder:"):
        write(result(1e-3), tmp_path / "none" / "a.json")


def test_summarize_times():
    timing = summarize_times([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    assert (timing.n, timing.min_s, timing.median_s, timing.p95_s, timing.spread) == (
        5,
        1.0,
        3.0,
        pytest.approx(4.8),
        pytest.approx(2 / 3),
    )


def test_repetitions_fill_the_budget_without_the_warmup():
    device = Device(5.0, *(0.25,) * 4, 0.5)  # a cold run, then four of the warm-up
    budget = Budget(seconds=6.0, warmup_s=20.0, min_count=3, max_count=100)
    timing = measure(device.run, budget, device.clock)
    assert device.runs == 1 + 4 + 24
    assert (timing.n, timing.median_s, timing.min_s) == (24, 0.5, 0.5)


@pytest.mark.parametrize(("each_s", "n"), [(10.0, 3), (1e-9, 100), (0.0, 100)])
def test_number_of_repetitions_is_bounded(each_s, n):
    device = Device(each_s)
    assert measure(device.run, Budget(1.0, 1.0, min_count=3, max_count=100), device.clock).n == n


def test_slowest_rank_decides_number_and_time_of_repetitions():
    """The other rank is three times slower."""
    device, lengths = Device(0.5), []

    def max_with_slower_rank(values):
        lengths.append(len(values))
        return [3 * value for value in values]

    budget = Budget(seconds=6.0, warmup_s=0.1, min_count=3, max_count=100)
    timing = measure(device.run, budget, device.clock, max_with_slower_rank)
    assert (timing.n, timing.median_s) == (4, 1.5)
    assert lengths == [2, 2, 5]


def test_compare_two_results():
    comparison = compare(result(2e-3, 3e-3, 8e-3), result(1e-3, 3e-3))
    assert [item.ratio for item in comparison.ratios] == pytest.approx([2.0, 1.0])
    assert comparison.ratios[0].spread == pytest.approx(2.0 * 0.1 * 2**0.5)
    assert (comparison.only_first, comparison.only_second) == (1, 0)
    assert quartiles(comparison.ratios) == pytest.approx((1.25, 1.5, 1.75))


def test_compare_results_without_common_rows():
    with pytest.raises(BenchError, match="no row in common"):
        compare(result(), result(1e-3))
    with pytest.raises(BenchError, match="have different keys; compare two results of the same bench"):
        compare(result(1e-3), Result(kind="storage", keys=("folder",)))


def test_picture_that_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(BenchError, match=r"must end in \.svg or \.png"):
        check_picture(tmp_path / "a.gif")
    monkeypatch.setattr("paceline.plotting.figure.find_spec", lambda name: None)
    with pytest.raises(BenchError, match="pip install 'paceline\\[plot\\]'"):
        check_picture(tmp_path / "a.svg")


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_pictures_are_deterministic(name, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        with figure(tmp_path / folder / name) as drawn:
            drawn.subplots().plot([1, 2, 3])
    first, second = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
    assert first == second
    assert first.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_command_line_has_no_heavy_imports():
    heavy = ("torch", "matplotlib", "numpy")
    code = f"import sys, paceline.cli; print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
