"""All benches in one command, and the facts of the Cluster that they update."""

import json

import pytest

from command import paceline, start, succeed, write_task
from paceline.bench.result import Result, read
from paceline.bench.to_cluster import update_cluster
from paceline.cluster import file
from paceline.cluster.facts import Cluster, Device

pytestmark = pytest.mark.processes

DRAWN = ("collectives", "compute", "overlap", "storage", "data")
KINDS = (*DRAWN, "host")
TIMES = {"median_s": 1.0, "min_s": 1.0, "p95_s": 1.0, "spread": 0.1349, "n": 5}


def result(kind: str, *rows: dict) -> Result:
    return Result(kind=kind, rows=tuple(row | TIMES for row in rows))


def test_results_become_facts_of_the_cluster():
    device = Device(name="a device", kind="cuda", memory_bytes=1, memory_Bps=5.0)
    attention = {"operation": "attention", "dtype": "bf16", "shape": "1×8×64×32"}
    copy = {"bytes": 8, "operation": "copy to device"}
    sent = {"operation": "all-reduce", "backend": "gloo"}
    disk = {"directory": "/data", "filesystem": "ext4"}
    cluster = update_cluster(
        Cluster(version=1, device=device),
        [
            result(
                "compute",
                {"operation": "matmul", "dtype": "fp32", "shape": "2×3×4", "flops": 1e9},
                attention | {"kernel": "math", "flops": 1e9},
                attention | {"kernel": "flash", "flops": 3e9},
                {"operation": "copy", "dtype": "fp32", "shape": "9", "Bps": 20e9},
                {"operation": "triad", "dtype": "fp32", "shape": "9", "Bps": 25e9},
                {"operation": "step", "dtype": "fp32", "shape": "64 samples", "flops": 1e9},
            ),
            result(
                "overlap",
                *(
                    copy | {"memory": "pinned", "streams": streams, "Bps": 2e10, "hidden": hidden}
                    for streams, hidden in ((1, 0.1), (2, 0.9))
                ),
                copy | {"memory": "pageable", "streams": 2, "Bps": 5e9, "hidden": 0.3},
                *(sent | {"bytes": size, "hidden": hidden} for size, hidden in ((1, 0.5), (2, -0.2))),
            ),
            result(
                "storage",
                disk | {"test": "large write", "bytes": 8, "Bps": 3e8},
                disk | {"test": "small write", "bytes": 8, "per_s": 5528.0},
                disk
                | {
                    "test": "read",
                    "bytes": 8,
                    "Bps": 9e9,
                    "note": "100% read from the page cache, which could not be dropped",
                },
            ),
        ],
    )
    product, attention_rate = cluster.rates
    assert (product.operation, product.shape, product.flops.value, product.flops.source) == (
        "matmul",
        (2, 3, 4),
        1e9,
        "measured",
    )
    # The quartiles of a normal distribution are 1.349 standard deviations from one another.
    assert product.flops.spread == pytest.approx(0.1)
    assert (attention_rate.flops.value, attention_rate.flops.note.endswith(", flash")) == (3e9, True)
    assert cluster.device.memory_Bps.value == 25e9
    assert {memory: rate.value for memory, rate in cluster.device.to_device_Bps.items()} == {
        "pinned": 2e10,
        "pageable": 5e9,
    }
    assert {(row.operation, row.backend): row.hidden.value for row in cluster.overlaps} == {
        ("copy to device", None): 0.9,
        ("all-reduce", "gloo"): 0.0,
    }
    [data] = cluster.disks
    assert (data.path, data.write_Bps.value, data.sync_writes_per_s.value, data.read_Bps) == (
        "/data",
        3e8,
        5528.0,
        None,
    )


@pytest.mark.slow
def test_command(tmp_path):
    write_task(tmp_path)
    (tmp_path / "data").mkdir()
    words = (
        "--seconds",
        "5",
        "--task",
        "my.py:Regression",
        "--device",
        "cpu",
        "--directory",
        "data",
        "--out",
        "found",
    )
    done = succeed("bench", *words, at=tmp_path)
    out = tmp_path / "found"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["cluster.json", *(f"{kind}.json" for kind in KINDS), *(f"{kind}.svg" for kind in DRAWN)]
    )
    for kind in KINDS:
        assert read(out / f"{kind}.json", kind).rows
        assert kind in done.out
    cluster = file.read(out / "cluster.json")
    assert cluster.device.kind == "cpu"
    assert cluster.device.memory_Bps.source == "measured"
    assert {link.collective for link in cluster.links} >= {"all-reduce", "all-gather"}
    assert [disk.path for disk in cluster.disks] == [str(tmp_path / "data")]
    assert any(rate.dtype == "bf16" for rate in cluster.rates)
    assert list((tmp_path / "data").iterdir()) == []
    assert "found/: cluster.json" in done.out


@pytest.mark.slow
def test_interrupt_keeps_results(tmp_path):
    write_task(tmp_path)
    words = ("--task", "my.py:Regression", "--device", "cpu", "--directory", ".", "--seconds", "40")
    with start("bench", *words, at=tmp_path) as running:
        running.wait_until(
            lambda: any(tmp_path.glob(".paceline-bench-*/direct")), "at the second test of the storage"
        )
        running.process.send_signal(2)
        done = running.wait()
        running.wait_until_all_ended()
    assert done.status == 130, done.all
    assert sorted(path.name for path in (tmp_path / "bench").iterdir()) == [
        "cluster.json",
        "storage.json",
        "storage.svg",
    ]
    assert json.loads((tmp_path / "bench" / "storage.json").read_text())["rows"][0]["test"] == "large write"
    assert file.read(tmp_path / "bench" / "cluster.json").disks[0].write_Bps is not None
    assert list(tmp_path.glob(".paceline-bench-*")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 0}', "bench/cluster.json has version 0"),
        (
            '{"version": 1, "device": {"name": "B200", "memory_bytes": 1}}',
            "bench/cluster.json describes B200, but this machine has ",
        ),
    ],
)
def test_cluster_file_of_another_machine_is_not_replaced(text, message, tmp_path):
    write_task(tmp_path)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "cluster.json").write_text(text)
    done = paceline("bench", "--task", "my.py:Regression", at=tmp_path)
    assert done.status == 2
    assert done.err.startswith(f"paceline: {message}")
    assert (tmp_path / "bench" / "cluster.json").read_text() == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "my.py:None"], "my.py has no class None"),
        (["--directory", "none"], "no such directory: "),
        (["--out", "my.py"], "cannot create the folder my.py: File exists; specify another with --out"),
        (["--device", "gpu"], "--device must be cpu or cuda, got 'gpu'"),
    ],
)
def test_bad_input_gives_one_sentence(words, message, tmp_path):
    write_task(tmp_path)
    done = paceline("bench", *words, at=tmp_path)
    assert (done.status, done.out) == (2, ""), done.all
    assert done.err.startswith(f"paceline: {message}")
    assert done.err.count("\n") == 1
    assert not (tmp_path / "bench" / "cluster.json").exists()
