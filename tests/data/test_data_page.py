"""The examples of docs/data.md run as written."""

import io
import os
import tarfile
from typing import Any

import pytest

from command import succeed
from image_files import write_images
from paceline.data import Mixture
from pages import read_blocks

BLOCKS = read_blocks("docs/data.md")
pytestmark = pytest.mark.processes


def test_folder_of_images(tmp_path):
    (tmp_path / "pictures.py").write_text(BLOCKS["pictures.py"])
    write_images(tmp_path / "images/train", {"a": 5, "b": 5})
    words = ("--set", "folder=images", "--batch", "4", "--steps", "2", "--run-dir", "run", "--no-report")
    assert "done" in succeed("train", "pictures.py", *words, at=tmp_path).out


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a", "b"], "label": [1, 2]}), tmp_path / "x.parquet")
    names: dict[str, Any] = {}
    exec(BLOCKS["parquet"], names)
    rows = names["Rows"](tmp_path / "x.parquet")
    assert [rows[index] for index in (0, 1)] == [{"text": "a", "label": 1}, {"text": "b", "label": 2}]


def test_lmdb(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "db")) as environment, environment.begin(write=True) as writer:
        for key in (b"one", b"two"):
            writer.put(key, key * 2)
    names: dict[str, Any] = {}
    exec(BLOCKS["lmdb"], names)
    records = names["Records"](str(tmp_path / "db"))
    assert [records[index] for index in range(len(records))] == [b"oneone", b"twotwo"]
    child = os.fork()
    if not child:  # a worker opens its own environment
        try:
            os._exit(0 if records[1] == b"twotwo" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_pack(tmp_path):
    write_images(tmp_path / "images", {"a": 5, "b": 5})
    for line in BLOCKS["pack"].splitlines():
        program, *words = line.partition("#")[0].split()
        assert program == "paceline"
        succeed(*words, at=tmp_path)
    assert (tmp_path / "packed/shard-000000.tar").exists()
    for path in (tmp_path / "images").rglob("*.png"):
        restored = tmp_path / "restored" / path.relative_to(tmp_path / "images")
        assert restored.read_bytes() == path.read_bytes()


def test_order(tmp_path):
    program, *words = BLOCKS["order"].split()
    assert program == "paceline"
    assert "done" in succeed(*words, "--run-dir", "run", "--no-report", at=tmp_path).out


def test_stream(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    monkeypatch.chdir(tmp_path)
    names: dict[str, list[dict[str, int]]] = {}
    exec(BLOCKS["stream"], names)
    assert [names["samples"][index] for index in (0, 1)] == [{"a": 1}, {"a": 2}]


def test_mixture():
    names: dict[str, Mixture] = {}
    exec(BLOCKS["mixture"], names)
    assert len(names["mixture"]) == 5800


def test_shards(tmp_path, monkeypatch, capsys):
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards/0.tar", "w") as tar:
        for name in ("1.jpg", "1.cls"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS["shards"], {})
    assert capsys.readouterr().out == "1 dict_keys(['__key__', 'jpg', 'cls'])\n"
