"""Collectives: definitions, correctness beside speed, and the command on real ranks over gloo and MPI."""

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from command import PACELINE, Result, paceline, start, succeed
from harness import ranks
from paceline.bench.collectives import rank_groups as axes_of
from paceline.bench.collectives.alpha_beta import fit, fits, links
from paceline.bench.collectives.backends import (
    TORCH_IN_PLACE,
    TORCH_OUT_OF_PLACE,
    Call,
    TorchPeers,
    _torch_backend,
)
from paceline.bench.collectives.measure import Rank, rows
from paceline.bench.collectives.operations import OPERATIONS, GroupRank, bandwidths_GBps, tensor, wrong
from paceline.bench.collectives.request import DTYPES, KEYS, CollectiveRequest, sizes
from paceline.bench.result import Result as ResultFile
from paceline.bench.result import read, write
from paceline.bench.timer import Clock
from paceline.cli.bench import collectives
from paceline.distributed.world import World, read_world
from paceline.errors import BenchError, Error, PlanError

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", *PACELINE)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "paceline",
)
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
def test_bandwidths_are_those_of_nccl_tests(name, factor, n):
    algbw, busbw = bandwidths_GBps(OPERATIONS[name], n, 3 * 10**9, 2.0)
    assert (algbw, busbw) == (1.5, 1.5 * factor(n))


def elements(name: str, rank: int, size: int, count: int) -> tuple[list[float], list[float]]:
    """What a rank has before and after, of as many elements of S."""
    operation, at = OPERATIONS[name], GroupRank(rank, size)
    before, after = (
        tensor(blocks(at, count), size, torch.float32, "cpu")
        for blocks in (operation.given, operation.expected)
    )
    given, got = operation.elements(at, count)
    assert len(before) in (0, given)
    assert len(after) in (0, got)
    return before.tolist(), after.tolist()


def test_what_lies_where():
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
def test_sums_are_checked_in_every_type(dtype, size):
    """Against a sum in the type itself, one rank after another, in which nothing may be rounded."""
    found = torch.zeros(40, dtype=dtype)
    for rank in range(size):
        found += tensor(OPERATIONS["all-reduce"].given(GroupRank(rank, size), 40), size, dtype, "cpu")
    expected = OPERATIONS["all-reduce"].expected(GroupRank(0, size), 40)
    assert wrong(found, expected, size) == 0
    found[7] *= 2
    found[9] = 1
    assert wrong(found, expected, size) == 2


# --- on ranks, in the group of the harness ---


def backend(**calls: Mapping[str, Call]):
    return replace(_torch_backend("gloo", torch.device("cpu"), 60.0), **calls)


def found_by(request: CollectiveRequest, one) -> list:
    rank = Rank(read_world(), ["here"] * read_world().size, [one], TorchPeers())
    return [*rows(request, rank)]


def all_right(operations: tuple[str, ...], dtypes: tuple[str, ...] = ("fp32",)) -> list:
    return found_by(
        CollectiveRequest(
            operations=operations, backends=("gloo",), sizes_bytes=(4, 1000), dtypes=dtypes, seconds=0.002
        ),
        backend(),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_computes_what_it_should(size):
    found = [row for row in ranks(size)(all_right, tuple(OPERATIONS))[0] if not isinstance(row, str)]
    assert {row["operation"] for row in found} == {*OPERATIONS}
    assert {row["place"] for row in found} == {"in", "out"}
    assert not [row for row in found if row["wrong"]]
    assert all(row["n"] >= 5 and 0 < row["min_s"] <= row["median_s"] <= row["p95_s"] for row in found)


def test_every_type_comes_through():
    operations = ("all-reduce", "all-gather")
    found = [row for row in ranks(2)(all_right, operations, tuple(DTYPES))[0] if not isinstance(row, str)]
    assert {(row["operation"], row["dtype"]) for row in found} == {
        (name, dtype) for name in operations for dtype in DTYPES
    }
    assert not [row for row in found if row["wrong"]]


def spoiled(name: str, how: str) -> list:
    """Rows of an operation that goes wrong on one rank only."""

    def spoil(call: Call) -> Call:
        def prepared(group, at, input, output):
            run = call(group, at, input, output)

            def once():
                if name == "barrier":
                    return None
                done = run()
                if at.rank == (0 if name in ("gather", "reduce") else 1):
                    output[0:1] += 1
                return done

            return once

        return prepared

    calls = {
        kind: {operation: spoil(call) if operation == name else call for operation, call in table.items()}
        for kind, table in (("in_place", TORCH_IN_PLACE), ("out_of_place", TORCH_OUT_OF_PLACE))
    }
    spoilt = backend(**(calls if how == "spoiled" else {}))
    return found_by(
        CollectiveRequest(operations=(name,), backends=("gloo",), sizes_bytes=(64,), seconds=0.002), spoilt
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_comes_out_wrong_is_seen(name):
    found = [row for row in ranks(2)(spoiled, name, "spoiled")[0] if not isinstance(row, str)]
    assert found
    assert all(row["wrong"] == 1 for row in found)


def with_clock(seconds: float) -> list:
    """Time passes only when something runs, and each repetition takes as long."""
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
    return found_by(
        CollectiveRequest(operations=operations, backends=("gloo",), sizes_bytes=(2**10,), seconds=0.002),
        backend(clock=clock, **calls),
    )


def test_busbw_of_a_synthetic_clock_is_that_of_the_definition():
    """A clock of powers of two, so that nothing is rounded."""
    for row in ranks(2)(with_clock, 0.25)[0]:
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
    here = ["a"] * 4
    found, notes = axes_of.axes((), "tp=2", here)
    assert {axis.name: axis.groups for axis in found} == {
        "replicate": ((0, 2), (1, 3)),
        "tp": ((0, 1), (2, 3)),
    }
    assert not notes
    found, _ = axes_of.axes(("node", "across", "world"), None, ["a", "a", "b", "b"])
    assert {axis.name: (axis.groups, axis.spans) for axis in found} == {
        "node": (((0, 1), (2, 3)), "node"),
        "across": (((0, 2), (1, 3)), "across"),
        "world": (((0, 1, 2, 3),), "both"),
    }
    found, _ = axes_of.axes((), "hsdp,replicate=2,tp=2", ["a"] * 8)
    assert {axis.name: axis.groups for axis in found}["shard"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    found, notes = axes_of.axes(("node", "across"), None, here)
    assert [axis.name for axis in found] == ["node"]
    assert notes == ["axis across is left out: it has one rank in each group, and all ranks are on a"]
    _, notes = axes_of.axes(("world", "node"), None, ["a", "a", "b"])
    assert notes == ["axis node is left out: its groups have 1 to 2 ranks"]
    with pytest.raises(BenchError, match="nothing to measure among 2 ranks"):
        axes_of.axes(("across",), None, ["a", "a"])


# --- α and β ---


def test_a_planted_line_is_found():
    sizes_bytes = [2**at for at in range(10, 27)]
    found = fit(sizes_bytes, [2e-5 + size / 3e9 for size in sizes_bytes])
    assert (found.alpha_s, found.beta_Bps) == (pytest.approx(2e-5, rel=1e-9), pytest.approx(3e9, rel=1e-9))
    assert found.misfit < 1e-9
    assert found.alpha_error_s < 1e-12


def test_the_error_of_a_fit_covers_the_truth():
    """2 standard errors do in about 95 of 100 cases; with noise as large on a call of microseconds as on one of a second."""
    draw = torch.Generator().manual_seed(1)
    sizes_bytes = [4**at * 1024 for at in range(9)]
    covered = []
    for _ in range(200):
        noise = (1 + 0.05 * torch.randn(len(sizes_bytes), generator=draw)).tolist()
        found = fit(
            sizes_bytes, [(2e-5 + size / 3e9) * one for size, one in zip(sizes_bytes, noise, strict=True)]
        )
        covered.append(
            (
                abs(found.alpha_s - 2e-5) < 2 * found.alpha_error_s,
                abs(found.beta_Bps - 3e9) < 2 * found.beta_error_Bps,
            )
        )
    assert all(170 <= sum(one) <= 199 for one in zip(*covered, strict=True))


def test_fits_at_the_edge():
    two = fit([1e3, 1e6], [1e-5, 1e-3])
    assert (two.alpha_error_s, two.beta_error_Bps) == (None, None)
    flat = fit([1e3, 2e3, 4e3], [3e-5, 3e-5, 3e-5])
    assert flat.alpha_s == pytest.approx(3e-5)
    assert flat.beta_Bps is None or flat.beta_Bps > 1e15
    steeper = fit([1e3, 1e6, 1e9], [1e-6, 2e-3, 4.0])  # no start-up at all
    assert steeper.alpha_s == 0
    assert steeper.beta_Bps


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


def test_links_of_a_cluster_are_bus_bandwidths():
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
    found = {
        (link.axis, link.collective): link
        for link in links(fits([*slower, *measured, row("barrier", 0, 1e-4)]))
    }
    assert {*found} == {("node", "all-reduce"), ("node", "send"), ("across", "reduce")}
    for link in found.values():
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
    found = read(tmp_path / "a.json", "collectives")
    assert {(row["operation"], row["backend"]) for row in found.rows} == {
        (name, one) for name in OPERATIONS for one in backends.split(",")
    }
    assert not [row for row in found.rows if row["wrong"]]
    assert {row["bytes"] for row in found.rows if row["operation"] == "all-reduce"} == {2**10, 2**20}
    assert "WRONG" not in done.out
    assert done.out.count("all-reduce") >= 2
    assert any("mpi4py" in note for note in found.notes) == ("mpi" in backends)
    fitted = {link.collective for link in links(found.summary)}
    for _ in range(2):  # on a busy machine two sizes may not make a line
        if not fitted >= FITTED:
            bench("--backends", backends, "--sizes", "1KiB,1MiB", "--json", "b.json", at=tmp_path)
            fitted |= {link.collective for link in links(read(tmp_path / "b.json", "collectives").summary)}
    assert fitted >= FITTED
    assert (tmp_path / "a.svg").read_text().count("reduce-scatter") >= 1 or "<svg" in (
        tmp_path / "a.svg"
    ).read_text()


@pytest.mark.mpi("mpirun")
def test_four_ranks_along_the_axes_of_a_plan_and_what_is_left_out(tmp_path):
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
    found = read(tmp_path / "a.json")
    assert {(row["axis"], row["ranks"], row["groups"]) for row in found.rows} == {
        ("replicate", 2, 2),
        ("tp", 2, 2),
    }
    assert {(row["backend"], row["dtype"]) for row in found.rows} == {
        ("gloo", "fp32"),
        ("gloo", "bf16"),
        ("mpi", "fp32"),
    }
    notes = "\n".join(found.notes)
    assert "mpi all-reduce of bf16 is left out: " in notes
    assert "gloo all-reduce of 8.0 TiB, fp32, on axis tp is left out: it takes 32.0 TiB on each rank" in notes
    assert "4 ranks share" in notes


@pytest.mark.parametrize(
    ("program", "backends"),
    [
        pytest.param(TORCHRUN, "gloo", marks=pytest.mark.slow, id="torchrun"),
        pytest.param(MPIRUN, "mpi,gloo", marks=pytest.mark.mpi("mpirun"), id="mpirun"),
    ],
)
def test_as_ranks_of_a_launcher(program, backends, tmp_path):
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
    found = read(tmp_path / "a.json")
    assert {row["backend"] for row in found.rows} == {*backends.split(",")}
    assert {(row["axis"], row["ranks"]) for row in found.rows} == {("node", 2)}
    assert done.out.count("axis across is left out") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "backends", ["gloo", pytest.param("gloo,mpi", marks=[pytest.mark.mpi("mpirun"), pytest.mark.slow])]
)
def test_an_interrupt_shows_what_was_measured(backends, tmp_path):
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

    def measured() -> bool:
        return any(
            path.read_text().count("median_s") > 1 for path in temporary.glob("paceline-bench-*/found.jsonl")
        )

    with start("bench", "collectives", *words, at=tmp_path, TMPDIR=str(temporary), **ONE_THREAD) as running:
        running.until(measured, "two rows are measured")
        running.process.send_signal(signal.SIGINT)
        done = running.wait(60)
        running.until_all_ended()
    assert done.status == 130, done.all
    assert "stopped before the end" in done.out
    assert 0 < len(read(tmp_path / "a.json").rows) < 10
    assert not [*temporary.glob("paceline-bench-*")]


def test_a_rank_that_dies_is_named(tmp_path):
    words = ("--operations", "all-reduce", "--sizes", "1KiB", "--seconds", "100")
    with start("bench", "collectives", *words, at=tmp_path) as running:
        running.until(lambda: len(running.ranks()) == 2, "ranks are there")
        victim = running.ranks()[1]
        victim.kill()
        done = running.wait(60)
        running.until_all_ended()
    assert done.status == 2, done.all
    assert "paceline: rank 1 was killed by SIGKILL" in done.err


def test_two_files_beside_each_other(tmp_path):
    for name, seconds in (("a", 2e-3), ("b", 1e-3)):
        rows = tuple(row("broadcast", size, seconds, spread=0.1) for size in (2**10, 2**13, 2**16))
        write(ResultFile(kind="collectives", keys=KEYS, rows=rows), tmp_path / f"{name}.json")
    done = succeed("bench", "collectives", "--compare", "a.json", "b.json", at=tmp_path)
    assert "time in the first / time in the second: 2.000 (quartiles 2.000–2.000) over 3 rows" in done.out
    assert "0.283" in done.out  # 2 · √(0.1² + 0.1²)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"backends": "glo"}, "unknown back end glo; did you mean gloo?"),
        ({"operations": "allreduce"}, "unknown operation allreduce; did you mean all-reduce?"),
        ({"dtypes": "fp33"}, "unknown type fp33; did you mean fp32?"),
        ({"place": "between"}, "unknown place between"),
        ({"sizes": "1KiB:"}, "--sizes 1KiB:: '' is not a number of bytes"),
        ({"sizes": "1MiB:1KiB"}, "the first size is above the last"),
        ({"sizes": "1KiB:1MiB:1"}, "a factor of at least 2, got 1"),
        ({"sizes": "0B,1KiB"}, "no size is 0"),
        ({"axes": "tp"}, "axis tp is one of a plan's mesh: say which with --plan"),
        ({"axes": "nodes"}, "unknown axis nodes; did you mean node?"),
        ({"plan": "tp=3"}, "plan tp=3 requires a multiple of tp=3 = 3 ranks, got 2"),
        ({"ranks": 1}, "one rank has nobody to talk to: use --ranks 2 or more"),
        ({"plot": Path("a.gif")}, "cannot draw a.gif: its name must end in .svg or .png"),
        ({"json": Path("none/a.json")}, "no such folder: none; create it first"),
        (
            {"compare": (Path("none.json"), Path("b.json"))},
            "cannot read none.json: No such file or directory",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(asked, said):
    with pytest.raises(Error) as refused:
        collectives.collectives(**asked)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_back_end_that_is_not_there_says_how_to_get_it(tmp_path):
    refused = paceline("bench", "collectives", "--backends", "gloo,nccl", at=tmp_path)
    assert refused.status == 2
    assert refused.err == (
        f"paceline: nccl cannot be measured: torch {torch.__version__} was built without it: install torch for CUDA or ROCm; "
        "or leave nccl out of --backends\n"
    )


@pytest.mark.parametrize(("bad", "status"), [(0, 0), (3, 1)])
def test_a_wrong_row_is_said_and_is_no_success(bad, status, monkeypatch, capsys):
    times = {"min_s": 1e-3, "p95_s": 3e-3, "n": 5, "spread": 0.1, "algbw_GBps": 1.0, "busbw_GBps": 1.0}
    found = [
        row("all-reduce", 2**10, 2e-3, **times),
        row("all-reduce", 2**12, 3e-3, **times | {"wrong": bad}),
        "something was left out",
    ]
    monkeypatch.setattr(
        "paceline.bench.collectives.workers.measured", lambda request, ranks: (one for one in found)
    )
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(typer.Exit) as over:
        collectives.collectives(backends="gloo")
    assert over.value.exit_code == status
    out = capsys.readouterr().out
    assert ("3 WRONG" in out, "1 row of 2 came out WRONG" in out) == (bool(bad), bool(bad))
    assert "something was left out" in out


def test_sizes():
    assert sizes("1KiB:64KiB") == (2**10, 2**12, 2**14, 2**16)
    assert sizes("1KiB:3KiB:2") == (2**10, 2**11)
    assert sizes("1MiB,1KiB,1KiB") == (2**10, 2**20)


def test_mpi_needs_a_launcher_that_speaks_it(monkeypatch):
    from paceline.bench.collectives import backends

    monkeypatch.setitem(backends.MISSING, "mpi", lambda: None)
    with pytest.raises(
        BenchError, match="mpi cannot be measured by ranks of torchrun: start them with mpirun or srun"
    ):
        backends.check(("mpi",), World(launcher="torchrun"), 2)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BenchError, match="there is no mpirun: apt-get install openmpi-bin"):
        backends.check(("mpi",), World(), 2)
    monkeypatch.setitem(backends.MISSING, "mpi", lambda: "it is not installed: pip install 'paceline[mpi]'")
    with pytest.raises(
        BenchError, match=r"not installed: pip install 'paceline\[mpi\]'; or leave mpi out of --backends"
    ):
        backends.check(("mpi",), World(), 2)
    with pytest.raises(PlanError):
        axes_of.check((), "tp=3", 4)
