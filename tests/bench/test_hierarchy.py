"""Levels of memory: their sizes, the arithmetic of copies, chains of accesses; the whole command."""

import gc
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from command import paceline, succeed
from paceline.bench.hierarchy import memory
from paceline.bench.hierarchy.levels import list_network
from paceline.bench.hierarchy.memory import MemoryLevel, build_chain, list_levels, measure_copy_Bps
from paceline.bench.report.hierarchy import draw, show
from paceline.bench.result import Result
from paceline.cluster.facts import Link
from paceline.cluster.machine import Interface
from paceline.cluster.published import parse


def write_caches(folder: Path, *caches: tuple[str, str, str]) -> Path:
    for at, values in enumerate(caches):
        (folder / f"index{at}").mkdir(parents=True)
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (folder / f"index{at}" / name).write_text(f"{value}\n")
    return folder


def test_levels_are_the_data_caches_and_the_memory(tmp_path: Path) -> None:
    folder = write_caches(
        tmp_path,
        ("1", "Data", "48K"),
        ("1", "Instruction", "32K"),
        ("2", "Unified", "2048K"),
        ("3", "Unified", "105M"),
        ("4", "Unified", "unknown"),
    )
    (tmp_path / "index9").mkdir()  # without files
    *caches, last = list_levels(folder)
    assert [(level.name, level.size_bytes) for level in caches] == [
        ("L1 cache", 48 * 2**10),
        ("L2 cache", 2 * 2**20),
        ("L3 cache", 105 * 2**20),
    ]
    assert [level.used_bytes for level in caches] == [24 * 2**10, 8 * 48 * 2**10, 8 * 2 * 2**20]
    halves = list_levels(write_caches(tmp_path / "near", ("1", "Data", "48K"), ("2", "Unified", "512K")))
    assert halves[1].used_bytes == 256 * 2**10
    assert last.name == "memory"


def test_a_machine_without_caches_has_its_memory(tmp_path: Path) -> None:
    assert [level.name for level in list_levels(tmp_path)] == ["memory"]


@pytest.mark.parametrize("overhead_s", [0.0, 5e-7])
def test_time_of_a_call_cancels(overhead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 24 KiB at 100 GB/s takes half as long as its call, which would halve its rate."""

    def take(source: np.ndarray, target: np.ndarray) -> float:
        return overhead_s + (source.nbytes + target.nbytes) / 100e9

    monkeypatch.setattr(memory, "_measure_fastest", take)
    assert measure_copy_Bps(MemoryLevel("L1 cache", 48 * 2**10, 24 * 2**10)) == pytest.approx(100e9, rel=1e-3)
    monkeypatch.setattr(memory, "_measure_fastest", lambda source, target: 1e-6)
    assert measure_copy_Bps(MemoryLevel("L1 cache", 48 * 2**10, 24 * 2**10)) is None


@pytest.mark.parametrize("count", [1, 32, 5_000])
def test_a_chain_visits_every_link_once(count: int) -> None:
    """In random order: neighbors of the chain are seldom neighbors in memory. No link remains afterwards."""
    assert gc.isenabled()
    with build_chain(count) as first:
        assert not gc.isenabled()
        visited, link = [], first
        for _ in range(count):
            visited.append(id(link))
            link = link.next
        assert link is first
    assert len({*visited}) == count
    steps = np.abs(np.diff(visited)) if count > 100 else np.array([1e6])
    assert np.median(steps) > 4096
    assert gc.isenabled()
    assert first.next is None


def test_nominal_and_measured_rates_of_the_network() -> None:
    def port(
        name: str, kind: str, Mbps: int | None, generation: str | None = None, up: bool = True
    ) -> Interface:
        return Interface(name=name, kind=kind, up=up, Mbps=Mbps, generation=generation)

    ports = (
        port("mlx5_0", "infiniband", 400_000, "4X NDR"),
        port("qib0", "infiniband", 40_000, "4X QDR"),
        port("ib1", "infiniband", 56_000, "4X FDR"),
        port("eth0", "ethernet", 25_000),
        port("eth1", "virtual", None),
        port("mlx5_1", "infiniband", 100_000, "4X EDR", up=False),
    )
    *rows, note = list_network(ports, None)
    nominal = {row["level"]: row["nominal_Bps"] for row in rows}
    assert nominal == {
        "network mlx5_0, infiniband 4X NDR": 50e9,
        "network qib0, infiniband 4X QDR": 4e9,
        "network ib1, infiniband 4X FDR": pytest.approx(6.8e9, rel=0.01),
        "network eth0, ethernet": pytest.approx(3.125e9),
    }
    assert "needs ranks on two nodes" in note

    def link(collective: str, Bps: float, source: str = "measured") -> Link:
        facts = {"beta_Bps": {"value": Bps, "source": source}, "alpha_s": {"value": 2e-6, "source": source}}
        return Link.model_validate({"axis": "across", "collective": collective, **facts})

    links = (link("all-reduce", 48e9), link("send", 46e9), link("send", 90e9, "declared"))
    cluster = parse("h100:8x2").model_copy(update={"links": links})
    [row] = list_network((), cluster)
    assert (row["level"], row["Bps"], row["latency_s"]) == ("between nodes, cluster.json", 46e9, 2e-6)


def test_the_table_and_the_figure_show_nominal_rates(tmp_path: Path) -> None:
    rows = [
        {"level": "memory", "bytes": 2**28, "Bps": 12e9, "nominal_Bps": None, "latency_s": 9e-8},
        {"level": "network mlx5_0, infiniband 4X NDR", "bytes": 0, "Bps": None, "nominal_Bps": 50e9}
        | {"latency_s": None},
        {"level": "of an older result [/x]", "bytes": 1, "Bps": 1e9, "latency_s": None},
    ]
    result = Result(kind="hierarchy", rows=tuple(rows))
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, result)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines][2][-2:] == ["50", "—"]
    assert "[/x]" in lines[3]
    draw(result, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "nominal" in text
    draw(result.model_copy(update={"rows": (rows[0],)}), tmp_path / "b.svg")
    assert "nominal" not in (tmp_path / "b.svg").read_text()


@pytest.mark.processes
@pytest.mark.slow
def test_all_levels_of_this_machine(tmp_path: Path) -> None:
    words = ("bench", "hierarchy", "--seconds", "2", "--device", "cpu", "--json", "a.json", "--plot", "a.svg")
    done = succeed(*words, at=tmp_path)
    result = json.loads((tmp_path / "a.json").read_text())
    rows = {row["level"]: row for row in result["rows"]}
    names = [level.name for level in list_levels()]
    assert list(rows)[: len(names)] == names
    assert {"loopback, two ranks", "disk, written"} <= {*rows}
    assert all(row["Bps"] is None or row["Bps"] > 0 for row in rows.values())
    assert rows["memory"]["Bps"] > 1e8
    assert 0 < rows["loopback, two ranks"]["latency_s"] < 1
    assert all(name in done.out for name in rows)
    assert any("no CUDA device" in note for note in result["notes"])
    assert f"the disk is that of {tmp_path}" in result["notes"]
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_a_directory_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    result = paceline("bench", "hierarchy", "--directory", "nowhere", at=tmp_path)
    assert result.status == 2
    assert result.err.startswith("paceline: ")
    assert "nowhere" in result.err
