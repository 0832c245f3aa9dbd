"""bench storage: directories are measured, also if they are full or on an interrupt, and left unchanged."""

import errno
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from command import paceline, start, succeed
from mounts import mount_tmpfs
from paceline.bench.storage import io_ops, suite
from paceline.bench.storage.advice import give_advice
from paceline.bench.storage.suite import TESTS, check_directories, measure
from paceline.errors import BenchError

pytestmark = pytest.mark.processes

ALL = [test.name for test in TESTS]


def measure_folder(folder: Path, budget_s: float = 0.5) -> dict[str, dict]:
    return {row["test"]: row for row in measure(folder, budget_s, 2)}


def test_command_leaves_the_directory_empty(tmp_path):
    folder = tmp_path / "measured"
    folder.mkdir()
    result = succeed(
        "bench", "storage", folder, "--seconds", "1", "--json", "a.json", "--plot", "a.svg", at=tmp_path
    )
    assert list(folder.iterdir()) == []
    tree = json.loads((tmp_path / "a.json").read_text())
    assert [row["test"] for row in tree["rows"]] == ALL
    for row in tree["rows"]:
        assert row["directory"] == str(folder)
        rate, amount = ("Bps", row["bytes"]) if "Bps" in row else ("per_s", row["n"])
        assert row[rate] == pytest.approx(amount / row["seconds"])
        assert row["min_s"] <= row["median_s"] <= row["p95_s"]
    assert (
        tree["rows"][ALL.index("small write")]["bytes"] == 512 * tree["rows"][ALL.index("small write")]["n"]
    )
    assert all(test in result.out for test in ALL)
    assert f"{folder}: " in result.out
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    compared = succeed("bench", "storage", "--compare", "a.json", "a.json", at=tmp_path)
    assert f"1.000 (quartiles 1.000–1.000) over {len(ALL)} rows" in compared.out


def test_slow_disk_gives_low_rates(tmp_path, monkeypatch):
    """A disk with 20 ms per write cannot reach a higher rate."""
    write = os.write

    def write_slowly(file: int, data: bytes) -> int:
        time.sleep(0.02)
        return write(file, data)

    monkeypatch.setattr(io_ops.os, "write", write_slowly)
    rows = measure_folder(tmp_path)
    assert rows["small write"]["per_s"] < 50
    assert rows["create"]["per_s"] < 50


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC])
def test_quota_exceeded_during_a_test(code, tmp_path, monkeypatch):
    """The samples until then are kept with the message of the system, and other tests continue."""
    writev, room = os.writev, [3 * 2**20]

    def limited(file: int, parts: list) -> int:
        if room[0] <= 0:
            raise OSError(code, os.strerror(code))
        written = writev(file, parts)
        room[0] -= written
        return written

    monkeypatch.setattr(suite, "MAX_BYTES", 16 * 2**20)
    monkeypatch.setattr(io_ops, "TRIAL", 2**20)
    monkeypatch.setattr(io_ops, "BLOCKS", (2**20, 4096))
    monkeypatch.setattr(io_ops.os, "writev", limited)
    rows = measure_folder(tmp_path, 2.0)
    assert rows["large write"]["bytes"] == 2 * 2**20
    assert rows["large write"]["n"] == 2
    assert rows["large write"]["note"] == os.strerror(code)
    assert rows["direct write"]["bytes"] == 0
    assert rows["direct write"]["note"] == os.strerror(code)
    assert rows["small write"]["n"] > 0
    assert list(tmp_path.iterdir()) == []


def test_limit_on_the_size_of_files(tmp_path):
    """Use a real limit: no file can be larger than 256 KiB."""
    limited = ("bash", "-c", f'ulimit -f 256; exec {" ".join(PROGRAM)} "$@"', "paceline")
    result = succeed("bench", "storage", tmp_path, "--seconds", "1", at=tmp_path, program=limited)
    assert "large write in" in result.out
    assert "File too large" in result.out
    assert list(tmp_path.iterdir()) == []


PROGRAM = (os.sys.executable, "-m", "paceline")


def test_file_system_with_little_space(tmp_path):
    with mount_tmpfs(tmp_path, "size=3m,nr_inodes=60") as folder:
        rows = measure_folder(folder)
        assert list(rows) == ALL
        assert all(
            row["bytes"] <= 2**21 for name, row in rows.items() if "write" in name and name != "small write"
        )
        assert rows["create"]["n"] <= 30
        assert "page cache" in rows["read"]["note"]
        assert list(folder.iterdir()) == []


def test_full_directory(tmp_path):
    with mount_tmpfs(tmp_path, "size=1200k") as folder:
        (folder / "filler").write_bytes(bytes(2**20))
        with pytest.raises(
            BenchError,
            match=rf"^{folder} is full: 1.*KiB .*are required; free some space, or specify another directory",
        ):
            check_directories([folder])
        assert [path.name for path in folder.iterdir()] == ["filler"]


def test_directory_without_free_files(tmp_path):
    with (
        mount_tmpfs(tmp_path, "size=8m,nr_inodes=20") as folder,
        pytest.raises(BenchError, match=r"and 1\d files are free, but at least"),
    ):
        check_directories([folder])


def test_read_only_directory(tmp_path):
    with (
        mount_tmpfs(tmp_path, "size=4m,ro") as folder,
        pytest.raises(BenchError, match=r"^cannot write in .*: Read-only file system"),
    ):
        check_directories([folder])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "no such directory: {at}/none; specify an existing directory"),
        ([".", "file"], "{at}/file is a file; specify a directory"),
        ([], "no directory to measure; specify at least one, e.g. paceline bench storage . /dev/shm"),
        (
            [".", "--json", "none/a.json"],
            "cannot write none/a.json: no such folder: none; create it first",
        ),
    ],
)
def test_bad_input_gives_one_sentence(words, message, tmp_path):
    (tmp_path / "file").write_text("")
    result = paceline("bench", "storage", *words, at=tmp_path)
    assert (result.status, result.out, result.err) == (2, "", f"paceline: {message.format(at=tmp_path)}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupt_prints_rows_and_leaves_the_directory_empty(number, tmp_path):
    folder = tmp_path / "measured"
    folder.mkdir()
    with start(
        "bench", "storage", folder, "--seconds", "10", "--json", "a.json", "--plot", "a.svg", at=tmp_path
    ) as running:
        running.wait_until(lambda: any(folder.glob("*/direct")), "at the second test")
        running.process.send_signal(number)
        result = running.wait()
    assert result.status == 130, result.all
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")  # drawn from the rows until then
    assert list(folder.iterdir()) == []
    assert "interrupted: the rows show what was measured until then" in result.out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert rows[0]["test"] == "large write"
    assert len(rows) < len(ALL)


def test_drop_cache():
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        if suite.read_free_space(Path(folder))["filesystem"] in (*suite.IN_MEMORY, "overlay"):
            pytest.skip("files in memory cannot be dropped")
        path = Path(folder) / "file"
        path.write_bytes(os.urandom(2**20))
        assert io_ops.cached_share(path) == 1.0
        with path.open("rb") as file:
            io_ops.drop_cache(file.fileno())
        assert io_ops.cached_share(path) == 0.0


def test_advice():
    def row(directory, filesystem, test, **rate):
        return {"directory": directory, "filesystem": filesystem, "test": test, **rate}

    rows = [
        row("/dev/shm", "tmpfs", "checkpoint", Bps=9e9),
        row("/home", "nfs", "checkpoint", Bps=3e8),
        row("/home", "nfs", "create", per_s=200.0),
        row("/scratch", "lustre", "checkpoint", Bps=8.76e8),
        row("/scratch", "lustre", "small write", per_s=962.0),
        row("/store", "nfs", "open", per_s=150.0),
    ]
    advice = {row["directory"]: row["advice"] for row in give_advice(rows)}
    assert list(advice) == ["/dev/shm", "/home", "/scratch", "/store"]
    assert advice["/store"].startswith("keep environments elsewhere, or in an image file: only 150 files")
    assert "keep nothing" in advice["/dev/shm"]
    assert advice["/home"] == "pack small files: only 200 can be created per second"
    assert advice["/scratch"].startswith("keep checkpoints here: 876 MB/s")
    assert "only 962 small writes per second" in advice["/scratch"]
    said = {"/home": True, "/scratch": False}
    with_backups = {
        row["directory"]: row["advice"] for row in give_advice(rows, lambda folder: said.get(str(folder)))
    }
    assert with_backups["/home"] == advice["/home"] + "; backed up: keep code and results here"
    assert with_backups["/scratch"] == advice["/scratch"] + "; not backed up: copy what you keep"
    assert with_backups["/store"] == advice["/store"]
