"""Folder and Shards: samples of image folders and tar shards, compared with the files themselves."""

import multiprocessing
import os
import pickle
import stat
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_files import picture, write_images, write_tar
from paceline.data import Folder, Shards
from paceline.data.shards.name_table import NameTable
from paceline.data.shards.shard_index import split_sample_name
from paceline.errors import DataError

LONG = "x" * 120 + "/" + "ü" * 60 + ".txt"
SHARDS = [
    {"a/1.jpg": b"one", "a/1.cls": b"3", "a/2.jpg": b"", "a/2.cls": b"4"},
    {LONG: b"long", "b.Seg.PNG": b"mask", "b.png": b"image", "no_extension": b"?", ".hidden": b"?"},
    {"a/1.jpg": b"another shard"},
]
SAMPLES = [
    {"__key__": "a/1", "jpg": b"one", "cls": b"3"},
    {"__key__": "a/2", "jpg": b"", "cls": b"4"},
    {"__key__": LONG.removesuffix(".txt"), "txt": b"long"},
    {"__key__": "b", "seg.png": b"mask", "png": b"image"},
    {"__key__": "a/1", "jpg": b"another shard"},
]


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, files in enumerate(SHARDS):
        write_tar(folder / f"{number}.tar", files)
    return folder


def test_samples_are_those_of_the_tar_files(shards):
    dataset = Shards(shards)
    assert [dataset[index] for index in range(len(dataset))] == SAMPLES
    assert (shards / "shards.index").exists()
    assert [Shards(shards)[index] for index in (4, 0)] == [SAMPLES[4], SAMPLES[0]]
    with pytest.raises(IndexError):
        dataset[5]
    assert Shards(shards, decode=lambda sample: len(sample))[1] == 3


@pytest.mark.parametrize("format", ["ustar", "pax", "gnu", "tar"])
def test_formats_of_tar(format, tmp_path):
    files = {f"{number:03}.txt": os.urandom(number * 211) for number in range(20)}
    if format == "tar":  # the program
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        subprocess.run(["tar", "-cf", "a.tar", "--format=gnu", *files], cwd=tmp_path, check=True)
    else:
        kinds = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
        write_tar(tmp_path / "a.tar", files, format=kinds[format])
    dataset = Shards(tmp_path / "a.tar")
    assert {
        f"{sample['__key__']}.txt": sample["txt"] for sample in map(dataset.__getitem__, range(20))
    } == files
    assert not (tmp_path / "shards.index").exists()  # the folder may have other shards


def test_index_of_a_folder_without_write_permission_is_in_the_cache(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write everywhere
    assert Shards(shards)[0] == SAMPLES[0]
    assert not (shards / "shards.index").exists()
    [index] = (tmp_path / "cache/paceline/shards").iterdir()
    assert stat.S_IMODE(index.parent.stat().st_mode) == 0o700
    before = index.stat().st_mtime_ns
    assert Shards(shards)[4] == SAMPLES[4]
    assert index.stat().st_mtime_ns == before


def test_changed_shards_are_indexed_again(shards):
    Shards(shards)
    write_tar(shards / "0.tar", {"new.txt": b"new"})
    assert Shards(shards)[0] == {"__key__": "new", "txt": b"new"}
    write_tar(shards / "3.tar", {"last.txt": b"last"})
    assert Shards(shards)[-1 + len(Shards(shards))] == {"__key__": "last", "txt": b"last"}


def test_damaged_sample_is_named(shards):
    dataset = Shards(shards)
    tar = shards / "1.tar"
    content = bytearray(tar.read_bytes())
    at = content.index(b"mask")
    content[at] ^= 1
    with open(tar, "r+b") as file:  # under the open dataset
        file.write(content)
    assert dataset[2] == SAMPLES[2]
    with pytest.raises(DataError, match=r"b\.Seg\.PNG in .*/1\.tar is damaged: its checksum"):
        dataset[3]


def test_a_missing_member_is_named(tmp_path):
    files = {"d/1.jpg": b"1", "d/1.cls": b"3", "d/2.jpg": b"2", "d/2.json": b"{}"}
    write_tar(tmp_path / "0.tar", files)
    dataset = Shards(tmp_path, lambda sample: int(sample["cls"]))
    assert dataset[0] == 3
    with pytest.raises(DataError, match=r"the sample d/2 in .*/0.tar has no file 'cls', only jpg, json"):
        dataset[1]
    with pytest.raises(KeyError, match="other"):  # not a file of the sample
        Shards(tmp_path, lambda sample: {}[sample["jpg"], "other"])[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "2.tar").write_bytes(b"no tar file" * 100),
            "cannot read the shard .*2.tar",
        ),
        (lambda folder: os.truncate(folder / "1.tar", 1300), "cannot read the shard .*1.tar|truncated"),
        (lambda folder: (folder / "shards.index").write_bytes(b"{}"), "shards.index is not an index"),
        (lambda folder: (folder / "shards.index").write_bytes(b""), "cannot read the index"),
        (lambda folder: os.truncate(folder / "shards.index", 600), "shards.index is not an index"),
    ],
    ids=["no tar", "truncated", "index of another kind", "empty index", "part of an index"],
)
def test_damaged_files(damage, message, shards):
    if "index" in message:
        Shards(shards)
    damage(shards)
    with pytest.raises(DataError, match=message) as raised:
        Shards(shards)
    assert "\n" not in str(raised.value)


def test_missing_shards(tmp_path):
    with pytest.raises(DataError, match=r"no such shard: .*/none\.tar"):
        Shards(tmp_path / "none.tar")
    with pytest.raises(DataError, match=r"has no shards \(\*\.tar\)"):
        Shards(tmp_path)
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(DataError, match=r"decompress a\.tar\.gz"):
        Shards(tmp_path)
    with pytest.raises(DataError, match="no shards were specified"):
        Shards([])


def read_all(dataset) -> list:
    return [dataset[index] for index in range(len(dataset))]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_read_the_same(method, shards):
    dataset = Shards(shards)
    dataset[0]  # opens a file before the fork
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(read_all, [dataset, dataset]) == [SAMPLES, SAMPLES]
        pool.close()
        pool.join()
    assert read_all(pickle.loads(pickle.dumps(dataset))) == SAMPLES


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.shards.shard_files.MAX_OPEN_FILES", 2)
    for number in range(5):
        write_tar(tmp_path / f"{number}.tar", {f"{number}.txt": b"%d" % number})
    dataset = Shards(tmp_path)
    assert [dataset[index]["txt"] for index in (0, 1, 2, 3, 4, 2, 0)] == [
        b"0",
        b"1",
        b"2",
        b"3",
        b"4",
        b"2",
        b"0",
    ]
    assert len(dataset.files._open) == 2


def test_folder_of_images(tmp_path):
    write_images(tmp_path, {"cat": 3, "cat-wild": 1, "ant": 2})
    (tmp_path / "cat/notes.txt").write_text("no image")
    (tmp_path / "README").write_text("no image")
    (tmp_path / "ant/more").mkdir()
    (tmp_path / "ant/more/x.JPG").write_bytes(picture(9, kind="JPEG"))
    folder = Folder(tmp_path)
    assert folder.classes == ["ant", "cat", "cat-wild"]
    paths = sorted(
        (path for path in tmp_path.rglob("*") if path.suffix.lower() in (".png", ".jpg")), key=os.fsencode
    )
    expected = [(path, folder.classes.index(path.relative_to(tmp_path).parts[0])) for path in paths]
    assert len(folder) == len(expected) == 7
    assert folder.labels.tolist() == [label for _, label in expected]
    for index, (path, label) in enumerate(expected):
        image, number = folder[index]
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert torch.equal(image, torch.tensor(pixels).permute(2, 0, 1))
        assert (number, folder.path(index)) == (label, str(path))
        assert Folder(tmp_path, decode=None)[index] == (path.read_bytes(), label)


def test_folder_in_shards_has_the_same_samples(tmp_path):
    write_images(tmp_path / "images", {"b": 4, "b-2": 3, "a": 2})
    (tmp_path / "images/b/notes.txt").write_text("no image")
    names = sorted((path for path in (tmp_path / "images").rglob("*.*")), key=os.fsencode)
    (tmp_path / "packed").mkdir()
    for number in range(2):
        files = {str(p.relative_to(tmp_path / "images")): p.read_bytes() for p in names[number * 5 :][:5]}
        write_tar(tmp_path / f"packed/{number}.tar", files)
    plain, packed = Folder(tmp_path / "images", None), Folder(tmp_path / "packed", None)
    assert read_all(packed) == read_all(plain)
    assert (packed.classes, packed.labels.tolist()) == (plain.classes, plain.labels.tolist())
    assert packed.path(4) == str(tmp_path / "packed" / Path(plain.path(4)).relative_to(tmp_path / "images"))


def test_classes_of_another_split(tmp_path):
    write_images(tmp_path, {"b": 1, "c": 1})
    assert Folder(tmp_path, None, classes=["a", "b", "c"]).labels.tolist() == [1, 2]
    with pytest.raises(DataError, match=r"has the class 'c', which is not in classes \(a, b\); rename"):
        Folder(tmp_path, None, classes=["a", "b"])


def test_bad_folders(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        Folder(tmp_path / "none")
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="has 1 files but no images"):
        Folder(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x.png").write_bytes(picture(0)[:60])
    with pytest.raises(DataError, match=r"b/x\.png: it is not an image, or is damaged"):
        Folder(tmp_path)[0]
    (tmp_path / "b/x.png").unlink()
    (tmp_path / "b/x.png").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match="it is not an image"):
        Folder(tmp_path)[0]
    (tmp_path / "b/x.png").unlink()
    (tmp_path / "b/x.png").symlink_to(tmp_path / "none.png")  # a sample that would silently be missing
    with pytest.raises(DataError, match=r"cannot read .*b/x\.png: No such file"):
        Folder(tmp_path)[0]
    (tmp_path / "c.png").write_bytes(picture(0))
    with pytest.raises(DataError, match=r"c\.png is in no class folder"):
        Folder(tmp_path)
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars/1.tar", {"b/1.png": b"", "a/1.png": b""})
    with pytest.raises(DataError, match="are not sorted by name"):
        Folder(tmp_path / "tars")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a/b.c.jpg", ("a/b", "c.jpg")),
        ("x.y/b.JPG", ("x.y/b", "jpg")),
        ("b", None),
        (".b", None),
        ("a/.b.c", None),
        ("a.", None),
    ],
)
def test_names_of_samples(name, split):
    found = split_sample_name(name.encode())
    assert (found and (found[0].decode(), found[1])) == split


def test_name_table():
    names = [b"a.jpg", b"", b"b.JPEG", b"c.jpgx", b"jpg", b".jpg", b"\xff.Jpg", b"x.\x2aPG"]
    table = NameTable.build(names)
    assert list(table) == names
    assert table.find_with_suffix([".jpg", ".jpeg"]).tolist() == [0, 2, 6]
    ordered = NameTable.build(sorted(names))
    for name in (b"", b"b", b"zz", b"a.jpg"):
        assert ordered.find_first_at_least(name) == sum(other < name for other in names)
