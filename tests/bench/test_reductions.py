"""Minima, maxima, products and averages; several numbers of ranks in one run; algorithms of nccl."""

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from command import succeed
from harness import ranks
from paceline.bench.collectives.alpha_beta import fit_rows, links_from_fits
from paceline.bench.collectives.backends import TorchPeers, _torch_backend, find_cuda_support
from paceline.bench.collectives.latency import explain_latencies
from paceline.bench.collectives.measure import Rank, measure_rows
from paceline.bench.collectives.operations import (
    AVERAGE,
    MAX,
    MIN,
    PRODUCT,
    REDUCTIONS,
    GroupRank,
    build_tensor,
    count_wrong,
)
from paceline.bench.collectives.request import (
    CollectiveRequest,
    algorithm_environ,
    parse_algorithms,
    parse_rank_counts,
)
from paceline.bench.collectives.workers import run_all_workers
from paceline.bench.report.busbw import _list_looks, draw
from paceline.bench.report.collectives import show
from paceline.bench.result import Result, read
from paceline.cli.measure.bench import collectives
from paceline.distributed.world import read_world
from paceline.errors import BenchError, Error
from paceline.plotting.figure import COLOURS

pytestmark = pytest.mark.processes
# Written by hand, rank by rank: not the functions of the package.
BY_HAND = {
    MIN: lambda column: min(column),
    MAX: lambda column: max(column),
    PRODUCT: math.prod,
    AVERAGE: lambda column: sum(column) / len(column),
}


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("reduction", BY_HAND)
def test_expected_values(reduction: str, size: int) -> None:
    operation = REDUCTIONS[f"all-reduce-{reduction}"]
    given = [
        build_tensor(operation.given(GroupRank(rank, size), 11), size, torch.float64, "cpu").tolist()
        for rank in range(size)
    ]
    assert len({*map(tuple, given)}) > 1, "ranks have different values"
    expected = build_tensor(operation.expected(GroupRank(0, size), 11), size, torch.float64, "cpu").tolist()
    assert expected == [BY_HAND[reduction](column) for column in zip(*given, strict=True)]
    others = [name for name in BY_HAND if name != reduction]
    for other in others:
        wrong = torch.tensor([BY_HAND[other](column) for column in zip(*given, strict=True)])
        assert count_wrong(wrong, operation.expected(GroupRank(0, size), 11), size) > 0, other


def measure_reductions(names: tuple[str, ...], dtypes: tuple[str, ...]) -> list:
    request = CollectiveRequest(
        operations=names, backends=("gloo",), sizes_bytes=(4, 600), dtypes=dtypes, seconds=0.002
    )
    world = read_world()
    backend = _torch_backend("gloo", torch.device("cpu"), 60.0)
    return [*measure_rows(request, Rank(world, ["here"] * world.size, [backend], TorchPeers()))]


@pytest.mark.parametrize("size", [2, 3])
def test_every_reduction_is_correct_on_gloo(size: int) -> None:
    items = ranks(size)(measure_reductions, tuple(REDUCTIONS), ("fp32", "fp64", "bf16"))[0]
    rows = [item for item in items if not isinstance(item, str)]
    assert not [row for row in rows if row["wrong"]]
    measured = {row["operation"] for row in rows}
    assert {name for name in REDUCTIONS if name.startswith("all-reduce")} <= measured
    left_out = {item.split()[1] for item in items if isinstance(item, str) and "is left out" in item}
    assert measured | left_out == {*REDUCTIONS}


@pytest.mark.mpi("mpirun")
def test_an_operation_that_a_back_end_lacks_is_reported(tmp_path: Path) -> None:
    """MPI has no average."""
    words = ("--backends", "gloo,mpi", "--operations", "all-reduce-average,all-reduce-max")
    more = ("--ranks", "2", "--sizes", "1KiB", "--seconds", "0.005")
    done = succeed("bench", "collectives", *words, *more, "--json", "a.json", at=tmp_path)
    assert "mpi all-reduce-average is left out: mpi has no such operation" in done.out
    assert done.out.count("no such operation") == 1
    rows = read(tmp_path / "a.json", "collectives").rows
    assert {(row["operation"], row["backend"]) for row in rows} == {
        ("all-reduce-average", "gloo"),
        ("all-reduce-max", "gloo"),
        ("all-reduce-max", "mpi"),
    }


def test_every_series_of_a_picture_looks_different(tmp_path: Path) -> None:
    """More series than colours have other markers, and the sizes of an axis do not touch."""
    timing = {"p95_s": 1.0, "wrong": 0, "busbw_GBps": 0.5}
    rows = [
        {**row, **timing, "dtype": dtype}
        for dtype in ("fp32", "fp16", "bf16", "int8", "uint8")
        for row in make_rows({2: 1.5e-4, 4: 2.5e-4}, "all-reduce")
    ]
    result = Result(
        kind="collectives",
        keys=("operation", "ranks", "dtype", "bytes"),
        settings={"ranks": [2, 4]},
        rows=tuple(rows),
        summary=fit_rows(rows),
    )
    draw(result, tmp_path / "a.svg")
    assert "4 ranks, uint8" in (tmp_path / "a.svg").read_text()
    looks = _list_looks()
    assert len({*looks}) == len(looks) > len(COLOURS)


@pytest.mark.slow
def test_several_numbers_of_ranks_in_one_run(tmp_path: Path) -> None:
    words = ("--backends", "gloo", "--operations", "all-reduce,all-reduce-max", "--sizes", "1KiB,64KiB")
    files = ("--json", "a.json", "--plot", "a.svg", "--place", "in", "--seconds", "0.005")
    done = succeed("bench", "collectives", "--ranks", "3,2", *words, *files, at=tmp_path)
    result = read(tmp_path / "a.json", "collectives")
    assert result.settings["ranks"] == [2, 3]
    assert [(row["operation"], row["ranks"], row["wrong"]) for row in result.rows] == [
        (name, count, 0) for count in (2, 3) for name in ("all-reduce", "all-reduce-max") for _ in range(2)
    ]
    assert {(row["operation"], row["ranks"]) for row in result.summary} == {
        (name, count) for count in (2, 3) for name in ("all-reduce", "all-reduce-max")
    }
    assert "2, 3 ranks" in done.out
    drawn = (tmp_path / "a.svg").read_text()
    assert "2 ranks" in drawn
    assert "3 ranks" in drawn


def test_only_sums_of_the_default_algorithm_become_links() -> None:
    plain, other = make_rows({2: 1e-4}), make_rows({2: 1e-4}, "all-reduce-max")
    swept = [{**row, "algorithm": "Tree"} for row in make_rows({2: 1e-4}, "reduce")]
    rows = [{**row, "spans": "node"} for row in (*plain, *other, *swept)]
    summary = fit_rows(rows)
    assert len(summary) == 3
    assert {link.collective for link in links_from_fits(summary)} == {"all-reduce"}


@pytest.mark.mpi("mpirun")
@pytest.mark.slow
def test_reductions_of_mpi_are_correct(tmp_path: Path) -> None:
    words = ("--backends", "mpi", "--operations", ",".join(REDUCTIONS), "--sizes", "1KiB")
    succeed("bench", "collectives", *words, "--seconds", "0.005", "--json", "a.json", at=tmp_path)
    rows = read(tmp_path / "a.json", "collectives").rows
    assert {row["operation"] for row in rows} == {name for name in REDUCTIONS if not name.endswith(AVERAGE)}
    assert not [row for row in rows if row["wrong"]]


def make_rows(alpha: dict[int, float], operation: str = "all-reduce") -> list[dict]:
    facts = {"operation": operation, "backend": "gloo", "axis": "world", "dtype": "fp32", "place": "in"}
    factor = {count: 2 * (count - 1) / count for count in alpha}
    return [
        {**facts, "ranks": count, "bytes": size, "median_s": alpha_s + factor[count] * size / 1e9}
        for count, alpha_s in alpha.items()
        for size in (1024, 2**16, 2**22)
    ]


@pytest.mark.parametrize(
    ("alpha", "words"),
    [
        ({n: 2 * (n - 1) * 1e-4 for n in (2, 4, 8, 16)}, "as in a ring, 100.0 µs per step"),
        ({n: 2 * math.log2(n) * 1e-4 for n in (2, 4, 8, 16)}, "as in a tree, 100.0 µs per step"),
        ({2: 2e-4, 4: 5e-4, 8: 9e-4}, "does not show a ring or a tree clearly"),
        ({n: 1e-4 * n**2 for n in (2, 4, 8)}, "does not show a ring or a tree clearly"),
        (dict.fromkeys((2, 4, 8, 16), 1e-4), "does not show a ring or a tree clearly"),
        ({2: 4e-4, 4: 2e-4, 8: 1e-4}, "does not show a ring or a tree clearly"),
    ],
    ids=["ring", "tree", "between", "square", "constant", "falling"],
)
def test_latency_shows_ring_or_tree(alpha: dict[int, float], words: str) -> None:
    [sentence] = explain_latencies(fit_rows(make_rows(alpha)))
    assert sentence.startswith("all-reduce, gloo, fp32, in place: α ")
    assert words in sentence
    assert explain_latencies(fit_rows(make_rows({2: alpha[2], 4: alpha[4]}))) == []


def test_algorithms_reach_the_ranks_and_name_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(request: CollectiveRequest, count: int, environ: dict) -> object:
        seen.append((count, dict(environ)))
        yield "nccl: a note"
        yield {"operation": "all-reduce", "ranks": count}

    monkeypatch.setattr("paceline.bench.collectives.workers.run_workers", run)
    request = CollectiveRequest(backends=("nccl",), sizes_bytes=(4,), algorithms=("Ring", "Tree/LL128"))
    rows = [item for item in run_all_workers(request, (2, 4)) if not isinstance(item, str)]
    assert seen == [
        (count, environ)
        for count in (2, 4)
        for environ in ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL128"})
    ]
    assert [row["algorithm"] for row in rows] == ["Ring", "Tree/LL128"] * 2
    assert algorithm_environ("PAT") == {"NCCL_ALGO": "PAT"}


def test_counts_and_algorithms_are_parsed() -> None:
    assert parse_rank_counts("8,2,4,2") == (2, 4, 8)
    assert parse_algorithms("ring, tree/ll128,RING") == ("Ring", "Tree/LL128")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_number_of_a_table_is_cut_off(is_terminal: bool) -> None:
    """In 80 columns, with types and numbers of ranks: a terminal shows fewer columns, a file has all."""
    timing = {"min_s": 1e-4, "p95_s": 3e-4, "n": 100, "algbw_GBps": 0.123, "busbw_GBps": 0.456, "wrong": 0}
    rows = [
        {**row, **timing, "dtype": dtype}
        for dtype in ("fp32", "uint8")
        for row in make_rows({2: 1.5e-4, 4: 2.5e-4}, "reduce-scatter-average")
    ]
    settings = {"ranks": [2, 4], "seconds": 0.1}
    result = Result(kind="collectives", settings=settings, rows=tuple(rows), summary=fit_rows(rows))
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=is_terminal)
    show(console, result)
    text = console.export_text()
    table, _, fits = text.partition("time = α")
    assert "…" not in text
    assert "reduce-scatter-average" in fits
    assert ("p95" in table) == (not is_terminal)
    assert max(map(len, table.splitlines())) <= (80 if is_terminal else 120)


@pytest.mark.parametrize(
    ("library", "parameters", "environ", "expected"),
    [
        ("Open MPI v5.0.3", "mca:opal:base:param:mpi_built_with_cuda_support:value:true\n", {}, None),
        (
            "Open MPI v4.1.4",
            "mca:mpi:base:param:mpi_built_with_cuda_support:value:false\n",
            {"MV2_USE_CUDA": "1"},
            "this Open MPI was built without CUDA",
        ),
        ("MPICH Version: 4.0.2", "", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, None),
        ("MPICH Version: 4.0.2", "", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "none of MPICH_GPU_SUPPORT_ENABLED"),
    ],
    ids=["open", "open without", "cray", "mpich without"],
)
def test_an_mpi_that_is_not_cuda_aware_is_refused(
    library: str, parameters: str, environ: dict[str, str], expected: str | None
) -> None:
    found = find_cuda_support(library, parameters, environ)
    assert found == expected if expected is None else (found or "").startswith(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "2,x"}, "--ranks must be numbers such as 2 or 2,4,8, got '2,x'"),
        ({"ranks": "1,2"}, "collectives require at least 2 ranks, got 1; use --ranks 2 or more"),
        ({"nccl": "rign"}, "--nccl rign: unknown algorithm 'rign'; choose from Ring, Tree"),
        ({"device": "tpu"}, "--device must be cpu or cuda, got 'tpu'"),
        ({"device": "cuda", "backends": "gloo"}, "finds no GPU; leave it out"),
        ({"nccl": "ring/x"}, "--nccl ring/x: unknown protocol 'x'; choose from LL, LL128, Simple"),
        (
            {"nccl": "ring", "backends": "gloo"},
            "--nccl selects algorithms of nccl, got back ends gloo; add --backends nccl",
        ),
    ],
)
def test_bad_input_is_refused(options: dict, message: str) -> None:
    with pytest.raises(Error) as refused:
        collectives.collectives(**options)
    assert isinstance(refused.value, BenchError)
    assert message in str(refused.value)
