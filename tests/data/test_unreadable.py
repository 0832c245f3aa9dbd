"""Files and folders without permission are one sentence with the path, and nothing is half-written."""

import ctypes
import os
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from image_files import write_images, write_tar
from paceline.data import Folder, Shards, Tokens
from paceline.data.shards.pack import pack
from paceline.data.shards.unpack import unpack
from paceline.errors import DataError
from paceline.tasks.imagefolder import ImageFolder

CAPABILITIES_VERSION = 0x20080522  # linux/capability.h


def run_unprivileged(function: Callable[[], Any]) -> str:
    """Return the message of the DataError that a function raises in a process without root's rights."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            header, none = struct.pack("Ii", CAPABILITIES_VERSION, 0), bytes(24)
            assert ctypes.CDLL(None, use_errno=True).capset(header, none) == 0
            function()
            os.write(write_end, b"no error")
        except DataError as error:
            os.write(write_end, str(error).encode())
        except BaseException:
            os.write(write_end, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        message = file.read().decode()
    os.waitpid(child, 0)
    return message


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "images/train", {"a": 2, "b": 2})
    (folder / "shards").mkdir()
    write_tar(folder / "shards/0.tar", {"1.txt": b"1"})
    Shards(folder / "shards")
    np.arange(100, dtype="<u2").tofile(folder / "x.bin")
    (folder / "closed").mkdir()
    return folder


def read_all(dataset: Any) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


CASES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "class": ("images/train/b", lambda at: Folder(at / "images/train", None)),
    "image": ("images/train/b/01.png", lambda at: read_all(Folder(at / "images/train", None))),
    "split": ("images/train", lambda at: ImageFolder(folder=str(at / "images")).classes),
    "shard": ("shards/0.tar", lambda at: read_all(Shards(at / "shards"))),
    "index": ("shards/shards.index", lambda at: Shards(at / "shards")),
    "tokens": ("x.bin", lambda at: Tokens(at / "x.bin", 5, dtype="uint16")),
    "pack file": ("images/train/b/01.png", lambda at: pack([at / "images"], at / "out", 2**20, 2)),
    "pack folder": ("images/train/b", lambda at: pack([at / "images"], at / "out", 2**20, 2)),
    "pack into": ("closed", lambda at: pack([at / "images"], at / "closed/out", 2**20, 1)),
    "unpack": ("shards/0.tar", lambda at: unpack(at / "shards", at / "out")),
    "unpack into": ("closed", lambda at: unpack(at / "shards", at / "closed/out")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_path_without_permission_is_named(name: str, data: Path) -> None:
    path, function = CASES[name]
    mode = (data / path).stat().st_mode
    before = sorted(data.rglob("*"))
    (data / path).chmod(0)
    try:
        message = run_unprivileged(lambda: function(data))
    finally:
        (data / path).chmod(mode)
    assert f"{data / path}" in message
    assert "Permission denied" in message
    assert "\n" not in message
    assert sorted(data.rglob("*")) == before
    assert run_unprivileged(lambda: read_all(Folder(data / "images/train", None))) == "no error"
