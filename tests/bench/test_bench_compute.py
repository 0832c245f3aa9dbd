"""bench compute and overlap: matrix products, attention, blocks of a task, and overlap with communication."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F

import models
from command import paceline, succeed, write_task
from harness import ranks
from paceline import Spec
from paceline.bench.collect import OtherPrograms, collect
from paceline.bench.compute import kernels, overlap
from paceline.bench.compute.kernels import Sizes, summarize
from paceline.bench.compute.matmul import KINDS
from paceline.bench.compute.overlap import hidden_share
from paceline.bench.compute.step import count_flop, measure_step, prepare_step
from paceline.bench.report.compute import bandwidth, draw

CPU = torch.device("cpu")
TINY = Sizes((48, 96), 64, 32, (1, 4), 128, ((1, 2, 64, 32),))
TIMED = ("median_s", "min_s", "p95_s", "spread", "n")


def split_items(source):
    items = list(source)
    return [item for item in items if not isinstance(item, str)], [
        item for item in items if isinstance(item, str)
    ]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.missing(CPU) is None], ids=lambda kind: kind.dtype
)
def test_product_is_correct(kind, monkeypatch):
    made = []
    random = torch.randn if kind.dtype != "int8" else torch.randint

    def record(*args, **options):
        made.append(random(*args, **options))
        return made[-1]

    monkeypatch.setattr(torch, random.__name__, record)
    product = kind.make((24, 40, 16), CPU)()
    a, b = (tensor.double() for tensor in made)
    expected = a @ (b.T if kind.dtype == "int8" else b)
    assert product.shape == (24, 40)
    assert torch.allclose(product.double(), expected, rtol=2e-2, atol=2e-2 * 16)
    assert (
        kind.moved_bytes((24, 40, 16)) == (24 * 16 + 16 * 40) * kind.bytes + 24 * 40 * product.element_size()
    )


def test_rows_of_products():
    rows, notes = split_items(kernels.measure_matmuls(CPU, 3.0, TINY))
    assert {row["dtype"] for row in rows} == {"fp64", "fp32", "bf16", "fp16", "int8"}
    for row in rows:
        m, n, k = map(int, row["shape"].split("×"))
        assert row["flop"] == 2 * m * n * k
        assert row["flops"] == row["flop"] / row["median_s"]
        assert set(TIMED) < set(row)
        assert "peak_share" not in row
    unsupported = "tf32 matmul, fp8 matmul, bf16 matmul 2:4, fp16 matmul 2:4, int8 matmul 2:4"
    assert notes[0] == f"{unsupported}: not supported on a CPU"


def test_refused_products_are_left_out_with_the_reason(monkeypatch):
    def refuse(shape, device):
        if shape[0] < 64:
            raise RuntimeError("at least 64 rows\nand more words")
        return lambda: None

    [fp32] = [kind for kind in KINDS if kind.dtype == "fp32"]
    monkeypatch.setattr(kernels, "KINDS", (dataclasses.replace(fp32, make=refuse),))
    rows, notes = split_items(kernels.measure_matmuls(CPU, 5.0, TINY))
    assert notes == ["fp32 matmul of 1×128×128, 4×128×128, 48×48×48: at least 64 rows"]
    assert len(rows) == len(TINY.shapes()) - 3


def test_peak_share_uses_the_published_peak(monkeypatch):
    row = {"operation": "matmul", "dtype": "bf16", "shape": "8×8×8", "flops": 494.7e12}
    rows = [row, row | {"operation": "matmul 2:4"}, row | {"dtype": "tf32", "flops": 494.7e12}]
    for name, shares in (("NVIDIA H100 80GB HBM3", [0.5, 0.25, 1.0]), ("Nobody's GPU", [None] * 3)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        with_share = list(kernels.add_peak_share(iter(rows), torch.device("cuda")))
        assert [row.get("peak_share") for row in with_share] == [
            None if share is None else pytest.approx(share, rel=1e-3) for share in shares
        ]


def test_supported_products_by_compute_capability(monkeypatch):
    def supported(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return [
            f"{kind.dtype} {kind.operation}" for kind in KINDS if kind.missing(torch.device("cuda")) is None
        ]

    assert "tf32 matmul" not in supported((7, 0))
    assert {"tf32 matmul", "bf16 matmul 2:4"} < set(supported((8, 0)))
    assert "fp8 matmul" not in supported((8, 0))
    assert len(supported((9, 0))) == len(KINDS)


def test_best_and_typical_rate():
    rows = [
        {
            "operation": "matmul",
            "dtype": "fp32",
            "shape": shape,
            "flop": flop,
            "flops": flop / seconds,
            "median_s": seconds,
        }
        for shape, flop, seconds in (("a", 100, 2.0), ("b", 300, 2.0), ("c", 1000, 4.0))
    ]
    [summary] = summarize(rows, ["a", "b"])
    assert (summary["shape"], summary["flops"], summary["typical_flops"]) == ("c", 250, 100)
    assert summarize(rows, ["a", "none"])[0]["typical_flops"] is None


def test_memory_and_attention(monkeypatch):
    monkeypatch.setattr(kernels, "_array_bytes", lambda device, budget_s: (2**21, 2**20))
    rows, [note] = split_items(kernels.measure_memory(CPU, 0.2))
    assert "arrays of 1.0 MiB" in note
    assert [(row["operation"], row["bytes"]) for row in rows] == [("copy", 2 * 2**20), ("triad", 3 * 2**20)]
    assert all(row["Bps"] == row["bytes"] / row["median_s"] for row in rows)
    rows, notes = split_items(kernels.measure_attention(CPU, 1.0, TINY))
    assert {(row["operation"], row["kernel"]) for row in rows} >= {
        ("attention", "flash"),
        ("attention backward", "math"),
    }
    assert {(row["operation"], row["flop"]) for row in rows} == {
        ("attention", 2 * 2 * 64 * 64 * 32),
        ("attention backward", 5 * 2 * 64 * 64 * 32),
    }
    assert not notes


def test_flop_of_attention_on_a_cpu_are_counted():
    """torch does not count them."""
    query, key, value = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    assert count_flop(lambda: F.scaled_dot_product_attention(query, key, value)) == 2 * 2 * (
        2 * 3 * 16 * 16 * 8
    )
    output = F.scaled_dot_product_attention(query, key, value)
    assert count_flop(lambda: output.sum().backward()) >= 2 * 2 * 2 * (2 * 3 * 16 * 16 * 8)


def test_step_of_a_task_and_its_blocks():
    task, spec = models.Text(), Spec(batch=4)
    with prepare_step(spec, task, CPU) as step:
        before = [parameter.clone() for parameter in step.prepared.model.parameters()]
        rows = list(measure_step(step, spec, 1.0))
        after = list(step.prepared.model.parameters())
    # The steps are real.
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    step, *blocks = rows
    assert step["per_s"] == 4 / step["median_s"]
    assert {row["operation"] for row in blocks} == {"block forward", "block backward"}
    whole = sum(row["flop"] * row["count"] for row in blocks)
    assert 0 < whole <= step["flop"]
    forward, backward = (
        sum(row["flop"] for row in blocks if row["operation"] == f"block {way}")
        for way in ("forward", "backward")
    )
    assert 1.5 < backward / forward < 3


def test_hidden_share():
    assert hidden_share(2.0, 3.0, 3.0) == 1.0
    assert hidden_share(2.0, 3.0, 5.0) == 0.0
    assert hidden_share(2.0, 3.0, 4.0) == 0.5
    assert hidden_share(2.0, 3.0, 6.0) < 0  # they slow each other down


def measure_small_overlap():
    overlap.SENT_BYTES = (2**16,)
    return overlap.measure_on_rank("cpu", 0.3)


def test_overlap_of_a_collective():
    """Real ranks agree on the times."""
    first, second = ranks(2)(measure_small_overlap)
    assert first == second
    [row] = first
    assert (row["operation"], row["backend"], row["ranks"], row["bytes"]) == ("all-reduce", "gloo", 2, 2**16)
    assert row["hidden"] == hidden_share(row["alone_s"], row["compute_s"], row["median_s"])


def test_copies_are_not_measured_without_a_gpu():
    assert list(overlap.measure_copies(CPU, 1.0)) == [
        "no CUDA device: the overlap of copies and streams is not measured"
    ]


def test_interrupt_keeps_rows():
    def source():
        yield {"operation": "copy"}
        yield "a note"
        raise KeyboardInterrupt

    collected = collect("compute", ("operation",), {}, source())
    assert collected.interrupted
    assert collected.result.rows == ({"operation": "copy"},)
    assert collected.result.notes[:2] == ("a note", "interrupted: the rows show what was measured until then")


def test_other_programs_are_noted():
    """A child that computes and has not ended counts as another program."""
    others = OtherPrograms()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        time.sleep(1.0)
        notes = others.notes()
        child.kill()
    assert len(notes) == 1
    assert notes[0].startswith("other programs used ")


def test_command(tmp_path):
    write_task(tmp_path)
    words = (
        "bench",
        "compute",
        "--seconds",
        "1",
        "--device",
        "cpu",
        "--task",
        "my.py:Regression",
        "--json",
        "a.json",
        "--plot",
        "a.svg",
    )
    result = succeed(*words, at=tmp_path)
    tree = json.loads((tmp_path / "a.json").read_text())
    operations = {row["operation"] for row in tree["rows"]}
    assert operations >= {"matmul", "copy", "triad", "attention", "step", "block forward"}
    assert all(word in result.out for word in ("best", "triad", "64 samples", "GFLOP/s"))
    assert "of published" not in result.out
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    compared = succeed("bench", "compute", "--compare", "a.json", "a.json", at=tmp_path)
    assert "1.000" in compared.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compute", "--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["compute", "--task", "none.py:Net"], "no such file: none.py"),
        (["compute", "--plot", "a.gif"], "cannot draw a.gif: its name must end in .svg or .png"),
        (["compute", "--compare", "a.json", "b.json"], "cannot read a.json: No such file or directory"),
    ],
)
def test_bad_input_gives_one_sentence(words, message, tmp_path):
    result = paceline("bench", *words, at=tmp_path)
    assert (result.status, result.out) == (2, ""), result.all
    assert result.err.count("\n") == 1
    assert result.err.startswith(f"paceline: {message}")


def test_missing_cuda(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    result = paceline("bench", "overlap", "--device", "cuda", at=tmp_path)
    assert result.status == 2
    assert "finds no CUDA device here; use --device cpu" in result.err


def test_roofline(tmp_path):
    rows = [
        {
            "operation": "matmul",
            "dtype": dtype,
            "shape": f"{size}×{size}×{size}",
            "flop": 2 * size**3,
            "bytes": 12 * size**2,
            "flops": flops,
        }
        for dtype, flops in (("fp32", 1e11), ("bf16", 1e12))
        for size in (64, 512)
    ]
    rows.append({"operation": "triad", "dtype": "fp32", "shape": "1", "bytes": 3, "Bps": 2e10})
    result = collect("compute", ("operation",), {"device": "a device"}, iter(rows)).result
    assert bandwidth(result) == 2e10
    draw(result, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<?xml")


def test_roofline_without_products(tmp_path):
    result = collect(
        "compute",
        ("operation",),
        {},
        iter([{"operation": "triad", "dtype": "fp32", "shape": "1", "Bps": 2e10}]),
    ).result
    draw(result, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
