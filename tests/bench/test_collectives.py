"""Collectives: definitions, checks of results, axes, fits, and the command over gloo and MPI."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from command import MPIRUN, TORCHRUN, Result, paceline, start, succeed
from harness import ranks
from paceline.bench.collectives.alpha_beta import fit, fit_rows, links_from_fits
from paceline.bench.collectives.backends import (
    TORCH_IN_PLACE,
    TORCH_OUT_OF_PLACE,
    Call,
    TorchPeers,
    _torch_backend,
)
from paceline.bench.collectives.measure import Rank, measure_rows
from paceline.bench.collectives.operations import (
    OPERATIONS,
    GroupRank,
    bandwidths_GBps,
    build_tensor,
    count_wrong,
)
from paceline.bench.collectives.rank_groups import check_axes, find_axes
from paceline.bench.collectives.request import DTYPES, KEYS, CollectiveRequest, parse_sizes
from paceline.bench.result import Result as ResultFile
from paceline.bench.result import read, write
from paceline.bench.timer import Clock
from paceline.cli.measure.bench import collectives
from paceline.distributed.world import World, read_world
from paceline.errors import BenchError, Error, PlanError

pytestmark = pytest.mark.processes

QUICK = ("--seconds", "0.005")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
with_mpi = pytest.mark.parametrize(
    "backends",
    [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("gloo,mpi", marks=pytest.mark.mpi("mpirun"))],
)


# --- definitions ---


@pytest.mark.parametrize("n", [2, 3, 4, 8, 1000])
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all-reduce", lambda n: 2 * (n - 1) / n),
        ("reduce-scatter", lambda n: (n - 1) / n),
        ("all-gather", lambda n: (n - 1) / n),
        ("all-to-all", lambda n: (n - 1) / n),
        ("scatter", lambda n: (n - 1) / n),
        ("gather", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1),
        ("reduce", lambda n: 1),
        ("send-recv", lambda n: 1),
    ],
)
def test_bandwidths_follow_nccl_tests(name, factor, n):
    algbw, busbw = bandwidths_GBps(OPERATIONS[name], n, 3 * 10**9, 2.0)
    assert (algbw, busbw) == (1.5, 1.5 * factor(n))


def elements(name: str, rank: int, size: int, count: int) -> tuple[list[float], list[float]]:
    """Return the values of a rank before and after, with `count` elements of S."""
    operation, at = OPERATIONS[name], GroupRank(rank, size)
    before, after = (
        build_tensor(blocks(at, count), size, torch.float32, "cpu")
        for blocks in (operation.given, operation.expected)
    )
    inputs, outputs = operation.elements(at, count)
    assert len(before) in (0, inputs)
    assert len(after) in (0, outputs)
    return before.tolist(), after.tolist()


def test_values_before_and_after():
    assert [elements("all-reduce", r, 4, 4) for r in range(4)] == [
        ([r, r + 1, r + 2, r + 3], [6, 10, 14, 18]) for r in range(4)
    ]
    assert [elements("reduce-scatter", r, 4, 4) for r in range(4)] == [
        ([r, r + 1, r + 2, r + 3], [s]) for r, s in enumerate([6, 10, 14, 18])
    ]
    assert [elements("all-gather", r, 2, 4) for r in range(2)] == [
        ([r, r + 1], [0, 1, 1, 2]) for r in range(2)
    ]
    assert [elements("all-to-all", r, 2, 4) for r in range(2)] == [
        ([0, 1, 2, 3], [0, 1, 1, 2]),
        ([1, 2, 3, 4], [2, 3, 3, 4]),
    ]
    assert [elements("broadcast", r, 2, 3) for r in range(2)] == [([0, 1, 2], [0, 1, 2]), ([], [0, 1, 2])]
    assert [elements("reduce", r, 2, 3) for r in range(2)] == [([0, 1, 2], [1, 3, 5]), ([1, 2, 3], [])]
    assert [elements("scatter", r, 2, 4) for r in range(2)] == [([0, 1, 2, 3], [0, 1]), ([], [2, 3])]
    assert [elements("gather", r, 2, 4) for r in range(2)] == [([0, 1], [0, 1, 1, 2]), ([1, 2], [])]
    assert [elements("send-recv", r, 3, 2) for r in range(3)] == [
        ([0, 1], [2, 3]),
        ([1, 2], [0, 1]),
        ([2, 3], [1, 2]),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]
)
@pytest.mark.parametrize("size", [2, 8, 500])
def test_sums_are_exact_in_every_type(dtype, size):
    """Compare with a sum in the same type, rank by rank, which must not round."""
    total = torch.zeros(40, dtype=dtype)
    for rank in range(size):
        total += build_tensor(OPERATIONS["all-reduce"].given(GroupRank(rank, size), 40), size, dtype, "cpu")
    expected = OPERATIONS["all-reduce"].expected(GroupRank(0, size), 40)
    assert count_wrong(total, expected, size) == 0
    total[7] *= 2
    total[9] = 1
    assert count_wrong(total, expected, size) == 2


# --- on ranks of the test harness ---


def gloo_backend(**calls: Mapping[str, Call]):
    return replace(_torch_backend("gloo", torch.device("cpu"), 60.0), **calls)


def measure_with(request: CollectiveRequest, backend) -> list:
    rank = Rank(read_world(), ["here"] * read_world().size, [backend], TorchPeers())
    return [*measure_rows(request, rank)]


def measure_operations(operations: tuple[str, ...], dtypes: tuple[str, ...] = ("fp32",)) -> list:
    return measure_with(
        CollectiveRequest(
            operations=operations, backends=("gloo",), sizes_bytes=(4, 1000), dtypes=dtypes, seconds=0.002
        ),
        gloo_backend(),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_is_correct(size):
    items = ranks(size)(measure_operations, tuple(OPERATIONS))[0]
    rows = [item for item in items if not isinstance(item, str)]
    assert {row["operation"] for row in rows} == {*OPERATIONS}
    assert {row["place"] for row in rows} == {"in", "out"}
    assert not [row for row in rows if row["wrong"]]
    assert all(row["n"] >= 5 and 0 < row["min_s"] <= row["median_s"] <= row["p95_s"] for row in rows)


def test_every_type_is_correct():
    operations = ("all-reduce", "all-gather")
    items = ranks(2)(measure_operations, operations, tuple(DTYPES))[0]
    rows = [item for item in items if not isinstance(item, str)]
    assert {(row["operation"], row["dtype"]) for row in rows} == {
        (name, dtype) for name in operations for dtype in DTYPES
    }
    assert not [row for row in rows if row["wrong"]]


def measure_corrupted(name: str) -> list:
    """Return the rows of an operation whose result is wrong on a single rank."""

    def corrupt(call: Call) -> Call:
        def prepared(group, at, input, output):
            run = call(group, at, input, output)

            def once():
                if name == "barrier":
                    return None
                result = run()
                if at.rank == (0 if name in ("gather", "reduce") else 1):
                    output[0:1] += 1
                return result

            return once

        return prepared

    calls = {
        kind: {operation: corrupt(call) if operation == name else call for operation, call in table.items()}
        for kind, table in (("in_place", TORCH_IN_PLACE), ("out_of_place", TORCH_OUT_OF_PLACE))
    }
    request = CollectiveRequest(operations=(name,), backends=("gloo",), sizes_bytes=(64,), seconds=0.002)
    return measure_with(request, gloo_backend(**calls))


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_results_are_detected(name):
    rows = [item for item in ranks(2)(measure_corrupted, name)[0] if not isinstance(item, str)]
    assert rows
    assert all(row["wrong"] == 1 for row in rows)


def measure_with_clock(seconds: float) -> list:
    """Measure with a clock that advances by `seconds` in each repetition, and stands still otherwise."""
    now = 0.0

    def timed(call: Call) -> Call:
        def prepared(group, at, input, output):
            run = call(group, at, input, output)

            def once():
                nonlocal now
                now += seconds
                return run()

            return once

        return prepared

    clock = Clock(lambda: now, lambda marks: [mark - marks[0] for mark in marks])
    calls = {
        "in_place": {k: timed(c) for k, c in TORCH_IN_PLACE.items()},
        "out_of_place": {k: timed(c) for k, c in TORCH_OUT_OF_PLACE.items()},
    }
    operations = tuple(name for name in OPERATIONS if name != "barrier")
    return measure_with(
        CollectiveRequest(operations=operations, backends=("gloo",), sizes_bytes=(2**10,), seconds=0.002),
        gloo_backend(clock=clock, **calls),
    )


def test_busbw_with_a_synthetic_clock():
    """The clock counts in powers of two, so that nothing is rounded."""
    for row in ranks(2)(measure_with_clock, 0.25)[0]:
        if not isinstance(row, str):
            assert row["median_s"] == row["min_s"] == row["p95_s"] == 0.25
            assert row["algbw_GBps"] == 2**10 / 0.25 / 1e9
            assert row["busbw_GBps"] == row["algbw_GBps"] * {
                "all-reduce": 1.0,
                "broadcast": 1,
                "reduce": 1,
                "send-recv": 1,
            }.get(row["operation"], 0.5)


# --- axes ---


def test_axes_of_a_plan_and_of_nodes():
    hosts = ["a"] * 4
    axes, notes = find_axes((), "tp=2", hosts)
    assert {axis.name: axis.groups for axis in axes} == {
        "replicate": ((0, 2), (1, 3)),
        "tp": ((0, 1), (2, 3)),
    }
    assert not notes
    axes, _ = find_axes(("node", "across", "world"), None, ["a", "a", "b", "b"])
    assert {axis.name: (axis.groups, axis.spans) for axis in axes} == {
        "node": (((0, 1), (2, 3)), "node"),
        "across": (((0, 2), (1, 3)), "across"),
        "world": (((0, 1, 2, 3),), "both"),
    }
    axes, _ = find_axes((), "hsdp,replicate=2,tp=2", ["a"] * 8)
    assert {axis.name: axis.groups for axis in axes}["shard"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    axes, notes = find_axes(("node", "across"), None, hosts)
    assert [axis.name for axis in axes] == ["node"]
    assert notes == ["axis across is left out: one rank per group, because all ranks are on a"]
    _, notes = find_axes(("world", "node"), None, ["a", "a", "b"])
    assert notes == ["axis node is left out: its groups have 1 to 2 ranks"]
    with pytest.raises(BenchError, match="nothing to measure on 2 ranks"):
        find_axes(("across",), None, ["a", "a"])


# --- α and β ---


def test_fit_recovers_a_known_line():
    sizes_bytes = [2**at for at in range(10, 27)]
    line = fit(sizes_bytes, [2e-5 + size / 3e9 for size in sizes_bytes])
    assert (line.alpha_s, line.beta_Bps) == (pytest.approx(2e-5, rel=1e-9), pytest.approx(3e9, rel=1e-9))
    assert line.misfit < 1e-9
    assert line.alpha_error_s < 1e-12


def test_standard_errors_of_a_fit_cover_the_true_values():
    """Two standard errors cover them in about 95 of 100 cases, with equal relative noise at all sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes_bytes = [4**at * 1024 for at in range(9)]
    covered = []
    for _ in range(200):
        noise = (1 + 0.05 * torch.randn(len(sizes_bytes), generator=generator)).tolist()
        line = fit(
            sizes_bytes,
            [(2e-5 + size / 3e9) * factor for size, factor in zip(sizes_bytes, noise, strict=True)],
        )
        covered.append(
            (
                abs(line.alpha_s - 2e-5) < 2 * line.alpha_error_s,
                abs(line.beta_Bps - 3e9) < 2 * line.beta_error_Bps,
            )
        )
    assert all(170 <= sum(cases) <= 199 for cases in zip(*covered, strict=True))


def test_fits_of_degenerate_data():
    two = fit([1e3, 1e6], [1e-5, 1e-3])
    assert (two.alpha_error_s, two.beta_error_Bps) == (None, None)
    flat = fit([1e3, 2e3, 4e3], [3e-5, 3e-5, 3e-5])
    assert flat.alpha_s == pytest.approx(3e-5)
    assert flat.beta_Bps is None or flat.beta_Bps > 1e15
    steep = fit([1e3, 1e6, 1e9], [1e-6, 2e-3, 4.0])  # α would be below 0
    assert steep.alpha_s == 0
    assert steep.beta_Bps


def row(operation: str, size: int, seconds: float, **more) -> dict:
    facts = {
        "operation": operation,
        "backend": "gloo",
        "axis": "world",
        "spans": "node",
        "ranks": 4,
        "dtype": "fp32",
        "place": "in",
    }
    return facts | {"bytes": size, "median_s": seconds, "wrong": 0} | more


def test_links_from_fits_are_bus_bandwidths():
    busbw, alpha = 2e9, 1e-4
    measured = [
        row(name, size, alpha + OPERATIONS[name].factor(4) * size / busbw, **more)
        for name, more in (
            ("all-reduce", {}),
            ("send-recv", {}),
            ("all-gather", {"spans": "both"}),
            ("reduce", {"axis": "across", "spans": "across"}),
        )
        for size in (1024, 2**16, 2**22)
    ]
    slower = [row("all-reduce", size, 2 * alpha + 9 * size / busbw, dtype="fp64") for size in (1024, 2**22)]
    cluster_links = {
        (link.axis, link.collective): link
        for link in links_from_fits(fit_rows([*slower, *measured, row("barrier", 0, 1e-4)]))
    }
    assert {*cluster_links} == {("node", "all-reduce"), ("node", "send"), ("across", "reduce")}
    for link in cluster_links.values():
        assert (link.backend, link.ranks, link.alpha_s.source) == ("gloo", 4, "measured")
        assert (link.alpha_s.value, link.beta_Bps.value) == (pytest.approx(alpha), pytest.approx(busbw))


# --- the command ---


def bench(*words: str | Path, at: Path, **options: object) -> Result:
    return succeed("bench", "collectives", *QUICK, *words, at=at, **ONE_THREAD, **options)


FITTED = {"all-reduce", "send", "all-to-all"}


@with_mpi
def test_two_ranks(backends, tmp_path):
    done = bench(
        "--backends", backends, "--sizes", "1KiB,1MiB", "--json", "a.json", "--plot", "a.svg", at=tmp_path
    )
    result = read(tmp_path / "a.json", "collectives")
    assert {(row["operation"], row["backend"]) for row in result.rows} == {
        (name, backend) for name in OPERATIONS for backend in backends.split(",")
    }
    assert not [row for row in result.rows if row["wrong"]]
    assert {row["bytes"] for row in result.rows if row["operation"] == "all-reduce"} == {2**10, 2**20}
    assert "WRONG" not in done.out
    assert done.out.count("all-reduce") >= 2
    assert any("mpi4py" in note for note in result.notes) == ("mpi" in backends)
    fitted = {link.collective for link in links_from_fits(result.summary)}
    for _ in range(2):  # on a busy machine the fit of two sizes may fail
        if not fitted >= FITTED:
            bench("--backends", backends, "--sizes", "1KiB,1MiB", "--json", "b.json", at=tmp_path)
            again = read(tmp_path / "b.json", "collectives")
            fitted |= {link.collective for link in links_from_fits(again.summary)}
    assert fitted >= FITTED
    assert (tmp_path / "a.svg").read_text().count("reduce-scatter") >= 1 or "<svg" in (
        tmp_path / "a.svg"
    ).read_text()


@pytest.mark.mpi("mpirun")
@pytest.mark.slow
def test_four_ranks_along_the_axes_of_a_plan_with_notes(tmp_path):
    words = (
        "--backends",
        "gloo,mpi",
        "--operations",
        "all-reduce,barrier",
        "--plan",
        "tp=2",
        "--dtypes",
        "fp32,bf16",
    )
    bench("--ranks", "4", *words, "--sizes", "1KiB,8TiB", "--json", "a.json", at=tmp_path)
    result = read(tmp_path / "a.json")
    assert {(row["axis"], row["ranks"], row["groups"]) for row in result.rows} == {
        ("replicate", 2, 2),
        ("tp", 2, 2),
    }
    assert {(row["backend"], row["dtype"]) for row in result.rows} == {
        ("gloo", "fp32"),
        ("gloo", "bf16"),
        ("mpi", "fp32"),
    }
    notes = "\n".join(result.notes)
    assert "mpi all-reduce of bf16 is left out: " in notes
    assert "gloo all-reduce of 8.0 TiB, fp32, on axis tp is left out: it needs 32.0 TiB on each rank" in notes
    assert "4 ranks share" in notes


@pytest.mark.parametrize(
    ("program", "backends"),
    [
        pytest.param(TORCHRUN, "gloo", marks=pytest.mark.slow, id="torchrun"),
        pytest.param(MPIRUN, "mpi,gloo", marks=pytest.mark.mpi("mpirun"), id="mpirun"),
    ],
)
def test_ranks_of_another_launcher(program, backends, tmp_path):
    words = (
        "--backends",
        backends,
        "--operations",
        "all-reduce,send-recv",
        "--sizes",
        "4KiB",
        "--axes",
        "node,across",
        "--json",
        "a.json",
    )
    done = bench(*words, at=tmp_path, program=program)
    result = read(tmp_path / "a.json")
    assert {row["backend"] for row in result.rows} == {*backends.split(",")}
    assert {(row["axis"], row["ranks"]) for row in result.rows} == {("node", 2)}
    assert done.out.count("axis across is left out") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "backends", ["gloo", pytest.param("gloo,mpi", marks=[pytest.mark.mpi("mpirun"), pytest.mark.slow])]
)
def test_interrupt_prints_and_saves_rows(backends, tmp_path):
    words = (
        "--backends",
        backends,
        "--operations",
        "all-reduce",
        "--sizes",
        "1KiB:512KiB:2",
        "--seconds",
        "0.5",
        "--json",
        "a.json",
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def two_rows_are_measured() -> bool:
        return any(
            path.read_text().count("median_s") > 1 for path in temporary.glob("paceline-bench-*/found.jsonl")
        )

    with start("bench", "collectives", *words, at=tmp_path, TMPDIR=str(temporary), **ONE_THREAD) as running:
        running.wait_until(two_rows_are_measured, "two rows are measured")
        running.process.send_signal(signal.SIGINT)
        done = running.wait(60)
        running.wait_until_all_ended()
    assert done.status == 130, done.all
    assert "interrupted: the rows show what was measured until then" in done.out
    assert 0 < len(read(tmp_path / "a.json").rows) < 10
    assert not [*temporary.glob("paceline-bench-*")]


def test_killed_rank_is_named(tmp_path):
    words = ("--operations", "all-reduce", "--sizes", "1KiB", "--seconds", "100")
    with start("bench", "collectives", *words, at=tmp_path) as running:
        running.wait_until(lambda: len(running.ranks()) == 2, "both ranks run")
        victim = running.ranks()[1]
        victim.kill()
        done = running.wait(60)
        running.wait_until_all_ended()
    assert done.status == 2, done.all
    assert "paceline: rank 1 was killed by SIGKILL" in done.err


def test_compare_two_files(tmp_path):
    for name, seconds in (("a", 2e-3), ("b", 1e-3)):
        rows = tuple(row("broadcast", size, seconds, spread=0.1) for size in (2**10, 2**13, 2**16))
        write(ResultFile(kind="collectives", keys=KEYS, rows=rows), tmp_path / f"{name}.json")
    done = succeed("bench", "collectives", "--compare", "a.json", "b.json", at=tmp_path)
    assert "time in the first / time in the second: 2.000 (quartiles 2.000–2.000) over 3 rows" in done.out
    assert "0.283" in done.out  # 2 · √(0.1² + 0.1²)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backends": "glo"}, "unknown back end glo; did you mean gloo?"),
        ({"operations": "allreduce"}, "unknown operation allreduce; did you mean all-reduce?"),
        ({"dtypes": "fp33"}, "unknown type fp33; did you mean fp32?"),
        ({"place": "between"}, "unknown place between"),
        ({"sizes": "1KiB:"}, "--sizes 1KiB:: '' is not a number of bytes"),
        ({"sizes": "0B:1KiB"}, "a size must be at least 1 byte, got 0"),
        ({"sizes": "1MiB:1KiB"}, "the first size is larger than the last"),
        ({"sizes": "1KiB:1MiB:1"}, "the factor must be at least 2, got 1"),
        ({"sizes": "0B,1KiB"}, "a size must be at least 1 byte, got 0"),
        ({"axes": "tp"}, "axis tp requires a plan; add --plan, e.g. --plan tp=2"),
        ({"axes": "nodes"}, "unknown axis nodes; did you mean node?"),
        ({"plan": "tp=3"}, "plan tp=3 requires a multiple of tp=3 = 3 ranks, got 2"),
        ({"ranks": "1"}, "collectives require at least 2 ranks, got 1; use --ranks 2 or more"),
        ({"plot": Path("a.gif")}, "cannot draw a.gif: its name must end in .svg or .png"),
        ({"json": Path("none/a.json")}, "no such folder: none; create it first"),
        (
            {"compare": (Path("none.json"), Path("b.json"))},
            "cannot read none.json: No such file or directory",
        ),
    ],
)
def test_bad_input_is_refused_before_ranks_start(options, message):
    with pytest.raises(Error) as refused:
        collectives.collectives(**options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_missing_back_end_says_how_to_get_it(tmp_path):
    refused = paceline("bench", "collectives", "--backends", "gloo,nccl", at=tmp_path)
    assert refused.status == 2
    assert refused.err == (
        f"paceline: nccl cannot be measured: torch {torch.__version__} was built without nccl; "
        "install torch for CUDA or ROCm; or remove nccl from --backends\n"
    )


@pytest.mark.parametrize(("num_wrong", "status"), [(0, 0), (3, 1)])
def test_wrong_row_is_reported_and_fails(num_wrong, status, monkeypatch, capsys):
    times = {"min_s": 1e-3, "p95_s": 3e-3, "n": 5, "spread": 0.1, "algbw_GBps": 1.0, "busbw_GBps": 1.0}
    items = [
        row("all-reduce", 2**10, 2e-3, **times),
        row("all-reduce", 2**12, 3e-3, **times | {"wrong": num_wrong}),
        "something was left out",
    ]
    monkeypatch.setattr(
        "paceline.bench.collectives.workers.run_workers",
        lambda request, ranks, environ: (item for item in items),
    )
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(typer.Exit) as over:
        collectives.collectives(backends="gloo")
    assert over.value.exit_code == status
    out = capsys.readouterr().out
    assert ("3 WRONG" in out, "WRONG elements in 1 row of 2" in out) == (bool(num_wrong), bool(num_wrong))
    assert "something was left out" in out


def test_parse_sizes():
    assert parse_sizes("1KiB:64KiB") == (2**10, 2**12, 2**14, 2**16)
    assert parse_sizes("1KiB:3KiB:2") == (2**10, 2**11)
    assert parse_sizes("1MiB,1KiB,1KiB") == (2**10, 2**20)


def test_mpi_requires_an_mpi_launcher(monkeypatch):
    from paceline.bench.collectives import backends

    monkeypatch.setitem(backends.MISSING, "mpi", lambda: None)
    with pytest.raises(
        BenchError, match="mpi requires ranks started by mpirun or srun, got torchrun; use one of these"
    ):
        backends.check_backends(("mpi",), World(launcher="torchrun"), 2)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BenchError, match="mpirun is not installed; run apt-get install openmpi-bin"):
        backends.check_backends(("mpi",), World(), 2)
    monkeypatch.setitem(
        backends.MISSING, "mpi", lambda: "mpi4py is not installed; run: pip install 'paceline[mpi]'"
    )
    with pytest.raises(
        BenchError, match=r"not installed; run: pip install 'paceline\[mpi\]'; or remove mpi from --backends"
    ):
        backends.check_backends(("mpi",), World(), 2)
    with pytest.raises(PlanError):
        check_axes((), "tp=3", 4)
