"""Attacks that a colleague on a shared machine or on the network of a cluster could try, replayed: none of them runs code or costs data."""

import ast
import base64
import contextlib
import io
import json
import os
import pickle
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

import paceline as paceline_package
from command import paceline, slow_down, start, succeed, write_task
from paceline.errors import CheckpointError, LaunchError, RunError
from paceline.launch import interface
from paceline.launch.interface import stay_here
from paceline.launch.meeting import SealedBackend, run_id
from paceline.launch.pool import Ranks as Pool
from paceline.launch.store import open_store
from paceline.launch.world import World
from paceline.run import RunFolder
from paceline.training.checkpoint import load_whole, read_index
from paceline.training.process import meet

# Folders of others: checkpoints


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of one rank with two checkpoints."""
    at = tmp_path_factory.mktemp("trained")
    write_task(at)
    succeed("train", "my.py:Regression", "--ranks", "1", "--steps", "4", "--batch", "8", "--save-every", "2", "--run-dir", "r", at=at)
    return at


def forge(checkpoint: Path, files: dict[str, bytes]) -> None:
    """Replace files of a checkpoint, with all sizes and checksums as they should be."""
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    index = json.loads((checkpoint / "checkpoint.json").read_text())
    index.pop("crc")
    index["files"] |= {name: [len(content), zlib.crc32(content)] for name, content in files.items()}
    write_index(checkpoint, index)


def write_index(checkpoint: Path, index: dict[str, Any]) -> None:
    index.pop("crc", None)
    (checkpoint / "checkpoint.json").write_text(json.dumps(index | {"crc": zlib.crc32(json.dumps(index).encode())}))


def instead_of_metadata(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    return {".metadata": pickle.dumps(Evil(marker))}


def deep_in_metadata(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    found = read_metadata(checkpoint)
    found.planner_data = {"model/0.weight": Evil(marker)}
    return {".metadata": pickle.dumps(found)}


def bytes_for_a_tensor(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    """The metadata make torch's planner call `torch.load(weights_only=False)` for every entry."""
    content = io.BytesIO()
    torch.save(Evil(marker), content)
    found = read_metadata(checkpoint)
    place = next(iter(found.storage_data.values()))
    place.offset, place.length = 0, len(content.getvalue())
    found.state_dict_metadata = {name: dcp.BytesStorageMetadata() for name in found.state_dict_metadata}
    found.storage_data = {dcp.MetadataIndex(name): place for name in found.state_dict_metadata}
    return {".metadata": pickle.dumps(found), place.relative_path: content.getvalue()}


def evil_tensors(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    """The metadata are as they were, and each tensor is something else."""
    content = io.BytesIO()
    torch.save(Evil(marker), content)
    found = read_metadata(checkpoint)
    for place in found.storage_data.values():
        place.offset, place.length = 0, len(content.getvalue())
    return {".metadata": pickle.dumps(found), place.relative_path: content.getvalue()}


def read_metadata(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


Attack = Callable[[Path, Path], dict[str, bytes]]
ATTACKS: dict[Attack, str] = {
    instead_of_metadata: "it names posix.system, which no checkpoint holds",
    deep_in_metadata: "it names posix.system, which no checkpoint holds",
    bytes_for_a_tensor: "is no tensor, and a checkpoint holds nothing else",
    evil_tensors: "cannot be read",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_checkpoint_runs_no_code(trained, tmp_path, attack):
    shutil.copytree(trained, tmp_path / "at")
    at, marker = tmp_path / "at", tmp_path / "PWNED"
    for step in (2, 4):
        forge(at / f"r/ckpt/step_{step}", attack(at / f"r/ckpt/step_{step}", marker))
    for words in (("export", "r", "w.safetensors"), ("export", "r", "w.safetensors", "--step", "2"), ("resume", "r", "--steps", "6")):
        refused = paceline(*words, at=at)
        assert not marker.exists(), f"{words} ran the code\n{refused.all}"
        assert refused.status != 0, refused.all
        assert ATTACKS[attack] in refused.all
        assert "Traceback" not in refused.all
    assert not (at / "w.safetensors").exists()
    assert sorted(path.name for path in (at / "r/ckpt").iterdir()) == ["step_2", "step_4"], "nothing was lost"


def test_the_attacks_would_work_on_torch_alone(trained, tmp_path):
    """Else they would prove nothing."""
    from torch.distributed.checkpoint import FileSystemReader, load

    shutil.copytree(trained / "r/ckpt/step_4", tmp_path / "a")
    forge(tmp_path / "a", instead_of_metadata(tmp_path / "a", tmp_path / "PWNED"))
    assert not (tmp_path / "PWNED").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path / "a").read_metadata()
    assert (tmp_path / "PWNED").exists()

    shutil.copytree(trained / "r/ckpt/step_2", tmp_path / "b")
    forge(tmp_path / "b", bytes_for_a_tensor(tmp_path / "b", tmp_path / "PWNED-too"))
    name = next(iter(read_metadata(tmp_path / "b").state_dict_metadata))
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load({name: torch.zeros(1)}, storage_reader=FileSystemReader(tmp_path / "b"), no_dist=True)
    assert (tmp_path / "PWNED-too").exists()


def change(found: Any, what: str) -> None:
    """Metadata that torch would take as they are."""
    name, entry = next(iter(found.state_dict_metadata.items()))
    place = next(iter(found.storage_data.values()))
    match what:
        case "a file elsewhere":
            place.relative_path = "../../../../other.distcp"
        case "a file from the root":
            place.relative_path = "/etc/passwd"
        case "before the beginning":
            place.offset = -5
        case "more than there is":
            entry.size, entry.chunks = torch.Size([10**14]), [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([10**14]))]
        case "a part missing":
            entry.chunks = []
        case "a part outside":
            entry.chunks[0].offsets = torch.Size([7] * len(entry.size))
        case "no text":
            found.state_dict_metadata[5] = found.state_dict_metadata.pop(name)
        case "no list":
            entry.chunks = {"a": 1}
        case "nothing":
            found.state_dict_metadata = None


@pytest.mark.parametrize(
    "what",
    [
        "a file elsewhere",
        "a file from the root",
        "before the beginning",
        "more than there is",
        "a part missing",
        "a part outside",
        "no text",
        "no list",
        "nothing",
    ],
)
def test_metadata_that_were_tampered_with_are_refused(trained, tmp_path, what):

    at = tmp_path / "step_4"
    shutil.copytree(trained / "r/ckpt/step_4", at)
    found = read_metadata(at)
    forge(at, {".metadata": pickle.dumps(found)})
    load_whole(at)
    change(found, what)
    forge(at, {".metadata": pickle.dumps(found)})
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        load_whole(at)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x04.", b"\x80\x04N.", b"\x80\x04(((((.", b"cos\nsystem\n(S'x'\ntR.", b"P1\n."])
def test_metadata_that_are_no_pickle_of_ours_are_refused(trained, tmp_path, content):

    at = tmp_path / "step_4"
    shutil.copytree(trained / "r/ckpt/step_4", at)
    forge(at, {".metadata": content})
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        load_whole(at)


def test_a_pickle_cannot_change_the_classes_that_it_names(trained, tmp_path):
    """BUILD sets attributes of whatever object it is given, also of a class."""

    at = tmp_path / "step_4"
    shutil.copytree(trained / "r/ckpt/step_4", at)
    whole = (at / ".metadata").read_bytes()
    forge(at, {".metadata": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}(X\x04\x00\x00\x00evilK\x01utb."})
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        load_whole(at)
    assert not hasattr(dcp.Metadata, "evil")
    forge(at, {".metadata": whole})
    assert load_whole(at).keys() == load_whole(trained / "r/ckpt/step_4").keys()


@pytest.mark.parametrize("name", ["../../spec.toml", "/etc/passwd", "..", "", "a\nb", "pipe"])
def test_an_index_names_only_regular_files_of_its_folder(trained, tmp_path, name):
    shutil.copytree(trained / "r", tmp_path / "r")
    shutil.rmtree(tmp_path / "r/ckpt/step_2")
    at = tmp_path / "r/ckpt/step_4"
    os.mkfifo(at / "pipe")
    index = json.loads((at / "checkpoint.json").read_text())
    index["files"][name] = [1, 1]
    write_index(at, index)
    refused = paceline("export", "r", "w.safetensors", at=tmp_path, timeout_s=60.0)
    assert refused.status == 2, refused.all
    assert "step_4 is damaged" in refused.out
    assert refused.err == "paceline: r has no whole checkpoint to export\n"


@pytest.mark.parametrize(
    ("key", "value"), [("step", 0), ("samples", 0), ("files", []), ("files", {"a": [1]}), ("shapes", 3), ("step", "four"), ("tied", [1])]
)
def test_an_index_of_another_kind_is_damaged(trained, tmp_path, key, value):

    index = json.loads((trained / "r/ckpt/step_4/checkpoint.json").read_text())
    write_index(tmp_path, index)
    assert read_index(tmp_path).step == 4
    write_index(tmp_path, index | {key: value})
    with pytest.raises(CheckpointError, match="is damaged"):
        read_index(tmp_path)


def test_whole_checkpoints_are_read_as_before(trained, tmp_path):
    succeed("export", trained / "r", "w.safetensors", at=tmp_path)
    found = load_file(tmp_path / "w.safetensors")
    expected = {name: torch.empty(meta.size) for name, meta in read_metadata(trained / "r/ckpt/step_4").state_dict_metadata.items()}
    from torch.distributed.checkpoint import FileSystemReader, load

    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load(expected, storage_reader=FileSystemReader(trained / "r/ckpt/step_4"), no_dist=True)
    weights = {name.removeprefix("model/"): tensor for name, tensor in expected.items() if name.startswith("model/")}
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weights[name]) for name in weights)
    assert RunFolder(trained / "r").checkpoints() == [2, 4]


# The network: stores


def listening(pids: Iterable[int]) -> dict[int, set[str]]:
    """By process the addresses on which it listens."""
    found: dict[int, set[str]] = {pid: set() for pid in pids}
    for pid, addresses in found.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses |= {one.laddr.ip for one in psutil.Process(pid).net_connections("inet") if one.status == psutil.CONN_LISTEN}
    return found


def ports(pid: int) -> list[int]:
    return [one.laddr.port for one in psutil.Process(pid).net_connections("inet") if one.status == psutil.CONN_LISTEN]


def test_a_store_listens_on_its_address_alone():
    me = os.getpid()
    before = listening([me])[me]
    stock = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not listening([me])[me] - before <= {"127.0.0.1"}, "torch's own listens everywhere, and this test can tell"
    del stock
    store = open_store()
    assert listening([me])[me] - before == {"127.0.0.1"}
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("a", "b")
    assert store.get("a") == b"b"
    port = store.port
    with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        open_store("127.0.0.1", port)
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.7"):
        open_store("192.0.2.7")
    del client, store
    open_store("127.0.0.1", port)


def test_pools_listen_on_loopback_alone():
    me = os.getpid()
    before = listening([me])[me]
    with Pool(1) as pool:
        pool.start()
        assert listening([me])[me] - before <= {"127.0.0.1"}
        assert ports(me)


def test_no_other_module_opens_a_store():
    """torch's class, called with `is_master`, listens on all interfaces."""
    for path in Path(paceline_package.__file__).parent.rglob("*.py"):
        if path.name == "store.py" and path.parent.name == "launch":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("TCPStore"):
                said = [*node.args[3:4], *(keyword.value for keyword in node.keywords if keyword.arg == "is_master")]
                assert [ast.unparse(one) for one in said] == ["False"], f"{path}, line {node.lineno}: use open_store"
            assert "env://" not in (ast.unparse(node) if isinstance(node, ast.Constant) else ""), f"{path}: torch would open a store"


def test_ranks_of_one_machine_stay_there(monkeypatch):
    """gloo, RPC and NCCL would listen where the name of this machine points to."""
    monkeypatch.setattr(interface.os, "environ", found := {"NCCL_SOCKET_IFNAME": "eth7"})
    stay_here()
    loopback = {name for name, addresses in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in addresses)}
    assert {found["GLOO_SOCKET_IFNAME"], found["TP_SOCKET_IFNAME"]} <= loopback
    assert found["NCCL_SOCKET_IFNAME"] == "eth7", "what was said stays"


@pytest.mark.parametrize("plan", ["ddp", pytest.param("parameter-server", marks=pytest.mark.slow)])
def test_a_local_training_listens_on_loopback_and_unpickles_nothing_of_its_store(tmp_path, plan):
    write_task(tmp_path)
    slow = slow_down(tmp_path / "slow", 0.1)
    words = ("train", "my.py:Regression", "--ranks", "2", "--plan", plan, "--steps", "6", "--batch", "8", "--run-dir", "r")
    with start(*words, at=tmp_path, SLOW=str(slow)) as running:
        running.until_step(tmp_path / "r", 1)
        launcher = running.process.pid
        found = listening(process.pid for process in running.left())
        assert found[launcher]
        assert len([pid for pid in found if found[pid]]) >= 3, "the launcher and two ranks"
        assert set().union(*found.values()) == {"127.0.0.1"}
        for port in ports(launcher):
            attack_store(port, "r", tmp_path / "PWNED")
        slow_down(slow, 0.0)
        assert running.wait().status == 0
    assert not (tmp_path / "PWNED").exists()


def attack_store(port: int, run: str, marker: Path) -> None:
    """What torch's elastic agents would unpickle."""
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    content = base64.b64encode(pickle.dumps(Evil(marker))).decode()
    client.set(f"torch.rendezvous.{run}", content)
    for key in client.list_keys():
        if "torch.rendezvous" in key:
            client.set(key, content)


KEPT_S = 1.1  # for so long torch's agents take what they have read as it was


def agents_handler(store: dist.Store, backend: Any, name: str) -> Any:
    return create_handler(store, backend, RendezvousParameters("x", "", name, 1, 1, "127.0.0.1", join_timeout=20, last_call_timeout=1))


def test_agents_of_several_nodes_unpickle_only_what_they_have_sealed(tmp_path):
    key = "k" * 64
    name = run_id("r", key)
    assert name.startswith("r-")
    assert key[:8] not in name
    assert run_id("r", "another") != name
    store = open_store(timeout=timedelta(seconds=10))
    handler = agents_handler(store, SealedBackend(store, name, key), name)
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    attack_store(store.port, name, tmp_path / "PWNED")
    time.sleep(KEPT_S)
    with pytest.raises(RendezvousStateError, match="somebody without the key"):
        handler.num_nodes_waiting()
    assert not (tmp_path / "PWNED").exists()
    handler._stop_heartbeats()

    stock = agents_handler(store, C10dRendezvousBackend(store, "s"), "s")
    stock.next_rendezvous()
    stock._stop_heartbeats()
    attack_store(store.port, "s", tmp_path / "PWNED")
    time.sleep(KEPT_S)
    with contextlib.suppress(AttributeError):
        stock.num_nodes_waiting()
    assert (tmp_path / "PWNED").exists(), "torch's own would have run it, so the attack is one"


def test_ranks_share_a_key_that_nobody_else_reads(tmp_path):
    me = [World(rank=rank, size=2, local_size=2, launcher="slurm", job="1-0-0") for rank in (0, 1)]
    note = tmp_path / ".meet-slurm-1-0-0"
    with ThreadPoolExecutor(1) as aside:
        first = aside.submit(meet, me[0], timedelta(seconds=20), tmp_path)
        while not note.exists():
            assert not first.done()
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        store, key = meet(me[1], timedelta(seconds=20), tmp_path)
        assert first.result()[1] == key
        assert len(key) == 64
        assert store.host == "127.0.0.1"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_meeting_place_of_somebody_else_is_refused(tmp_path):
    note = tmp_path / ".meet-slurm-1-0-0"
    note.write_text("127.0.0.1:1 " + "0" * 64)
    os.chown(note, 12345, 12345)
    with pytest.raises(RunError, match=r"is of user 12345, .*; keep others out: chmod go-w"):
        meet(World(rank=1, size=2, local_size=2, launcher="slurm", job="1-0-0"), timedelta(seconds=20), tmp_path)
