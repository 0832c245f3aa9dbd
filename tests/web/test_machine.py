"""Samples on the page have the values of the sample files, which are read here by csv alone."""

import csv
import math
import random
from pathlib import Path

import pytest

from paceline.report.run_view import view
from paceline.web.machine import MAX_CELLS, MAX_POINTS, build_machine, build_map
from run_lines import folder, started

BEGIN = 1.7e9
KINDS = ["cpu [%]", "memory used [MiB]", "network in [MB/s]", "network out [MB/s]"]


def write_samples(path: Path, count: int, ranks: list[int], gpus: int, seed: int) -> None:
    draw = random.Random(seed)
    names = [
        *KINDS,
        *(f"rank{rank} cpu [%]" for rank in ranks),
        *(f"gpu{gpu} power [W]" for gpu in range(gpus)),
    ]
    lines = ["# paceline samples 1", f"# node: {path.stem}", ",".join(["time [s]", *names])]
    for at in range(count):
        values = [f"{draw.uniform(1, 90):.1f}" if draw.randrange(30) else "" for _ in names]
        lines.append(",".join([f"{BEGIN + 2 + at:.3f}", *values]))
    path.write_text("\n".join([*lines, ""]))


def read_column(path: Path, name: str) -> list[tuple[float, float]]:
    rows = [row for row in csv.reader(path.read_text().splitlines()) if not row[0].startswith("#")]
    at = rows[0].index(name)
    return [(float(row[0]) - BEGIN, float(row[at]) if row[at] else math.nan) for row in rows[1:]]


def mean(values: list[float]) -> float | None:
    finite = [value for value in values if value == value]
    return sum(finite) / len(finite) if finite else None


@pytest.fixture
def run(tmp_path):
    made = folder(tmp_path / "run", [started(0, BEGIN) | {"ranks": 4, "plan": "dp=2,tp=2"}])
    made.monitor.mkdir()
    write_samples(made.monitor / "node1.csv", 700, [0, 1], 1, 1)
    write_samples(made.monitor / "node2.csv", 500, [2, 3], 0, 2)
    return made


@pytest.mark.parametrize(("chosen", "node"), [("", "node1"), ("0", "node1"), ("1", "node2"), ("7", "node1")])
def test_figures_have_the_means_of_the_samples(run, chosen, node):
    panel, tables = build_machine(view(run), chosen)
    assert panel["nodes"] == ["node1", "node2"]
    assert panel["nodes"][panel["node"]] == node
    path = run.monitor / f"{node}.csv"
    for title, line, column in (
        ("Processors", "cpu", "cpu [%]"),
        ("Network", "network out", "network out [MB/s]"),
        ("Processors by rank", f"rank{2 * (node == 'node2')}", f"rank{2 * (node == 'node2')} cpu [%]"),
    ):
        table, samples = tables[f"machine:{title}"], read_column(path, column)
        assert len(table["x"]) <= MAX_POINTS
        assert table["x"][-1] == pytest.approx(samples[-1][0])
        before = -math.inf
        for x, value in zip(table["x"], table[line], strict=True):
            expected = mean([value for time, value in samples if before < time <= x + 0.01])
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-3))
            before = x + 0.01
    titles = [figure["title"] for figure in panel["figures"]]
    assert ("GPU power" in titles) == (node == "node1")


def test_map_has_a_row_for_each_rank(run):
    panel, tables = build_map(view(run), "Processor time", view(run).summary.started)
    assert panel["titles"] == ["GPU power", "Processor time"]
    places = [(row["node"], row["rank"], row["dp"], row["tp"]) for row in panel["rows"]]
    assert places == [("node1", 0, 0, 0), ("node1", 1, 0, 1), ("node2", 2, 1, 0), ("node2", 3, 1, 1)]
    table, width = tables["map"], panel["width_s"]
    assert MAX_CELLS / 2 < len(table["x"]) <= MAX_CELLS + 1
    for at, row in enumerate(panel["rows"]):
        samples = read_column(run.monitor / f"{row['node']}.csv", f"rank{row['rank']} cpu [%]")
        for x, value in zip(table["x"], table[str(at)], strict=True):
            expected = mean([value for time, value in samples if x <= time < x + width])
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-3))


def test_map_grows_at_its_end_only(run):
    """A stream then sends only new cells."""
    _, before = build_map(view(run), "GPU power", None)
    with (run.monitor / "node1.csv").open("a") as file:
        file.write(f"{BEGIN + 703},50,50,50,50,50,50,50\n")
    _, after = build_map(view(run), "GPU power", None)
    size = len(before["map"]["x"])
    assert after["map"]["x"][:size] == before["map"]["x"]
    assert after["map"]["0"][: size - 1] == before["map"]["0"][: size - 1]


def test_run_without_samples_has_no_figures(tmp_path):
    empty = view(folder(tmp_path / "run", [started(0, BEGIN)]))
    assert build_machine(empty, "") == ({"nodes": [], "node": 0, "figures": []}, {})
    assert build_map(empty, "", None) == ({"titles": [], "rows": []}, {})
