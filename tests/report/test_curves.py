"""The curves of a run equal its events, which are read here by json alone."""

import itertools
import json
import math
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunError
from paceline.events import reader
from paceline.report import curve_cache, curves, event_log
from paceline.report import history as step_history
from paceline.report.run_view import RunView, view
from paceline.run import RunFolder
from run_lines import folder, make_history, started, step

QUANTITIES = ("loss", "grad_norm", "lr", "step_s", "data_s", "samples_per_s")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "curves"


def read_simply(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
    """Return the last line of each step that counts, and the seconds of training after it."""
    steps: dict[int, dict[str, Any]] = {}
    elapsed: dict[int, float] = {}
    reference = 0.0
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["event"] == "started":
            steps = {number: entry for number, entry in steps.items() if number <= line["step"]}
            reference = line["time"]
        elif line["event"] == "step":
            number = line["step"]
            steps = {other: entry for other, entry in steps.items() if other < number} | {number: line}
            before = elapsed[max(other for other in steps if other < number)] if len(steps) > 1 else 0.0
            elapsed[number] = before + line["time"] - reference
            reference = line["time"]
    return steps, {number: elapsed[number] for number in steps}


def check_curves(found: RunView, limit: int) -> None:
    steps, elapsed = read_simply(found.run.events)
    for name in [*QUANTITIES, *(name for name in found.quantities if "/" in name)]:
        curve = found.curve(name, limit=limit)
        x = list(map(int, curve.x))
        assert len(x) <= limit
        assert x[-1] == max(steps)
        assert sum(curve.num_steps) == sum(is_finite(value_of(line, name)) for line in steps.values())
        before = 0
        for at, last in enumerate(x):
            group = [steps[number] for number in sorted(steps) if before < number <= last]
            values = [value for line in group if is_finite(value := value_of(line, name))]
            expected = (min(values), max(values), sum(values) / len(values)) if values else (None,) * 3
            assert (curve.low[at], curve.high[at]) == expected[:2]
            assert curve.mean[at] == (pytest.approx(expected[2]) if values else None)
            final = value_of(group[-1], name)
            assert curve.last[at] == (final if is_finite(final) else None)
            before = last
        assert found.curve(name, "samples", limit=limit).x == tuple(8.0 * number for number in x)
        assert found.curve(name, "time", limit=limit).x == pytest.approx([elapsed[number] for number in x])


def value_of(line: dict[str, Any], name: str) -> Any:
    return line.get("losses", {}).get(name.partition("/")[2]) if "/" in name else line[name]


def is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


@pytest.mark.parametrize("max_buckets", [16, 100, 2**15])
@pytest.mark.parametrize("seed", range(8))
def test_curves_equal_the_events(seed, max_buckets, tmp_path, monkeypatch):
    """Of merged buckets that a resumed run cuts, too, at once and incrementally."""
    monkeypatch.setattr(curves, "MAX_BUCKETS", max_buckets)
    draw = random.Random(seed)
    lines = make_history(draw, draw.randint(50, 400), draw.randint(1, 5))
    run = folder(tmp_path / "r", lines)
    limit = draw.choice([7, 50, 1000])
    check_curves(view(run), limit)
    content = run.events.read_bytes()
    growing = RunView(run)
    for end in [*sorted(draw.randrange(len(content)) for _ in range(6)), len(content)]:
        run.events.write_bytes(content[:end])
        growing.refresh()
        assert growing.curves is not None
    check_curves(growing, limit)


def test_a_wrong_value_is_found(tmp_path):
    """Negative control of the comparison above."""
    run = folder(tmp_path / "r", make_history(random.Random(1), 100, 2))
    found = view(run)
    found.curves.columns["loss"].high[30] += 1e-9
    with pytest.raises(AssertionError):
        check_curves(found, 1000)


def test_a_spike_of_one_step_stays_visible(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "MAX_BUCKETS", 64)
    draw = random.Random(3)
    lines = [started(0, 0.0), *(step(number, number, draw) | {"loss": 1.0} for number in range(1, 5001))]
    lines[3333]["loss"] = 50.0
    curve = view(folder(tmp_path / "r", lines)).curve("loss", limit=20)
    [peak] = [at for at, high in enumerate(curve.high) if high == 50.0]
    assert curve.low[peak] == 1.0
    assert curve.x[peak - 1] < 3333 <= curve.x[peak]


def test_a_range_of_an_axis(tmp_path):
    draw = random.Random(3)
    run = folder(tmp_path / "r", [started(0, 0.0), *(step(n, n, draw) for n in range(1, 101))])
    assert view(run).curve("lr", begin=20, end=30).x == tuple(range(21, 31))
    assert view(run).curve("lr", "samples", begin=160, end=235).x == tuple(range(168, 241, 8))
    assert view(run).curve("lr", begin=500, end=600).x == ()


def test_metrics_over_each_axis(tmp_path):
    run = folder(tmp_path / "r", make_history(random.Random(5), 200, 3))
    _, elapsed = read_simply(run.events)
    expected: dict[int, float] = {}
    for text in run.events.read_text().splitlines():
        line = json.loads(text)
        if line["event"] == "started":
            expected = {number: value for number, value in expected.items() if number <= line["step"]}
        elif line["event"] == "evaluated":
            expected[line["step"]] = line["metrics"]["accuracy"]
    found = view(run)
    assert found.metrics == ("accuracy", "f1")
    curve = found.metric_curve("accuracy")
    assert dict(zip(curve.x, curve.last, strict=True)) == expected
    assert found.metric_curve("accuracy", "samples").x == tuple(8 * number for number in expected)
    assert found.metric_curve("accuracy", "time").x == pytest.approx([elapsed[number] for number in expected])
    assert set(found.metric_curve("f1").last) == {None}


def test_an_unknown_name_or_axis_is_refused(tmp_path):
    found = view(folder(tmp_path / "r", make_history(random.Random(5), 20, 1)))
    with pytest.raises(RunError, match="has no quantity accuracy; choose one of loss, grad_norm"):
        found.curve("accuracy")
    with pytest.raises(RunError, match="has no metric loss; choose one of"):
        found.metric_curve("loss")
    with pytest.raises(RunError, match="cannot be drawn over parsecs; choose one of step, samples, time"):
        found.curve("loss", "parsecs")


def test_a_run_without_steps_has_empty_curves(tmp_path):
    found = view(folder(tmp_path / "r", []))
    assert found.curves.columns == {}
    assert found.problems == []


def test_problems_are_sentences(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "MAX_METRICS", 3)
    draw = random.Random(1)
    lines = [started(0, 1000.0)]
    lines += [step(n, 1000.0 + n, draw) | {"loss": 1.0, "grad_norm": 1.0} for n in range(1, 41)]
    lines[10] |= {"loss": float("inf")}
    lines[12] |= {"loss": float("nan"), "grad_norm": None}
    for line in lines[21:]:
        line["time"] -= 600.0
    metrics = {f"m{k}": 0.5 for k in range(10)}
    lines.append({"time": 2e3, "event": "evaluated", "step": 40, "metrics": metrics, "seconds": 0.1})
    run = folder(tmp_path / "r", lines)
    with open(run.events, "a") as file:
        file.write('{"time": 2.0, "event": "st')
    found = view(run)
    assert found.problems == [
        "loss is not finite in 2 steps, first at step 10",
        "grad_norm overflowed in 1 step, first at step 12",
        "the clock was set back by 9:59 at step 21; the time axis counts the duration of that step instead",
        "only the first 3 of 10 metrics are kept",
    ]
    x = found.curve("loss", "time").x
    assert x[20] - x[19] == pytest.approx(lines[21]["step_s"])
    assert all(0 < after - before <= 1.0 for before, after in itertools.pairwise(x))


def test_many_named_losses_are_bounded(tmp_path):
    draw = random.Random(1)
    losses = {f"part{k}": 0.5 for k in range(10_000)}
    lines = [started(0, 0.0), *(step(n, n, draw) | {"losses": losses, "loss": 1.0} for n in range(1, 4))]
    found = view(folder(tmp_path / "r", lines))
    assert len(found.quantities) == len(QUANTITIES) + curves.MAX_NAMED_LOSSES
    assert "only the first 32 of 10,000 named losses are kept" in found.problems


def test_many_evaluations_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "MAX_EVALUATIONS", 10)
    draw = random.Random(1)
    lines = [started(0, 0.0)]
    for n in range(1, 101):
        metrics = {"a": 9.0 if n == 37 else n / 1000}
        lines += [
            step(n, n, draw),
            {"time": n, "event": "evaluated", "step": n, "metrics": metrics, "seconds": 0.1},
        ]
    curve = view(folder(tmp_path / "r", lines)).metric_curve("a")
    assert len(curve.x) <= 10
    assert (sum(curve.num_steps), max(curve.high), min(curve.low), curve.last[-1]) == (100, 9.0, 0.001, 0.1)


# The local copy


@pytest.fixture
def copied(tmp_path, monkeypatch, cache) -> tuple[RunFolder, Path]:
    """A run whose curves have a copy, and that file."""
    monkeypatch.setattr(curve_cache, "MIN_BYTES", 1000)
    monkeypatch.setattr(curves, "MAX_BUCKETS", 64)
    monkeypatch.setattr(curve_cache, "MAX_BUCKETS", 64)
    run = folder(tmp_path / "r", make_history(random.Random(2), 300, 3))
    assert view(run).curves.columns
    [file] = cache.iterdir()
    return run, file


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def read_again(run: RunFolder) -> int:
    """Check the curves of a new view, and return how many bytes they took to read."""
    found = view(run)
    before = bytes_read()
    assert found.curves.columns
    count = bytes_read() - before
    check_curves(found, 40)
    return count


def test_the_copy_replaces_the_events(copied):
    run, path = copied
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_size < 2**20) == (0o700, True)
    assert read_again(run) < 9000 + path.stat().st_size, "only both ends of the events are read"
    lines = make_history(random.Random(4), 400, 2)
    with open(run.events, "a") as file:  # the run continues
        file.writelines(json.dumps(line) + "\n" for line in lines)
    read_again(run)


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "header", "other", "link", "pipe", "deleted"])
def test_a_damaged_copy_is_ignored_and_replaced(how, copied, tmp_path):
    run, file = copied
    whole = file.read_bytes()
    damage = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:],
        "header": whole.replace(b'"width": ', b'"width": 1', 1),
        "other": b"paceline-curves-99 0\n" + whole,
    }
    file.unlink()
    if how == "link":
        (tmp_path / "else").write_bytes(whole[:50])
        file.symlink_to(tmp_path / "else")
    elif how == "pipe":
        os.mkfifo(file)
    elif how != "deleted":
        file.write_bytes(damage[how])
    assert read_again(run) > run.events.stat().st_size
    if how in damage or how == "deleted":
        assert file.read_bytes() == whole


def test_a_copy_of_other_events_is_ignored(copied):
    run, _ = copied
    size = run.events.stat().st_size
    lines = make_history(random.Random(7), 900, 3)
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run.events.stat().st_size > size
    read_again(run)


@pytest.mark.parametrize("how", ["public", "file", "unwritable"])
def test_without_a_private_folder_there_is_no_copy(how, tmp_path, monkeypatch, cache):
    monkeypatch.setattr(curve_cache, "MIN_BYTES", 1000)
    cache.parent.mkdir(parents=True)
    if how == "public":
        cache.mkdir()
        cache.chmod(0o777)
    elif how == "file":
        cache.write_text("")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    read_again(folder(tmp_path / "r", make_history(random.Random(2), 300, 3)))
    assert not cache.is_dir() or not list(cache.iterdir())


def test_old_copies_are_deleted(copied, monkeypatch, tmp_path):
    _, file = copied
    monkeypatch.setattr(curve_cache, "MAX_FOLDER_BYTES", file.stat().st_size * 3 // 2)
    os.utime(file, (1, 1))
    read_again(folder(tmp_path / "s", make_history(random.Random(2), 300, 3)))
    assert not file.exists()
    assert len(list(file.parent.iterdir())) == 1


def test_memory_does_not_grow_with_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "MAX_BUCKETS", 256)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 2**14)
    monkeypatch.setattr(step_history, "MAX_POINTS", 256)  # of the summary
    draw = random.Random(1)
    run = folder(tmp_path / "r", [started(0, 0.0), *(step(n, n, draw) for n in range(1, 20_001))])
    tracemalloc.start()
    try:
        assert view(run).curves.width == 128
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
