"""cluster.json and the values in it: what is written is what is read, and what is wrong is said in one sentence."""

import json

import pytest

from paceline.cluster.facts import Cluster, Device, Disk, Fact, Link, Overlap, Rate
from paceline.cluster.file import read, write
from paceline.errors import ClusterError

BY_HAND = {"version": 1, "device": {"name": "A100", "memory_bytes": 80e9}}
MEASURED = Fact(value=2.5e9, source="measured", spread=0.03, note="paceline bench collectives")
FULL = Cluster(
    name="two nodes",
    nodes=2,
    devices_per_node=4,
    device=Device(name="A100", memory_bytes=Fact(value=80e9), peaks_flops={"bf16": Fact(value=312e12, source="published")}),
    cores_per_node=64,
    links=(
        Link(axis="node", beta_Bps=Fact(value=300e9)),
        Link(axis="across", backend="nccl", collective="all-reduce", ranks=8, alpha_s=Fact(value=0.0), beta_Bps=MEASURED),
    ),
    rates=(Rate(operation="matmul", dtype="bf16", shape=(4096, 4096, 4096), flops=MEASURED),),
    overlaps=(Overlap(operation="copy", hidden=Fact(value=0.8, source="measured")),),
    disks=(Disk(path="/scratch", filesystem="lustre", write_Bps=MEASURED),),
    software={"torch": "2.13.0"},
)


def test_what_is_written_is_read(tmp_path):
    write(tmp_path / "cluster.json", FULL)
    assert read(tmp_path / "cluster.json") == FULL
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_a_few_keys_are_enough_and_a_plain_number_is_declared(tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps(BY_HAND))
    cluster = read(tmp_path / "cluster.json")
    assert cluster.device.memory_bytes == Fact(value=80e9, source="declared")
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (1, 1, 1)
    assert cluster.links == ()


def test_new_rows_take_the_place_of_those_about_the_same():
    again = FULL.links[1].model_copy(update={"beta_Bps": Fact(value=3e9, source="measured")})
    other = again.model_copy(update={"ranks": 4})
    updated = FULL.updated(links=[again, other])
    assert updated.links == (FULL.links[0], again, other)
    assert updated.disks == FULL.disks


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nods": 2}, "unknown key nods; did you mean nodes?"),
        ({"links": [{"axis": "node", "bata_Bps": 3}]}, "unknown key links.0.bata_Bps; did you mean beta_Bps?"),
        ({"device": {"name": "x", "memory_bytes": {"valeu": 3}}}, "unknown key device.memory_bytes.valeu; did you mean value?"),
        (
            {"device": {"name": "x", "memory_bytes": 3, "peaks_flops": {"bf61": 3}}},
            "unknown key device.peaks_flops.bf61; there is 'fp64', ",
        ),
        ({"device": {"name": "x"}}, "device.memory_bytes is missing"),
        ({"device": None}, "device must be a table, got None"),
        ({"device": {"name": "x", "memory_bytes": "80"}}, "device.memory_bytes must be a number, or a table with its value, got '80'"),
        ({"device": {"name": "x", "memory_bytes": True}}, "device.memory_bytes must be a number, or a table with its value, got True"),
        ({"device": {"name": "x", "memory_bytes": 0}}, "device.memory_bytes: a size or a rate must be above 0, got 0; leave it out where "),
        ({"device": {"name": "x", "memory_bytes": {"value": 3, "source": "guess"}}}, "device.memory_bytes.source must be 'measured', "),
        ({"nodes": 0}, "nodes must be greater than or equal to 1, got 0"),
        ({"links": 3}, "links must be an array, got 3"),
        ({"price_per_device_hour": -1}, "price_per_device_hour.value must be greater than or equal to 0, got -1"),
        ({"price_per_device_hour": float("inf")}, "price_per_device_hour.value must be a finite number, got inf"),
    ],
)
def test_one_sentence_for_what_is_wrong(change, sentence, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(BY_HAND | change))
    with pytest.raises(ClusterError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", " is not JSON: "),
        ("\x00", " is not JSON: "),
        ("[" * 100_000, " is not JSON: "),
        ("[]", " is no cluster: "),
        (
            '{"schema": "paceline.bench.storage", "version": 1}',
            " is no cluster: its schema is 'paceline.bench.storage', not 'paceline.cluster'",
        ),
        ('{"device": {}}', ' does not say its version; write "version": 1'),
        ('{"version": 7}', " is of version 7, newer than this Paceline, which reads 1; use the Paceline that wrote it"),
        ('{"version": 0}', " is of version 0, and this Paceline reads 1; write it again with paceline bench"),
        ('{"version": true}', " is of version True, and "),
    ],
)
def test_what_is_no_cluster(text, sentence, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{sentence}")


def test_a_file_that_is_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(ClusterError, match=r"cannot read .*/cluster.json: No such file or directory; "):
        read(tmp_path / "cluster.json")
    with pytest.raises(ClusterError, match=r"cannot write .*/no/cluster.json: No such file or directory"):
        write(tmp_path / "no" / "cluster.json", FULL)
