"""paceline pack and unpack: shards are compared with tar, tarfile and the files that were packed."""

import os
import random
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from command import clean_environment, paceline, succeed
from image_files import write_images
from paceline.data import Folder, Shards
from paceline.data.shards import pack as packing
from paceline.data.shards.pack import pack
from paceline.data.shards.shard_files import ShardFiles
from paceline.data.shards.source_files import find_sources, plan_shards
from paceline.data.shards.unpack import unpack
from paceline.errors import DataError


def describe(folder: Path) -> dict[bytes, tuple]:
    """Return kind, permissions, time and content of everything below a folder."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        is_folder = stat.S_ISDIR(status.st_mode)
        content = None if is_folder else (int(status.st_mtime), path.read_bytes())
        found[os.fsencode(path.relative_to(folder))] = (is_folder, stat.S_IMODE(status.st_mode), content)
    return found


def write_files(folder: Path, count: int = 60, seed: int = 0) -> Path:
    generator = random.Random(seed)
    for number in range(count):
        path = folder / f"class {number % 3}" / f"{number}.{generator.choice(['bin', 'JPG', 'seg.png'])}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.randbytes(generator.choice([0, 1, 511, 512, 513, 5000])))
        path.chmod(generator.choice([0o600, 0o644, 0o755]))
        os.utime(path, (10**9 + number, 10**9 + number))
    return folder


@pytest.fixture
def source(tmp_path):
    folder = write_files(tmp_path / "source")
    (folder / "empty/inner").mkdir(parents=True)
    (folder / "empty").chmod(0o500)
    (folder / "class 0" / ("long " * 40 + ".txt")).write_bytes(b"long")
    (folder / "class 0/__meta__").write_bytes(b"x")
    (folder / "ünï€.txt").write_bytes(b"text")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.txt"))).write_bytes(b"not UTF-8")
    return folder


def test_unpack_restores_what_was_packed(source, tmp_path):
    result = pack([source], tmp_path / "packed", shard_bytes=30_000)
    before = describe(source)
    assert (result.files, result.inodes_before) == (64, len(before))
    assert result.inodes_after == len(list((tmp_path / "packed").iterdir())) == result.shards + 1
    assert result.shards > 3
    assert unpack(tmp_path / "packed", tmp_path / "back").files == 64
    assert describe(tmp_path / "back") == before
    # and so does tar
    (tmp_path / "tar").mkdir()
    for shard in sorted((tmp_path / "packed").glob("*.tar")):
        subprocess.run(["tar", "-xpf", shard, "-C", tmp_path / "tar"], check=True)
    assert describe(tmp_path / "tar") == before


def test_shards_are_sorted_and_keep_samples_whole(tmp_path):
    for name in ("b", "a", "a-b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(5):
            for part in ("jpg", "cls", "json"):
                (tmp_path / f"in/{name}/{number}.{part}").write_bytes(b"x" * 600)
    result = pack([tmp_path / "in"], tmp_path / "out", shard_bytes=5000)
    assert result.shards >= 8
    names = []
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(shard) as tar:
            files = [member.name for member in tar if member.isreg()]
        assert len(files) % 3 == 0
        names += files
    assert names == sorted(names, key=os.fsencode)
    assert len(Shards(tmp_path / "out")) == 15
    assert set(Shards(tmp_path / "out")[7]) == {"__key__", "jpg", "cls", "json"}


def test_packed_images_are_the_samples_of_the_folder(tmp_path):
    write_images(tmp_path / "images", {"b": 4, "b-2": 3, "a": 12})
    pack([tmp_path / "images"], tmp_path / "packed", shard_bytes=4000)
    plain, packed = Folder(tmp_path / "images", None), Folder(tmp_path / "packed", None)
    assert [packed[index] for index in range(19)] == [plain[index] for index in range(19)]
    assert packed.classes == plain.classes


@pytest.mark.processes
def test_processes_write_the_same_shards(source, tmp_path):
    pack([source], tmp_path / "one", shard_bytes=20_000)
    pack([source], tmp_path / "two", shard_bytes=20_000, workers=3)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()


def test_pack_continues_after_complete_shards(source, tmp_path, monkeypatch):
    pack([source], tmp_path / "whole", shard_bytes=20_000)
    written, write = [], packing.write_shard

    def record(shard, out):
        written.append(shard.name)
        write(shard, out)

    def stop_at_third(shard, out):
        if len(written) == 2:
            raise KeyboardInterrupt
        record(shard, out)

    monkeypatch.setattr(packing, "write_shard", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        pack([source], tmp_path / "out", shard_bytes=20_000)
    for read in (Shards, lambda folder: unpack(folder, tmp_path / "back")):
        with pytest.raises(DataError, match="is packed only in part; run the same paceline pack again"):
            read(tmp_path / "out")
    os.truncate(tmp_path / "out" / written[1], 1000)  # a complete shard that was damaged meanwhile
    (tmp_path / "out/.shard-000007.tar.partial").write_bytes(b"of a process that was killed")
    monkeypatch.setattr(packing, "write_shard", record)
    result = pack([source], tmp_path / "out", shard_bytes=20_000)
    assert written[2] == written[1]
    assert result.written == result.shards - 1
    assert describe(tmp_path / "out").keys() == describe(tmp_path / "whole").keys()
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    (tmp_path / "out/.shard-000001.0123456789abcdef.index").touch()
    assert pack([source], tmp_path / "out", shard_bytes=20_000).written == 0
    assert describe(tmp_path / "out").keys() == describe(tmp_path / "whole").keys()


def test_files_that_changed_are_packed_again(source, tmp_path, monkeypatch):
    written, write = [], packing.write_shard

    def record(shard, out):
        written.append(shard.name)
        write(shard, out)

    monkeypatch.setattr(packing, "_join_indices", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack([source], tmp_path / "out", shard_bytes=20_000)
    monkeypatch.undo()
    (source / "class 2/2.new").write_bytes(b"new")
    monkeypatch.setattr(packing, "write_shard", record)
    result = pack([source], tmp_path / "out", shard_bytes=20_000)
    assert 0 < len(written) < result.shards
    unpack(tmp_path / "out", tmp_path / "back")
    assert describe(tmp_path / "back") == describe(source)
    (source / "class 2/2.new").write_bytes(b"newer")
    with pytest.raises(DataError, match="was packed from other files"):
        pack([source], tmp_path / "out", shard_bytes=20_000)


def test_wrong_writes_are_found(source, tmp_path, monkeypatch):
    fsync = os.fsync

    def damage(file):
        fsync(file)
        os.pwrite(file, b"?", os.fstat(file).st_size // 2)

    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(DataError, match=r"differs from what was written|cannot read the shard"):
        pack([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


KILLED = """
import sys, time
from pathlib import Path
from paceline.data.shards import pack as packing
write = packing.write_shard
def slow(shard, out):
    write(shard, out)
    time.sleep(0.3)
packing.write_shard = slow
packing.pack([Path("source")], Path("out"), shard_bytes=20_000, workers=2)
"""


@pytest.mark.processes
def test_killed_pack_leaves_no_process_and_continues(source, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path, env=clean_environment())
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob(".shard-*.index")) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert children
    assert not (tmp_path / "out/shards.index").exists()
    result = pack([source], tmp_path / "out", shard_bytes=20_000)
    assert result.written < result.shards
    unpack(tmp_path / "out", tmp_path / "back")
    assert describe(tmp_path / "back") == describe(source)


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_several_sources_and_links(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "c.txt").symlink_to(tmp_path / "a/x.txt")
    result = pack([tmp_path / "a", tmp_path / "b", tmp_path / "c.txt"], tmp_path / "out")
    assert (result.files, result.links) == (3, 1)
    files = ShardFiles(tmp_path / "out")
    assert {files.names.decode(i): files.read(i) for i in range(3)} == {
        "a/x.txt": b"a",
        "b/x.txt": b"b",
        "c.txt": b"a",
    }


def test_plan_does_not_depend_on_the_order_of_folders(source, tmp_path, monkeypatch):
    expected = plan_shards(find_sources([source], tmp_path / "out"), 10_000)
    scandir = os.scandir

    class Reversed:
        def __init__(self, path):
            self.entries = reversed(list(scandir(path)))

        def __enter__(self):
            return self.entries

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(os, "scandir", Reversed)
    assert plan_shards(find_sources([source], tmp_path / "out"), 10_000) == expected


def make_tar(path: Path, member: tarfile.TarInfo) -> Path:
    path.mkdir()
    with tarfile.open(path / "a.tar", "w") as tar:
        tar.addfile(member)
    return path


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_members_cannot_leave_the_folder(name, tmp_path):
    make_tar(tmp_path / "evil", tarfile.TarInfo(name))
    with pytest.raises(DataError, match="leads out of the folder"):
        unpack(tmp_path / "evil", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_not_unpacked(kind, tmp_path):
    member = tarfile.TarInfo("x")
    member.type, member.linkname = kind, "/etc/passwd"
    make_tar(tmp_path / "evil", member)
    with pytest.raises(DataError, match="is a link or a device"):
        unpack(tmp_path / "evil", tmp_path / "out")


def test_damage_is_found_when_unpacking(source, tmp_path):
    pack([source], tmp_path / "out", shard_bytes=20_000)
    files = ShardFiles(tmp_path / "out")
    at = next(at for at in range(len(files.names)) if files.index.sizes[at] == 5000)
    with open(tmp_path / "out" / files.index.shards[files.index.find_shard(at)].name, "r+b") as file:
        file.seek(int(files.index.offsets[at]) + 99)
        file.write(b"\0\0\0\0")
    with pytest.raises(DataError, match=r"is damaged: its checksum differs"):
        unpack(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / ".back.unpacking").exists()
    (tmp_path / "out/shard-000001.tar").unlink()
    with pytest.raises(DataError, match=r"cannot read the shard .*shard-000001\.tar: No such file"):
        unpack(tmp_path / "out", tmp_path / "back")


@pytest.mark.processes
def test_commands(tmp_path):
    write_files(tmp_path / "in", 30)
    result = succeed("pack", "in", "out", "--shard-size", "20KiB", "--workers", "2", at=tmp_path)
    assert "out: 30 files (" in result.out
    assert "33 inodes became" in result.out
    assert "complete already" in succeed("pack", "in", "out", "--shard-size", "20KiB", at=tmp_path).out
    assert "back: 30 files (" in succeed("unpack", "out", "back", at=tmp_path).out
    assert describe(tmp_path / "back") == describe(tmp_path / "in")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pack in", "pack requires sources and the folder to write, got only in; add the folder"),
        ("pack none out", "no such file or folder: none"),
        ("pack empty out", "empty: no files; specify a folder with files"),
        ("pack in in/out", "in/out is inside of in; specify a folder outside of it"),
        ("pack in used", "used is not empty: it has file; specify a new folder"),
        ("pack in used/file", "cannot create the folder used/file: File exists"),
        ("pack in x/in out", "in and x/in have the same name in; rename one"),
        ("pack fifo out", "cannot pack fifo/pipe: it is a pipe; move it out of the source"),
        ("pack link out", "cannot pack link/to: it is a link to a folder; move it out of the source"),
        ("pack in out --shard-size much", "--shard-size: 'much' is not a number of bytes; write it as"),
        ("pack in out --shard-size 0", "--shard-size must be at least 1 B, got '0'"),
        ("unpack none out", "no such shard: none"),
        ("unpack empty out", "/empty has no shards (*.tar)"),
        ("unpack shards used", "used exists and is not an empty folder; specify a new folder"),
    ],
)
def test_bad_input_gives_one_sentence(words, message, tmp_path):
    for folder in ("in", "empty", "used", "x/in", "fifo", "link", "shards"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("in/a.txt", "used/file", "x/in/b"):
        (tmp_path / file).write_text("a")
    os.mkfifo(tmp_path / "fifo/pipe")
    (tmp_path / "link/to").symlink_to(tmp_path / "in")
    with tarfile.open(tmp_path / "shards/a.tar", "w") as tar:
        tar.add(tmp_path / "in/a.txt", "a.txt")
    result = paceline(*words.split(), at=tmp_path)
    assert (result.status, result.out) == (2, ""), result.all
    assert message in result.err
    assert result.err.startswith("paceline: ")
    assert result.err.count("\n") == 1
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
