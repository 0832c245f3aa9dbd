"""cluster.json: round trip, and one sentence for each error."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.facts import Cluster, Device, Disk, Fact, Link, Overlap, Rate
from paceline.cluster.file import read, write
from paceline.cluster.published import find, find_published_name, parse, sheets
from paceline.errors import ClusterError

BY_HAND = {"version": 1, "device": {"name": "A100", "memory_bytes": 80e9}}
MEASURED = Fact(value=2.5e9, source="measured", spread=0.03, note="paceline bench collectives")
FULL = Cluster(
    name="two nodes",
    nodes=2,
    devices_per_node=4,
    device=Device(
        name="A100",
        memory_bytes=Fact(value=80e9),
        peaks_flops={"bf16": Fact(value=312e12, source="published")},
    ),
    cores_per_node=64,
    links=(
        Link(axis="node", beta_Bps=Fact(value=300e9)),
        Link(
            axis="across",
            backend="nccl",
            collective="all-reduce",
            ranks=8,
            alpha_s=Fact(value=0.0),
            beta_Bps=MEASURED,
        ),
    ),
    rates=(Rate(operation="matmul", dtype="bf16", shape=(4096, 4096, 4096), flops=MEASURED),),
    overlaps=(Overlap(operation="copy", hidden=Fact(value=0.8, source="measured")),),
    disks=(Disk(path="/scratch", filesystem="lustre", write_Bps=MEASURED),),
    software={"torch": "2.13.0"},
)


def test_cluster_round_trip(tmp_path):
    write(tmp_path / "cluster.json", FULL)
    assert read(tmp_path / "cluster.json") == FULL
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_minimal_cluster_with_declared_numbers(tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps(BY_HAND))
    cluster = read(tmp_path / "cluster.json")
    assert cluster.device.memory_bytes == Fact(value=80e9, source="declared")
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (1, 1, 1)
    assert cluster.links == ()


def test_new_rows_replace_rows_with_the_same_key():
    again = FULL.links[1].model_copy(update={"beta_Bps": Fact(value=3e9, source="measured")})
    other = again.model_copy(update={"ranks": 4})
    updated = FULL.updated(links=[again, other])
    assert updated.links == (FULL.links[0], again, other)
    assert updated.disks == FULL.disks


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nods": 2}, "unknown key nods; did you mean nodes?"),
        (
            {"links": [{"axis": "node", "bata_Bps": 3}]},
            "unknown key links.0.bata_Bps; did you mean beta_Bps?",
        ),
        (
            {"device": {"name": "x", "memory_bytes": {"valeu": 3}}},
            "unknown key device.memory_bytes.valeu; did you mean value?",
        ),
        (
            {"device": {"name": "x", "memory_bytes": 3, "peaks_flops": {"bf61": 3}}},
            "unknown key device.peaks_flops.bf61; available: 'fp64', ",
        ),
        ({"device": {"name": "x"}}, "device.memory_bytes is missing"),
        ({"device": None}, "device must be a table, got None"),
        (
            {"device": {"name": "x", "memory_bytes": "80"}},
            "device.memory_bytes must be a number, or a table with its value, got '80'",
        ),
        (
            {"device": {"name": "x", "memory_bytes": True}},
            "device.memory_bytes must be a number, or a table with its value, got True",
        ),
        (
            {"device": {"name": "x", "memory_bytes": 0}},
            "device.memory_bytes: a size or a rate must be above 0, got 0; leave it out if ",
        ),
        (
            {"device": {"name": "x", "memory_bytes": {"value": 3, "source": "guess"}}},
            "device.memory_bytes.source must be 'measured', ",
        ),
        ({"nodes": 0}, "nodes must be greater than or equal to 1, got 0"),
        ({"links": 3}, "links must be an array, got 3"),
        (
            {"price_per_device_hour": -1},
            "price_per_device_hour.value must be greater than or equal to 0, got -1",
        ),
        (
            {"price_per_device_hour": float("inf")},
            "price_per_device_hour.value must be a finite number, got inf",
        ),
    ],
)
def test_invalid_values_are_refused_in_one_sentence(change, sentence, tmp_path):
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
        ("[]", " is not a cluster: "),
        (
            '{"format": "paceline.bench", "version": 1}',
            " is not a cluster: format must be 'paceline.cluster', got 'paceline.bench'",
        ),
        ('{"device": {}}', ' has no version; write "version": 1'),
        (
            '{"version": 7}',
            " has version 7, but this Paceline reads 1; use the newer Paceline that wrote it",
        ),
        ('{"version": 0}', " has version 0, but this Paceline reads 1; write it again with paceline bench"),
        ('{"version": true}', " has version True, but "),
    ],
)
def test_invalid_files_are_refused(text, sentence, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{sentence}")


def test_missing_and_unwritable_files(tmp_path):
    with pytest.raises(ClusterError, match=r"cannot read .*/cluster.json: No such file or directory; "):
        read(tmp_path / "cluster.json")
    with pytest.raises(ClusterError, match=r"cannot write .*/no/cluster.json: no such folder:"):
        write(tmp_path / "no" / "cluster.json", FULL)


# What makers publish


def flops(numbers):
    return {dtype: fact.value for dtype, fact in numbers.items()}


def test_a100_matches_its_data_sheet():
    small, large = (sheets()[name].device() for name in ("a100-40g", "a100-80g"))
    assert flops(large.peaks_flops) == {
        "fp64": 19.5e12,
        "fp32": 19.5e12,
        "tf32": 156e12,
        "bf16": 312e12,
        "fp16": 312e12,
        "int8": 624e12,
        "int4": 1248e12,
    }
    assert flops(large.sparse_flops) == {
        "tf32": 312e12,
        "bf16": 624e12,
        "fp16": 624e12,
        "int8": 1248e12,
        "int4": 2496e12,
    }
    assert large.vector_flops["fp64"].value == 9.7e12
    assert small.memory_Bps.value == 1555e9
    assert (small.memory_bytes.value, large.memory_bytes.value) == (40 * 2**30, 80 * 2**30)


def test_links_count_one_direction():
    """An H100 has 18 links of NVLink 4 with 900 GB/s, counted in both directions."""
    [link] = sheets()["h100-sxm"].links()
    assert (link.axis, 2 * link.beta_Bps.value) == ("node", 900e9)
    assert sheets()["mi250x"].links() == (), "which of its dies are neighbours matters"


@pytest.mark.parametrize("name", sheets())
def test_every_published_device_is_plausible(name):
    """A mistyped number would most likely violate one of these checks."""
    sheet = sheets()[name]
    device = sheet.device()
    dense, sparse, vector = (
        flops(numbers) for numbers in (device.peaks_flops, device.sparse_flops, device.vector_flops)
    )
    assert all(
        fact.source == "published" and fact.note
        for fact in (device.memory_bytes, device.memory_Bps, *device.peaks_flops.values())
    )
    assert all(peak == pytest.approx(2 * dense[dtype], rel=2e-3) for dtype, peak in sparse.items())
    assert all(peak <= dense[dtype] for dtype, peak in vector.items())
    assert all(dense[dtype] == dense.get("fp16", dense[dtype]) for dtype in {"bf16"} & {*dense})
    if device.kind in ("cuda", "rocm"):  # in Trainium, 8 bits are not twice as fast as 16
        assert "fp8" not in dense or dense["fp8"] == pytest.approx(2 * dense["fp16"], rel=2e-3)
    assert dense.get("int4") in (None, pytest.approx(2 * dense.get("int8", 0), rel=2e-3))
    assert dense.get("fp6") in (None, dense.get("fp8"), dense.get("fp4"))
    assert sheet.driver
    assert all(find_published_name(driver) == name for driver in sheet.driver)


def test_only_exact_names_match_a_published_device():
    assert find_published_name("NVIDIA H100 80GB HBM3") == "h100-sxm"
    assert find_published_name("NVIDIA H100 NVL") == "h100-nvl"
    for other in (
        "NVIDIA H200 NVL",
        "NVIDIA A800 80GB PCIe",
        "NVIDIA H800 PCIe",
        "NVIDIA A100-SXM-64GB",
        "AMD INSTINCT MI250 (MCM) OAM AC MBA",
    ):
        assert find_published_name(other) is None


@pytest.mark.parametrize(("name", "like"), [("a800", "a100-80g"), ("h800", "h100-sxm")])
def test_devices_with_fewer_links_compute_alike(name: str, like: str) -> None:
    """They were made for export to China: NVLink has 400 GB/s in both directions, 16-bit peaks are kept."""
    own, other = sheets()[name], sheets()[like]
    assert own.link_GBps == 200
    assert own.device().peaks_flops["bf16"].value == other.device().peaks_flops["bf16"].value
    assert own.memory_GBps == other.memory_GBps


def test_one_card_of_an_h100_nvl():
    """The datasheet of 2023 gives 188 GB and 7.8 TB/s for a pair."""
    device = sheets()["h100-nvl"].device()
    assert (device.memory_bytes.value, device.memory_Bps.value) == (94 * 2**30, 3.9e12)
    assert 2 * device.memory_Bps.value == 7.8e12
    assert sheets()["h100-nvl"].links() == (), "bridges connect pairs of cards only"


def test_processors_explain_the_vector_peaks():
    """A multiprocessor does 2 × 64 or 2 × 128 operations with fp32 in a cycle, of 1 to 3 GHz."""
    for sheet in sheets().values():
        chip = sheet.chip
        if chip.sms is not None and "fp32" in chip.vector:
            clock_Hz = {
                lanes: chip.vector["fp32"] * 1e12 / (2 * lanes * chip.sms) for lanes in (64, 128, 256)
            }
            assert any(1.0e9 < each < 2.7e9 for each in clock_Hz.values()), (chip.name, clock_Hz)


def test_short_form_of_a_cluster():
    found = parse("a100-80g:8x128")
    assert (found.name, found.device.name, found.devices_per_node, found.nodes) == (
        "a100-80g:8x128",
        "NVIDIA A100 SXM4 80 GB",
        8,
        128,
    )
    assert [(link.axis, link.beta_Bps.value, link.beta_Bps.source) for link in found.links] == [
        ("node", 300e9, "published")
    ]
    across = parse("H100:4x2@12.5").links[-1]
    assert (across.axis, across.beta_Bps.value, across.beta_Bps.source, across.alpha_s) == (
        "across",
        12.5e9,
        "declared",
        None,
    )
    assert (parse("t4").devices_per_node, parse("t4").nodes, parse("t4:2").devices) == (1, 1, 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "a100:8x4",
            "a100 has several variants; specify one of a100-40g, a100-80g, a100-pcie-40g, a100-pcie-80g",
        ),
        (
            "hh200:8",
            "hh200 is not in the table of published devices (a cluster.json can describe it); did you "
            "mean h200",
        ),
        (
            "abacus",
            "abacus is not in the table of published devices (a cluster.json can describe it); "
            "available: v100-16g, ",
        ),
        (
            "a100-80g:8x",
            "cluster must be DEVICE:DEVICES_PER_NODExNODES@GB/s, as in a100-80g:8x128@25, or a "
            "cluster.json, got 'a100-80g:8x'",
        ),
        ("a100-80g x 3", "cluster must be DEVICE:"),
        ("", "cluster must be DEVICE:"),
        ("a100-80g:0x2", "cluster 'a100-80g:0x2' must have at least 1 device per node, got 0"),
        ("a100-80g:8x0", "cluster 'a100-80g:8x0' must have at least 1 node, got 0"),
        (
            "a100-80g:8x2@0",
            "cluster 'a100-80g:8x2@0' has 0 GB/s across nodes; leave out @0 if the rate is unknown",
        ),
        (
            "nowhere/cluster.json",
            "cannot read nowhere/cluster.json: No such file or directory; paceline bench writes this "
            "file, and ",
        ),
    ],
)
def test_invalid_short_forms_are_refused(text, sentence):
    with pytest.raises(ClusterError) as caught:
        find(text)
    assert str(caught.value).startswith(sentence)


def test_find_reads_a_file(tmp_path):
    write(tmp_path / "cluster.json", FULL)
    assert find(str(tmp_path / "cluster.json")) == FULL


def test_the_cluster_in_the_documentation_is_valid(tmp_path):
    page = (Path(__file__).parents[2] / "docs/machine.md").read_text()
    [text] = re.findall(r"<!-- read by tests/cluster/test_cluster.py -->\n+```json\n(.+?)```", page, re.S)
    (tmp_path / "cluster.json").write_text(text)
    found = read(tmp_path / "cluster.json")
    assert (found.devices, found.links[1].beta_Bps.source, found.links[0].beta_Bps.source) == (
        64,
        "measured",
        "declared",
    )
    named = {*re.findall(r"`(\w+)`", page)}
    for model in (Cluster, Device, Link, Rate, Overlap, Disk, Fact):
        assert {*model.model_fields} <= named, f"a field of {model.__name__} is not described"


def test_the_documented_table_matches_the_code(tmp_path):
    """A different table is detected."""
    docs = Path(__file__).parents[2] / "docs"
    for name in ("machine.md", "published_peaks.py"):
        (tmp_path / name).write_text((docs / name).read_text())

    def check():
        return subprocess.run(
            [sys.executable, tmp_path / "published_peaks.py", "--check"],
            capture_output=True,
            text=True,
            timeout=60,
        )

    done = check()
    assert done.returncode == 0, done.stderr
    page = tmp_path / "machine.md"
    page.write_text(page.read_text().replace("| 989.4 (", "| 998.4 (", 1))
    assert check().returncode == 1
