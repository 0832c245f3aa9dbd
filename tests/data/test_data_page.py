"""The examples of docs/data.md run as written."""

import glob
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from typing import Any

import pytest

from command import paceline, succeed
from image_files import write_images
from mounts import mount_squashfs, require_programs
from paceline.data import Folder, Mixture
from pages import ROOT, read_blocks

BLOCKS = read_blocks("docs/data.md")
pytestmark = pytest.mark.processes


def test_folder_of_images(tmp_path):
    (tmp_path / "pictures.py").write_text(BLOCKS["pictures.py"])
    write_images(tmp_path / "images/train", {"a": 5, "b": 5})
    words = ("--set", "folder=images", "--batch", "4", "--steps", "2", "--run-dir", "run", "--no-report")
    assert "done" in succeed("train", "pictures.py", *words, at=tmp_path).out


def test_cache(tmp_path):
    (tmp_path / "pictures.py").write_text(BLOCKS["pictures.py"])
    write_images(tmp_path / "images/train", {"a": 5, "b": 5})
    program, *words = BLOCKS["cache"].split()
    assert program == "paceline"
    done = succeed(*words, "--batch", "4", "--run-dir", "run", "--no-report", at=tmp_path)
    assert "cache of 'train': 10 of 10 files in" in done.out


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


def test_tokens(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "cat": 1, "mat": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tok.json"))
    (tmp_path / "corpus").mkdir()
    lines = [json.dumps({"text": "the cat sat on the mat " * 200}) for _ in range(20)]
    (tmp_path / "corpus/a.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    pack, train = (line.split()[1:] for line in BLOCKS["tokens"].splitlines())
    succeed(*[name for word in pack for name in glob.glob(word) or [word]], at=tmp_path)
    small = ("--set", "width=16", "--set", "depth=1", "--run-dir", "run", "--no-report")
    assert "done" in succeed(*train, *small, at=tmp_path).out
    names: dict[str, Any] = {}
    exec(BLOCKS["windows"], names)
    assert len(names["train"]) == (24_000 * 95 // 100 - 1) // 512
    shutil.rmtree(tmp_path / "run")
    result = paceline("train", "lm", "--set", "file=tokens", "--set", "vocabulary=2", *small, at=tmp_path)
    assert result.status == 2
    assert "the tokenizer has 3 tokens, more than vocabulary=2; use at least 3" in result.all


def test_squashfs(tmp_path):
    write_images(tmp_path / "images", {"a": 5, "b": 5})
    pack_image, make_folder, mount = (
        line.partition("#")[0].split() for line in BLOCKS["squashfs"].splitlines()
    )
    require_programs("mksquashfs", "unsquashfs")
    subprocess.run(pack_image, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(make_folder, cwd=tmp_path, check=True)
    loose = Folder(tmp_path / "images", None)
    [restore] = re.findall("`(unsquashfs .*?)`", (ROOT / "docs/data.md").read_text())
    subprocess.run(restore.split(), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    restored = Folder(tmp_path / "folder", None)
    assert [restored[at] for at in range(10)] == [loose[at] for at in range(10)]
    with mount_squashfs(mount, tmp_path):
        image = Folder(tmp_path / "mounted", None)
        assert [image[at] for at in range(10)] == [loose[at] for at in range(10)]
        assert image.labels.tolist() == loose.labels.tolist()
