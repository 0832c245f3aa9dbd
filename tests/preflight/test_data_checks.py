"""Preflight predicts space and time of a cache, and reports what is kept where a run is written."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from image_files import write_images
from mounts import mount_squashfs, mount_tmpfs, require_programs
from paceline import Spec
from paceline.cluster import directories, file
from paceline.cluster.facts import Cluster, Device, Disk, Fact
from paceline.cluster.machine import Quota
from paceline.data.cache.sizes import SourceSize
from paceline.data.shards.pack import pack
from paceline.preflight.cache_check import CacheTimes
from paceline.preflight.checks import CHECKS
from paceline.preflight.context import PreflightContext
from paceline.preflight.source_text import describe_source
from paceline.preflight.usage_check import measure_folders
from paceline.spec import Launch, Loading

TASK = """
import torch
from torch import nn
import paceline
from paceline.data import Folder


class Pictures(paceline.Task):
    folder: str

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(60, 2))

    def dataset(self, split):
        return Folder(self.folder, decode=lambda content: torch.zeros(60)) if split == "train" else None

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="none")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures.py").write_text(TASK)
    write_images(tmp_path / "images", {"a": 20, "b": 20})
    pack([tmp_path / "images"], tmp_path / "packed", 2**20, 1)
    return tmp_path


def run_check(name: str, data: Loading, folder: str = "packed", **more: Any) -> list[str]:
    spec = Spec(task="pictures.py", set={"folder": folder}, batch=10, data=data, steps=more.pop("steps", 40))
    launch = Launch(ranks=1, device="cpu", run=more.pop("run", None))
    context = PreflightContext(spec, launch, None, None, None)
    return [f"{verdict}: {message}" for verdict, message in CHECKS[name].run(context)]


def write_disks(*disks: Disk) -> None:
    device = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=Fact(value=2**30),
        memory_Bps=Fact(value=20e9),
        peaks_flops={"fp32": Fact(value=1e11)},
    )
    file.write(Path("cluster.json"), Cluster(name="other", nodes=2, device=device, disks=disks))


def make_disk(path: Path, read: float, random: float, opens: float | None = None) -> Disk:
    return Disk(
        path=str(path),
        read_Bps=Fact(value=read),
        write_Bps=Fact(value=read),
        random_reads_per_s=Fact(value=random),
        opens_per_s=Fact(value=opens) if opens else None,
    )


def test_room_of_a_cache(folder):
    assert run_check("cache", Loading()) == ["passes: data.cache=off: samples are read from their source"]
    (folder / "scratch").mkdir()
    with mount_tmpfs(folder / "scratch", "size=1m"):
        loading = Loading(cache="scratch", cache_folder="scratch")
        sizes = sum(path.stat().st_size for path in (folder / "images").rglob("*.png"))
        first = run_check("cache", loading)[0]
        assert first.startswith("passes: the samples need ")
        assert f"{(sizes + 40 * 16) / 1024:.1f} KiB in at most" in first
        assert first.endswith("of scratch on each node, of 512.0 KiB at most")
        small = Loading(cache="scratch", cache_folder="scratch", cache_gib=2**-20)
        assert "warns: the samples need" in (line := run_check("cache", small)[0])
        assert f"but the limit is 1.0 KiB: {1024 / (sizes + 640):.0%} of them will be cached" in line
        large = Loading(cache="scratch", cache_folder="scratch", cache_gib=1)
        assert (
            "warns: data.cache_gib=1 is more than the 1.0 MiB free in scratch" in run_check("cache", large)[0]
        )


def test_time_of_a_cache(folder):
    loading = Loading(cache="scratch", cache_folder="scratch")
    (folder / "scratch").mkdir()
    assert "time is not predicted, because the disk of" in run_check("cache", loading)[1]
    write_disks(make_disk(folder, 1e6, 10.0), make_disk(folder / "scratch", 1e9, 1e5))
    # 40 random reads of 0.1 s are 4 s; the shards are staged in milliseconds
    assert "passes: one reader takes 4.0 s for an epoch from the source, " in (
        line := run_check("cache", loading)[1]
    )
    assert line.endswith("it pays from epoch 1 on, of 10")
    # loose files are staged as slowly as they are read: the second epoch pays
    line = run_check("cache", loading, folder="images")[1]
    assert line.endswith("it pays from epoch 2 on, of 10")
    assert "warns" in (line := run_check("cache", loading, folder="images", steps=4)[1])
    assert line.endswith("it pays from epoch 2 on, but the training has 1")
    write_disks(make_disk(folder, 1e9, 1e5), make_disk(folder / "scratch", 1e9, 1e5))
    assert "the cache is not faster; use data.cache=off" in run_check("cache", loading)[1]


@pytest.mark.parametrize(
    ("times", "first"),
    [
        ((10.0, 0.0, 1.0, 1), 1),
        ((10.0, 8.9, 1.0, 1), 1),
        ((10.0, 9.1, 1.0, 1), 2),
        ((10.0, 90.1, 1.0, 1), 11),
        ((10.0, 9.1, 1.0, 4), 5),
        ((1.0, 0.0, 1.0, 1), None),
    ],
)
def test_first_epoch_that_pays(times, first):
    found = CacheTimes(*times)
    assert found.first_epoch == first
    if first is not None:  # the sums of the epochs say the same
        source_s, stage_s, cached_s, nodes = times

        def gain(epochs):
            return epochs * (source_s - cached_s) / nodes - stage_s

        assert gain(first) > 0 >= gain(first - 1)


def test_usage_by_purpose(folder, monkeypatch):
    for name, parts in {"venv": 3, "runs/a": 2, "runs/a/ckpt/step_1": 5, "elsewhere": 7}.items():
        (folder / name).mkdir(parents=True)
        for part in range(parts):
            (folder / name / f"{part}.bin").write_bytes(bytes(40_000))
    (folder / "runs/a/events.jsonl").touch()
    (folder / "venv/link").symlink_to(folder / "elsewhere")
    monkeypatch.setattr(sys, "prefix", str(folder / "venv"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    [line] = run_check("usage", Loading(), run=str(folder / "runs/b"))
    size = 40_960 if os.stat(folder / "venv/0.bin").st_blocks * 512 == 40_960 else None
    assert f"on the file system of {folder / 'runs'}: environment " in line
    assert " in 4 files, data " in line
    assert " in 2 files, checkpoints " in line  # a shard and its index
    assert line.endswith(" in 4 files")  # logs: two files, the events and the folder of checkpoints
    if size:
        assert f"checkpoints {(5 * size + 4096) / 1024:.1f} KiB in 6 files" in line
    for name in ("session_2026-11-24_01-02-03_000004_5/logs", "other"):
        (folder / "ray" / name).mkdir(parents=True)
        (folder / "ray" / name / "raylet.out").write_bytes(bytes(40_000))
    (folder / "ray/session_latest").symlink_to(folder / "ray/other")
    [line] = run_check("usage", Loading(), run=str(folder / "runs/b"))
    ray = line.partition(", temporary files of Ray ")[2]
    assert re.fullmatch(r"[0-9.]+ KiB in 2 files", ray)  # a folder of a session, and its log


def limit(monkeypatch: pytest.MonkeyPatch, path: Path, **more: int) -> None:
    monkeypatch.setattr(directories, "read_quotas", lambda: [(str(path), Quota(**more))])


def test_a_cache_counts_towards_the_quota(folder, monkeypatch):
    (folder / "scratch").mkdir()
    loading = Loading(cache="scratch", cache_folder="scratch")
    without = run_check("room", Loading())[0]
    assert " and a cache of " not in without
    [line] = [line for line in run_check("room", loading) if " and a cache of " in line]
    count = int(re.search(r" in ([0-9]+) files; ", without)[1])
    assert f" in {count + 259} files; " in line
    limit(monkeypatch, folder, used_bytes=0, limit_bytes=2**40, used_files=0, limit_files=count + 1)
    assert run_check("room", Loading())[0].startswith("passes: ")
    assert f"has {count + 1} files left of a quota of {count + 1}" in run_check("room", loading)[0]
    limit(monkeypatch, folder, used_bytes=2**30 - 100, limit_bytes=2**30)
    line = run_check("cache", loading)[0]
    assert line.startswith("warns: the samples need ")
    assert "but it has 100 B left of a quota of 1.0 GiB; use a smaller data.cache_gib" in line
    with mount_tmpfs(folder / "scratch", "size=1m"):  # another file system, which the quota does not count
        assert " and a cache of " not in run_check("room", loading)[-1]


def test_usage_is_compared_with_the_quota(folder, monkeypatch):
    assert "together" not in run_check("usage", Loading())[0]
    limit(monkeypatch, folder, used_bytes=2**30, limit_bytes=2**31, used_files=70)
    [line] = run_check("usage", Loading(), run=str(folder / "runs/b"))
    assert "; together " in line
    assert line.endswith(", while the quota counts 1.0 GiB of 2.0 GiB in 70 files")


def test_inodes_of_the_samples(folder):
    loose, packed, mounted = (
        run_check("data", Loading(), folder=name)[-1] if name != "mounted" else name
        for name in ("images", "packed", "mounted")
    )
    assert loose.endswith(" in 40 files of images")  # too few to recommend packing
    saved = "which is packed from 40 files and saves 38 inodes"
    assert packed.endswith(f" in 2 files of {folder / 'packed'}, {saved}")
    many = SourceSize(folder, 2**29 + 1, 5000, 5000, True)
    assert describe_source(many, []).endswith("; paceline pack would save 4,996 inodes")
    require_programs("mksquashfs")
    (folder / mounted).mkdir()
    subprocess.run(["mksquashfs", "images", "image", "-quiet", "-no-progress"], check=True)
    with mount_squashfs(["squashfuse", "image", mounted], folder):
        line = run_check("data", Loading(), folder=mounted)[-1]
    assert line.endswith(" in 40 files of mounted, which is one SquashFS image and saves 39 inodes")


def test_usage_elsewhere_is_left_out(folder):
    (folder / "other").mkdir()
    with mount_tmpfs(folder / "other", "size=1m"):
        (folder / "other/file").write_bytes(bytes(5000))
        device = os.stat(folder).st_dev
        assert measure_folders([folder / "other"], device, []).files == 0
        whole = measure_folders([folder], device, [])
        assert whole.is_whole
        assert whole.files == sum(1 for _ in folder.rglob("*")) - 1
    assert not measure_folders([folder], device, [], seconds=0.0).is_whole
