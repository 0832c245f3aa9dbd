"""Results as files, repetitions and their figures, and two results beside each other."""

import json
import subprocess
import sys

import pytest

from paceline.bench.compare import compare, quartiles
from paceline.bench.result import Result, read, write
from paceline.bench.timer import Budget, Clock, measure, timing
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
    """Time passes only when something runs, and each repetition takes what it is told."""

    def __init__(self, *seconds: float):
        self.seconds, self.now, self.runs = seconds, 0.0, 0
        self.clock = Clock(lambda: self.now, lambda marks: [mark - marks[0] for mark in marks])

    def run(self) -> None:
        self.now += self.seconds[min(self.runs, len(self.seconds) - 1)]
        self.runs += 1


def test_a_result_is_read_as_it_was_written(tmp_path):
    one = result(1e-3, 2e-3, settings={"ranks": 2, "sizes": [1, 2]}, notes=("something was left out",))
    write(one, tmp_path / "one.json")
    assert read(tmp_path / "one.json", "collectives") == one
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    assert one.machine["cores"]
    assert one.torch


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 0}, "is of version 0, and this Paceline reads 1; measure again"),
        ({"version": 2}, "is of version 2, and this Paceline reads 1; use the Paceline that wrote it"),
        ({"schema": "other"}, "is no result of paceline bench"),
        ({"rows": 3}, "rows must be an array, got 3"),
        ({"more": 3}, "unknown key more"),
        ({"kind": "storage"}, "is of bench storage, not of bench collectives"),
    ],
)
def test_what_is_no_result_of_today_is_refused(change, said, tmp_path):
    path = tmp_path / "one.json"
    write(result(1e-3), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BenchError, match=said):
        read(path, "collectives")


def test_a_file_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(BenchError, match=r"cannot read .*none.json: No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"schema": "paceline.be')
    with pytest.raises(BenchError, match="is not JSON"):
        read(tmp_path / "torn.json")
    with pytest.raises(BenchError, match="no such folder:"):
        check_path(tmp_path / "none" / "one.json")
    with pytest.raises(BenchError, match="it is a folder"):
        check_path(tmp_path)
    with pytest.raises(BenchError, match="no such folder:"):
        write(result(1e-3), tmp_path / "none" / "one.json")


def test_the_figures_of_repetitions():
    found = timing([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    assert (found.n, found.min_s, found.median_s, found.p95_s, found.spread) == (
        5,
        1.0,
        3.0,
        pytest.approx(4.8),
        pytest.approx(2 / 3),
    )


def test_as_many_repetitions_as_the_budget_allows_and_none_of_the_warm_up():
    device = Device(5.0, *(0.25,) * 4, 0.5)  # cold, then four that warm up
    found = measure(device.run, Budget(seconds=6.0, warmup_s=20.0, least=3, most=100), device.clock)
    assert device.runs == 1 + 4 + 24
    assert (found.n, found.median_s, found.min_s) == (24, 0.5, 0.5)


@pytest.mark.parametrize(("each_s", "n"), [(10.0, 3), (1e-9, 100), (0.0, 100)])
def test_repetitions_have_bounds(each_s, n):
    device = Device(each_s)
    assert measure(device.run, Budget(1.0, 1.0, least=3, most=100), device.clock).n == n


def test_ranks_repeat_alike_and_the_last_one_counts():
    """The other rank is three times as slow: it decides how often, and when a repetition is over."""
    device, meetings = Device(0.5), []

    def with_a_slower_one(values):
        meetings.append(len(values))
        return [3 * value for value in values]

    found = measure(
        device.run, Budget(seconds=6.0, warmup_s=0.1, least=3, most=100), device.clock, with_a_slower_one
    )
    assert (found.n, found.median_s) == (4, 1.5)
    assert meetings == [2, 2, 5]


def test_two_results_beside_each_other():
    found = compare(result(2e-3, 3e-3, 8e-3), result(1e-3, 3e-3))
    assert [one.ratio for one in found.ratios] == pytest.approx([2.0, 1.0])
    assert found.ratios[0].spread == pytest.approx(2.0 * 0.1 * 2**0.5)
    assert (found.only_first, found.only_second) == (1, 0)
    assert quartiles(found.ratios) == pytest.approx((1.25, 1.5, 1.75))


def test_results_that_have_nothing_in_common():
    with pytest.raises(BenchError, match="no row in common"):
        compare(result(), result(1e-3))
    with pytest.raises(BenchError, match="other keys"):
        compare(result(1e-3), Result(kind="storage", keys=("folder",)))


def test_pictures_that_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(BenchError, match=r"must end in \.svg or \.png"):
        check_picture(tmp_path / "a.gif")
    monkeypatch.setattr("paceline.plotting.figure.find_spec", lambda name: None)
    with pytest.raises(BenchError, match="pip install 'paceline\\[plot\\]'"):
        check_picture(tmp_path / "a.svg")


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_the_same_figures_give_the_same_picture(name, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        with figure(tmp_path / folder / name) as drawn:
            drawn.subplots().plot([1, 2, 3])
    first, second = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
    assert first == second
    assert first.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_the_command_line_waits_for_no_heavy_import():
    code = "import sys, paceline.cli; print([name for name in ('torch', 'matplotlib', 'numpy') if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
