"""Samples of machines in a view of a run: bounded memory, extremes, and energy as an axis of curves."""

import csv
import itertools
import json
import random
from pathlib import Path

import pytest

from paceline import spec as specs
from paceline.report import machine_samples
from paceline.report.run_view import RunView, view
from paceline.run import RunFolder
from paceline.spec import Launch, Spec
from run_lines import started, step

BEGIN = 1.7e9


@pytest.fixture
def run(tmp_path) -> RunFolder:
    (tmp_path / "r").mkdir()
    run = RunFolder(tmp_path / "r")
    run.monitor.mkdir()
    specs.save(run.spec, Spec(task="my.py:T"), Launch(ranks=2))
    return run


HEAD = "time [s],cpu [%],memory total [MiB],cpu energy [J],gpu0 power [W],gpu0 utilization [%]"


def write(run: RunFolder, node: str, rows: list[list[object]], head: str = HEAD) -> Path:
    path = run.monitor / f"{node}.csv"
    lines = [",".join("" if value is None else str(value) for value in row) for row in rows]
    path.write_text("\n".join(["# paceline samples 1", f"# node: {node}", head, *lines]) + "\n")
    return path


def draw_rows(count: int, seed: int = 1) -> list[list[object]]:
    draw, counter, rows = random.Random(seed), 500.0, []
    for number in range(count):
        counter = counter + draw.uniform(1, 90) if number != count // 2 else 3.0  # the counter was reset
        power = None if not draw.randrange(7) else draw.randrange(50, 700)
        rows.append(
            [BEGIN + number, draw.randrange(100), 8000, round(counter, 3), power, draw.randrange(101)]
        )
    return rows


def sum_energy(path: Path, until: float) -> float:
    """Return the energy of a file until a time, by the module csv."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if float(row["time [s]"]) <= until]
    energy = 0.0
    for before, after in itertools.pairwise(rows):
        seconds = float(after["time [s]"]) - float(before["time [s]"])
        if seconds > machine_samples.MAX_GAP_S:
            continue
        energy += max(0.0, float(after["cpu energy [J]"]) - float(before["cpu energy [J]"]))
        energy += float(after["gpu0 power [W]"] or 0) * seconds
    return energy


def test_energy_of_all_nodes_is_an_axis(run):
    draw = random.Random(1)
    run.events.write_text("")
    rows = draw_rows(60)
    for row in rows[40:]:
        row[0] += 1000.0  # the sampler was stopped; this energy is unknown
    paths = [write(run, "a", rows), write(run, "b", draw_rows(30, 2))]
    lines = [started(0, BEGIN), *(step(n, BEGIN + n, draw) for n in range(1, 31))]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = view(run)
    assert found.axes == ("step", "samples", "time", "energy")
    curve = found.curve("loss", "energy")
    expected = [sum(sum_energy(path, BEGIN + n) for path in paths) for n in range(1, 31)]
    assert curve.x == pytest.approx(expected)
    assert found.machine.find_energy_J(1e12) == pytest.approx(sum(sum_energy(path, 1e12) for path in paths))
    assert found.machine.find_energy_J(0) == 0
    assert expected[-1] > 1000


def test_a_run_without_energy_has_no_such_axis(run):
    write(run, "a", [[BEGIN + k, 5] for k in range(9)], "time [s],cpu [%]")
    assert view(run).axes == ("step", "samples", "time")


def test_samples_are_read_incrementally_and_merged(run, monkeypatch):
    monkeypatch.setattr(machine_samples, "MAX_SAMPLES", 20)
    monkeypatch.setattr(machine_samples, "BLOCK_SAMPLES", 7)
    rows = draw_rows(333)
    rows[100][1] = 4000.0  # a spike
    path = write(run, "a", rows)
    content = path.read_bytes()
    growing = RunView(run)
    for end in (300, 1000, 5000, len(content)):
        path.write_bytes(content[:end])
        growing.refresh()
        assert growing.machine.nodes
    [node] = growing.machine.nodes.values()
    cpu = node.columns["cpu"]
    assert len(node.times) <= 20
    assert (max(cpu.high), sum(cpu.count), node.times[-1]) == (4000.0, 333, BEGIN + 332)
    assert sum(cpu.total) == sum(row[1] for row in rows)
    assert node.totals == {"memory total": 8000}
    assert node.find_energy_J(1e12) == pytest.approx(sum_energy(path, 1e12))
    path.write_bytes(content[:1000])  # replaced
    growing.refresh()
    assert sum(node.columns["cpu"].count) == content[:1000].count(b"\n") - 3


def test_unusable_files_are_problems(run, monkeypatch):
    run.events.write_text("")
    write(run, "a", [[BEGIN, 5], [BEGIN + 1, "x"]], "time [s],cpu [%]")
    (run.monitor / "b.csv").write_text("what,ever\n1,2\n")
    (run.monitor / "c.csv").mkdir()
    problems = view(run).problems
    assert problems[0].startswith(f"{run.monitor}/b.csv has no known column")
    assert problems[1] == f"cannot read {run.monitor}/c.csv: it is not a regular file"
    assert problems[2] == f"skipped 1 damaged line in {run.monitor}/a.csv"
    monkeypatch.setattr(machine_samples, "MAX_NODES", 1)
    assert view(run).problems[-1] == "samples of the first 1 of 3 nodes are kept"
