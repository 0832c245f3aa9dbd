"""Attacks by other users of a machine or of the network of a cluster: none runs code or destroys data."""

import ast
import base64
import contextlib
import dataclasses
import fcntl
import io
import itertools
import json
import os
import pickle
import platform
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
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
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

import paceline as paceline_package
from command import paceline, set_sample_delay, start, succeed, write_task
from paceline.cli.options.request_options import parse_nodes
from paceline.distributed import network_interface
from paceline.distributed.hostlist import expand_hosts
from paceline.distributed.network_interface import use_loopback
from paceline.distributed.process_group import meet_through_file, process_group
from paceline.distributed.store import open_store
from paceline.distributed.world import World
from paceline.doctor import heartbeat
from paceline.doctor.heartbeat import Heartbeat
from paceline.doctor.heartbeat_writer import SIGNAL
from paceline.doctor.rank_state import _signal_for_stack
from paceline.errors import CheckpointError, Error, LaunchError, RunError, SpecError
from paceline.files import replaced, write_whole
from paceline.launch.elastic.rendezvous import SealedBackend, build_run_id
from paceline.launch.rank_pool import Ranks as Pool
from paceline.launch.slurm.job_script import Job, render
from paceline.launch.slurm.site import Site
from paceline.parallel.compile import compile_units
from paceline.plan.plan import parse
from paceline.plan.search.rank_counts import parse_counts
from paceline.run import RunFolder, open_run
from paceline.spec import build
from paceline.training.checkpoint.index import read_index
from paceline.training.checkpoint.metadata import read_metadata
from paceline.training.checkpoint.stored import load_weights

pytestmark = pytest.mark.processes

# Checkpoints in folders of other users


class Evil:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder with my.py and `r`, a run of one rank with two checkpoints."""
    at = tmp_path_factory.mktemp("trained")
    write_task(at)
    succeed(
        "train",
        "my.py:Regression",
        "--ranks",
        "1",
        "--steps",
        "4",
        "--batch",
        "8",
        "--save-every",
        "2",
        "--run-dir",
        "r",
        at=at,
    )
    return at


def forge(checkpoint: Path, files: dict[str, bytes]) -> None:
    """Replace files of a checkpoint, and update their sizes and checksums in its index."""
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    index = json.loads((checkpoint / "checkpoint.json").read_text())
    index.pop("crc")
    index["files"] |= {name: [len(content), zlib.crc32(content)] for name, content in files.items()}
    write_index(checkpoint, index)


def write_index(checkpoint: Path, index: dict[str, Any]) -> None:
    index.pop("crc", None)
    (checkpoint / "checkpoint.json").write_text(
        json.dumps(index | {"crc": zlib.crc32(json.dumps(index).encode())})
    )


def evil_metadata(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    return {".metadata": pickle.dumps(Evil(marker))}


def evil_planner_data(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    metadata = unpickle_metadata(checkpoint)
    metadata.planner_data = {"model/0.weight": Evil(marker)}
    return {".metadata": pickle.dumps(metadata)}


def evil_bytes_entry(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    """Return metadata that make torch's planner call `torch.load(weights_only=False)` for each entry."""
    content = io.BytesIO()
    torch.save(Evil(marker), content)
    metadata = unpickle_metadata(checkpoint)
    location = next(iter(metadata.storage_data.values()))
    location.offset, location.length = 0, len(content.getvalue())
    metadata.state_dict_metadata = {name: dcp.BytesStorageMetadata() for name in metadata.state_dict_metadata}
    metadata.storage_data = {dcp.MetadataIndex(name): location for name in metadata.state_dict_metadata}
    return {".metadata": pickle.dumps(metadata), location.relative_path: content.getvalue()}


def evil_tensors(checkpoint: Path, marker: Path) -> dict[str, bytes]:
    """Return valid metadata and a tensor file with other objects."""
    content = io.BytesIO()
    torch.save(Evil(marker), content)
    metadata = unpickle_metadata(checkpoint)
    for location in metadata.storage_data.values():
        location.offset, location.length = 0, len(content.getvalue())
    return {".metadata": pickle.dumps(metadata), location.relative_path: content.getvalue()}


def unpickle_metadata(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


Attack = Callable[[Path, Path], dict[str, bytes]]
ATTACKS: dict[Attack, str] = {
    evil_metadata: "it names posix.system, which no checkpoint contains",
    evil_planner_data: "it names posix.system, which no checkpoint contains",
    evil_bytes_entry: "is no tensor, and a checkpoint holds only tensors",
    evil_tensors: "cannot be read",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_forged_checkpoint_runs_no_code(trained, tmp_path, attack):
    shutil.copytree(trained, tmp_path / "at")
    at, marker = tmp_path / "at", tmp_path / "PWNED"
    for step in (2, 4):
        forge(at / f"r/ckpt/step_{step}", attack(at / f"r/ckpt/step_{step}", marker))
    for words in (
        ("export", "r", "w.safetensors"),
        ("export", "r", "w.safetensors", "--step", "2"),
        ("resume", "r", "--steps", "6"),
    ):
        refused = paceline(*words, at=at)
        assert not marker.exists(), f"{words} ran the code\n{refused.all}"
        assert refused.status != 0, refused.all
        assert ATTACKS[attack] in refused.all
        assert "Traceback" not in refused.all
    assert not (at / "w.safetensors").exists()
    assert sorted(path.name for path in (at / "r/ckpt").iterdir()) == ["step_2", "step_4"], (
        "a checkpoint was deleted"
    )


def test_torch_alone_runs_the_code_of_the_attacks(trained, tmp_path):
    """Negative control: the attacks work if Paceline does not check the metadata."""
    from torch.distributed.checkpoint import FileSystemReader, load

    shutil.copytree(trained / "r/ckpt/step_4", tmp_path / "a")
    forge(tmp_path / "a", evil_metadata(tmp_path / "a", tmp_path / "PWNED"))
    assert not (tmp_path / "PWNED").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path / "a").read_metadata()
    assert (tmp_path / "PWNED").exists()

    shutil.copytree(trained / "r/ckpt/step_2", tmp_path / "b")
    forge(tmp_path / "b", evil_bytes_entry(tmp_path / "b", tmp_path / "PWNED-too"))
    name = next(iter(unpickle_metadata(tmp_path / "b").state_dict_metadata))
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load({name: torch.zeros(1)}, storage_reader=FileSystemReader(tmp_path / "b"), no_dist=True)
    assert (tmp_path / "PWNED-too").exists()


def tamper(metadata: Any, change: str) -> None:
    """Change metadata in a way that torch would not notice."""
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    location = next(iter(metadata.storage_data.values()))
    match change:
        case "file outside the checkpoint":
            location.relative_path = "../../../../other.distcp"
        case "absolute path":
            location.relative_path = "/etc/passwd"
        case "negative offset":
            location.offset = -5
        case "tensor larger than the file":
            entry.size, entry.chunks = (
                torch.Size([10**14]),
                [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([10**14]))],
            )
        case "missing chunk":
            entry.chunks = []
        case "chunk outside the tensor":
            entry.chunks[0].offsets = torch.Size([7] * len(entry.size))
        case "name is not a string":
            metadata.state_dict_metadata[5] = metadata.state_dict_metadata.pop(name)
        case "chunks are not a list":
            entry.chunks = {"a": 1}
        case "no entries":
            metadata.state_dict_metadata = None


@pytest.mark.parametrize(
    "change",
    [
        "file outside the checkpoint",
        "absolute path",
        "negative offset",
        "tensor larger than the file",
        "missing chunk",
        "chunk outside the tensor",
        "name is not a string",
        "chunks are not a list",
        "no entries",
    ],
)
def test_tampered_metadata_are_refused(trained, tmp_path, change):
    at = tmp_path / "step_4"
    shutil.copytree(trained / "r/ckpt/step_4", at)
    metadata = unpickle_metadata(at)
    forge(at, {".metadata": pickle.dumps(metadata)})
    load_weights(at)
    tamper(metadata, change)
    forge(at, {".metadata": pickle.dumps(metadata)})
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        load_weights(at)


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", b"\x80\x04.", b"\x80\x04N.", b"\x80\x04(((((.", b"cos\nsystem\n(S'x'\ntR.", b"P1\n."],
)
def test_metadata_that_are_not_a_checkpoint_pickle_are_refused(trained, tmp_path, content):
    at = tmp_path / "step_4"
    shutil.copytree(trained / "r/ckpt/step_4", at)
    forge(at, {".metadata": content})
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        load_weights(at)


def test_randomly_changed_metadata_are_read_or_refused(trained, tmp_path):
    whole, draw = (trained / "r/ckpt/step_4/.metadata").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            at, other = draw.randrange(len(content)), draw.randrange(len(content))
            if draw.random() < 0.6:
                content[at] = draw.randrange(256)
            elif draw.random() < 0.5:
                del content[at : at + draw.randint(1, 20)]
            else:
                content[at:at] = content[other : other + draw.randint(1, 40)]
        (tmp_path / ".metadata").write_bytes(content)
        try:
            read_metadata(tmp_path, {"__0_0.distcp"}, 10**6)
        except CheckpointError:
            refused += 1
    assert 300 < refused <= 400
    (tmp_path / ".metadata").write_bytes(b"\x80\x05" + b"]" * 200_000 + b"a" * 199_999 + b".")
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        read_metadata(tmp_path, (), 10**6)


def test_pickle_cannot_change_the_classes_that_it_names(trained, tmp_path):
    """The opcode BUILD sets attributes of any object, also of a class."""
    at = tmp_path / "step_4"
    shutil.copytree(trained / "r/ckpt/step_4", at)
    whole = (at / ".metadata").read_bytes()
    forge(
        at,
        {
            ".metadata": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
            b"(N}(X\x04\x00\x00\x00evilK\x01utb."
        },
    )
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        load_weights(at)
    assert not hasattr(dcp.Metadata, "evil")
    forge(at, {".metadata": whole})
    assert load_weights(at).keys() == load_weights(trained / "r/ckpt/step_4").keys()


@pytest.mark.parametrize("name", ["../../spec.toml", "/etc/passwd", "..", "", "a\nb", "pipe"])
def test_index_with_files_outside_its_folder_is_damaged(trained, tmp_path, name):
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
    assert (
        refused.err
        == "paceline: r has no complete checkpoint to export; continue it with: paceline resume r\n"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 0),
        ("samples", 0),
        ("files", []),
        ("files", {"a": [1]}),
        ("shapes", 3),
        ("step", "four"),
        ("tied", [1]),
    ],
)
def test_index_with_values_of_wrong_types_is_damaged(trained, tmp_path, key, value):
    index = json.loads((trained / "r/ckpt/step_4/checkpoint.json").read_text())
    write_index(tmp_path, index)
    assert read_index(tmp_path).step == 4
    write_index(tmp_path, index | {key: value})
    with pytest.raises(CheckpointError, match="is damaged"):
        read_index(tmp_path)


def test_intact_checkpoint_exports_the_weights_that_torch_loads(trained, tmp_path):
    succeed("export", trained / "r", "w.safetensors", at=tmp_path)
    exported = load_file(tmp_path / "w.safetensors")
    expected = {
        name: torch.empty(meta.size)
        for name, meta in unpickle_metadata(trained / "r/ckpt/step_4").state_dict_metadata.items()
    }
    from torch.distributed.checkpoint import FileSystemReader, load

    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load(expected, storage_reader=FileSystemReader(trained / "r/ckpt/step_4"), no_dist=True)
    weights = {
        name.removeprefix("model/"): tensor for name, tensor in expected.items() if name.startswith("model/")
    }
    assert exported.keys() == weights.keys()
    assert all(exported[name].equal(weights[name]) for name in weights)
    assert RunFolder(trained / "r").checkpoints() == [2, 4]


# The network: stores


def listening_sockets() -> set[tuple[str, int]]:
    """Return the addresses and ports on which this process listens."""
    return {
        tuple(connection.laddr)
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def listening_addresses(pids: Iterable[int]) -> dict[int, set[str]]:
    """Return the addresses on which each process listens."""
    by_pid: dict[int, set[str]] = {pid: set() for pid in pids}
    for pid, addresses in by_pid.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses |= {
                connection.laddr.ip
                for connection in psutil.Process(pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    return by_pid


def listening_ports(pid: int) -> list[int]:
    return [
        connection.laddr.port
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def test_store_listens_only_on_its_address():
    before = listening_sockets()
    torch_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert {address for address, _ in listening_sockets() - before} != {"127.0.0.1"}, (
        "negative control: a store of torch listens on all interfaces"
    )
    del torch_store
    store = open_store()
    assert listening_sockets() - before == {("127.0.0.1", store.port)}
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


def test_rank_pool_listens_only_on_loopback():
    pid = os.getpid()
    before = listening_addresses([pid])[pid]
    with Pool(1) as pool:
        assert pool.pids
        assert listening_addresses([pid])[pid] - before <= {"127.0.0.1"}
        assert listening_ports(pid)


def test_source_opens_no_public_store_and_creates_files_with_a_mode():
    """torch's store with `is_master` listens everywhere; `os.open` makes executable files by default."""
    for path in Path(paceline_package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant):
                assert not (isinstance(node.value, str) and "env://" in node.value), (
                    f"{where}: torch would open a store"
                )
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            if function.endswith("TCPStore") and path.match("distributed/store.py"):
                assert "master_listen_fd" in ast.unparse(node)
            elif function.endswith("TCPStore"):
                is_master = [
                    *node.args[3:4],
                    *(keyword.value for keyword in node.keywords if keyword.arg == "is_master"),
                ]
                assert [ast.unparse(value) for value in is_master] == ["False"], f"{where}: use open_store"
            if function == "os.open" and "O_CREAT" in ast.unparse(node):
                assert len(node.args) == 3, f"{where}: specify the mode, 0o666 for the user's umask"


def test_training_restores_the_interface_variables(monkeypatch):
    """A process may train again, with ranks on other machines."""
    for name in network_interface.INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    with process_group(World(), torch.device("cpu"), 60.0, Path("runs")):
        assert os.environ["GLOO_SOCKET_IFNAME"]
    assert {
        name: os.environ[name] for name in network_interface.INTERFACE_VARIABLES if name in os.environ
    } == {"NCCL_SOCKET_IFNAME": ""}


def test_ranks_of_one_machine_use_the_loopback_interface(monkeypatch):
    """By default, gloo, RPC and NCCL listen on the address of the host name."""
    monkeypatch.setattr(network_interface.os, "environ", environ := {"NCCL_SOCKET_IFNAME": "eth7"})
    use_loopback()
    loopback = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == "127.0.0.1" for address in addresses)
    }
    assert {environ["GLOO_SOCKET_IFNAME"], environ["TP_SOCKET_IFNAME"]} <= loopback
    assert environ["NCCL_SOCKET_IFNAME"] == "eth7", "a variable of the user was replaced"


@pytest.mark.parametrize("plan", ["ddp", pytest.param("parameter-server", marks=pytest.mark.slow)])
def test_attacked_local_training_runs_no_code(tmp_path, plan):
    """It listens on loopback, unpickles nothing from its store, and creates files with the user's umask."""
    write_task(tmp_path)
    slow, run = set_sample_delay(tmp_path / "slow", 0.1), tmp_path / "r"
    words = (
        "train",
        "my.py:Regression",
        "--ranks",
        "2",
        "--plan",
        plan,
        "--steps",
        "6",
        "--batch",
        "8",
        "--run-dir",
        "r",
    )
    (tmp_path / "main.py").write_text("import os\nos.umask(0o027)\nfrom paceline.cli import main\nmain()\n")
    with start("python", "main.py", *words, at=tmp_path, SLOW=str(slow)) as running:
        running.wait_for_step(run, 1)
        launcher = running.process.pid
        addresses = listening_addresses(process.pid for process in running.remaining_processes())
        assert addresses[launcher]
        assert len([pid for pid in addresses if addresses[pid]]) >= 3, "the launcher and two ranks"
        assert set().union(*addresses.values()) == {"127.0.0.1"}
        for port in listening_ports(launcher):
            attack_store(port, "r", tmp_path / "PWNED")
        set_sample_delay(slow, 0.0)
        assert running.wait().status == 0
    assert not (tmp_path / "PWNED").exists()
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in run.rglob("*")}
    assert {path.name: oct(mode) for path, mode in modes.items() if path.is_file() and mode != 0o640} == {}
    assert {path.name: oct(mode) for path, mode in modes.items() if path.is_dir() and mode != 0o750} == {}


def attack_store(port: int, run: str, marker: Path) -> None:
    """Write an evil pickle to the keys that torch's elastic agents unpickle."""
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    content = base64.b64encode(pickle.dumps(Evil(marker))).decode()
    client.set(f"torch.rendezvous.{run}", content)
    for key in client.list_keys():
        if "torch.rendezvous" in key:
            client.set(key, content)


CACHE_S = 1.1  # torch's agents cache the state that they read for less than this


def build_handler(store: dist.Store, backend: Any, name: str) -> Any:
    return create_handler(
        store,
        backend,
        RendezvousParameters("x", "", name, 1, 1, "127.0.0.1", join_timeout=20, last_call_timeout=1),
    )


def test_elastic_agents_unpickle_only_state_with_their_key(tmp_path):
    key = "k" * 64
    name = build_run_id("r", key)
    assert name.startswith("r-")
    assert key[:8] not in name
    assert build_run_id("r", "another") != name
    store = open_store(timeout=timedelta(seconds=10))
    handler = build_handler(store, SealedBackend(store, name, key), name)
    rendezvous = handler.next_rendezvous()
    assert (rendezvous.rank, rendezvous.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    attack_store(store.port, name, tmp_path / "PWNED")
    time.sleep(CACHE_S)
    with pytest.raises(RendezvousStateError, match="holds a state without its key"):
        handler.num_nodes_waiting()
    assert not (tmp_path / "PWNED").exists()
    handler._stop_heartbeats()

    torch_handler = build_handler(store, C10dRendezvousBackend(store, "s"), "s")
    torch_handler.next_rendezvous()
    torch_handler._stop_heartbeats()
    attack_store(store.port, "s", tmp_path / "PWNED")
    time.sleep(CACHE_S)
    with contextlib.suppress(AttributeError):
        torch_handler.num_nodes_waiting()
    assert (tmp_path / "PWNED").exists(), "negative control: the backend of torch runs the code"


def test_rendezvous_file_is_private_and_deleted(tmp_path):
    worlds = [World(rank=rank, size=2, local_size=2, launcher="slurm", job="1-0-0") for rank in (0, 1)]
    file = tmp_path / ".meet-slurm-1-0-0"
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(meet_through_file, worlds[0], timedelta(seconds=20), tmp_path)
        while not file.exists():
            assert not first.done()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        store, key = meet_through_file(worlds[1], timedelta(seconds=20), tmp_path)
        assert first.result()[1] == key
        assert len(key) == 64
        assert store.host == "127.0.0.1"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
def test_rendezvous_file_of_another_user_is_refused(tmp_path):
    file = tmp_path / ".meet-slurm-1-0-0"
    file.write_text("127.0.0.1:1 " + "0" * 64)
    os.chown(file, 12345, 12345)
    with pytest.raises(RunError, match=r"belongs to user 12345, .*; remove that permission: chmod go-w"):
        meet_through_file(
            World(rank=1, size=2, local_size=2, launcher="slurm", job="1-0-0"),
            timedelta(seconds=20),
            tmp_path,
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_compile_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    for owner in (os.geteuid(), 12345):
        os.chown(tmp_path, owner, owner)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        layer = torch.nn.Linear(2, 2)
        if owner == os.geteuid():
            compile_units([layer])
            continue
        with pytest.raises(LaunchError, match=r"belongs to user 12345; set TORCHINDUCTOR_CACHE_DIR"):
            compile_units([layer])
        assert "forward" not in vars(layer)


# Files that Paceline writes


@pytest.fixture
def targets(tmp_path) -> dict[str, Path]:
    """Return paths that are not regular files, which no command may replace."""
    at = tmp_path / "targets"
    at.mkdir()
    (at / "victim").write_text("mine")
    (at / "folder").mkdir()
    os.mkfifo(at / "pipe")
    (at / "link").symlink_to("victim")
    (at / "dangling").symlink_to("new")
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind(str(at / "socket"))
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # containers may forbid device files
            os.mknod(at / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 7))  # as /dev/full
    return {path.name: path for path in at.iterdir() if path.name != "victim"}


def are_unchanged(targets: dict[str, Path]) -> bool:
    kinds = {name: stat.S_IFMT(path.lstat().st_mode) for name, path in targets.items()}
    names = {path.name for path in targets["pipe"].parent.iterdir()}
    return (
        stat.S_IFREG not in kinds.values()
        and names == {*targets, "victim"}
        and (targets["pipe"].parent / "victim").read_text() == "mine"
        and not (targets["folder"] / "x").exists()
    )


def test_only_regular_files_are_replaced(targets, tmp_path):
    for name, path in targets.items():
        with pytest.raises(
            RunError, match=rf"cannot write .*/{name}: it is a .*, and only regular files are replaced"
        ):
            write_whole(path, "evil")
    assert are_unchanged(targets)
    file = tmp_path / "file.json"
    for text in ("first", "second"):
        write_whole(file, text)
        assert file.read_text() == text
    with pytest.raises(ZeroDivisionError), replaced(file) as new_file:
        new_file.write_text(f"half {1 / 0}")
    assert file.read_text() == "second"
    with pytest.raises(RunError, match="File name too long"):
        write_whole(tmp_path / ("x" * 300), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "targets"], (
        "a partial file is left"
    )


def test_commands_replace_only_regular_files(trained, targets, tmp_path):
    """Each of these commands fails before it starts its work."""
    run = trained / "r"
    commands: list[tuple[str | Path, ...]] = [
        ("export", run, "FILE", "--force"),
        ("plan", "resnet-50", "--ranks", "2", "--batch", "8", "--json", "FILE"),
        ("scale", "resnet-50", "--ranks", "2,4", "--batch", "8", "--json", "FILE"),
        ("comms", "digits", "--ranks", "2", "--json", "FILE"),
        ("verify", "digits", "--plan", "ddp", "--json", "FILE"),
        ("drill", "digits", "--json", "FILE"),
        ("preflight", "digits", "--json", "FILE"),
        ("profile", run, "--json", "FILE"),
        ("doctor", run, "--json", "FILE"),
        ("diff", run, run, "--json", "FILE"),
        ("probe", "--json", "FILE"),
        ("bench", "compute", "--json", "FILE"),
    ]
    names = itertools.cycle(targets)
    for words in commands:
        name = next(names)
        result = paceline(*(targets[name] if word == "FILE" else word for word in words), at=tmp_path)
        assert result.status == 2, f"{words} {name}\n{result.all}"
        assert f"cannot write {targets[name]}: it is a" in result.err, f"{words} {name}\n{result.all}"
        assert "Traceback" not in result.err
    plot = targets["link"].rename(targets["link"].with_suffix(".svg"))
    targets |= {"link.svg": plot}
    del targets["link"]
    for words in (
        ("plan", "resnet-50", "--ranks", "2", "--batch", "8", "--plot", plot),
        ("bench", "compute", "--plot", plot),
    ):
        result = paceline(*words, at=tmp_path)
        assert (result.status, "it is a link" in result.err) == (2, True), result.all
    assert are_unchanged(targets)


# Names that reach job scripts, terminals and Slurm

CONTROL_CHARACTERS = ("d/x\ntouch PWNED\n#", "a\rb", "a\x1b[2Jb", "a\x00b", "a\u2028b", "a\udcffb")


def test_control_characters_in_a_job_script_are_refused(tmp_path):
    """Each field is checked separately."""
    job = Job(Path("/r"), Path("/f"), nodes=1, ranks_per_node=1, time="10", python="python")
    for bad in CONTROL_CHARACTERS:
        for change in ({"run": Path("/") / bad}, {"folder": Path("/") / bad}, {"time": bad}, {"python": bad}):
            with pytest.raises(LaunchError, match="a single line of printable text"):
                dataclasses.replace(job, **change)
        for name, field in Site.model_fields.items():
            if name.endswith(("_s", "_per_node", "_per_rank")):
                continue
            kind = str(field.annotation)
            value = {"A": bad} if "dict" in kind else [f"-{bad}"] if "tuple" in kind else bad
            accepted = "Input should be" if "Literal" in kind else "a single line of printable text"
            with pytest.raises(ValidationError, match=accepted):
                Site.model_validate({name: value} | ({"scratch": "/s"} if name == "stage_in" else {}))
        with pytest.raises(ValidationError):
            Site.model_validate({"environment": {bad: "1"}})
        for value in ({"task": bad}, {"run": bad}, {"plan": bad}):
            with pytest.raises(SpecError, match="a single line of printable text"):
                build(value)
    with pytest.raises(ValidationError, match="names of variables"):
        Site.model_validate({"environment": {"ä": "1"}})


@pytest.mark.parametrize("words", [("submit", "digits", "--dry-run"), ("train", "digits")])
def test_newline_in_the_name_of_a_run_is_refused(words, tmp_path):
    refused = paceline(*words, "--run-dir", CONTROL_CHARACTERS[0], at=tmp_path)
    assert (refused.status, refused.out) == (2, "")
    assert (
        refused.err == "paceline: run must be a single line of printable text, got 'd/x\\ntouch PWNED\\n#'\n"
    )
    assert [*tmp_path.iterdir()] == []


def test_newline_in_the_working_folder_is_refused(tmp_path):
    (folder := tmp_path / "a\ntouch PWNED\n#").mkdir()
    refused = paceline("submit", "digits", "--dry-run", "--run-dir", "r", at=folder)
    assert (refused.status, refused.out) == (2, "")
    assert "a name in a job script must be a single line of printable text" in refused.err


@pytest.mark.parametrize(
    "name",
    ["$(touch PWNED)", "`touch PWNED`", '";touch PWNED;"', "';touch PWNED;'", "a b", "&touch PWNED", "-n"],
)
def test_job_script_does_not_run_commands_in_names(name, tmp_path):
    """bash runs the script; the commands of Slurm do not exist."""
    job = Job(tmp_path / name, tmp_path, nodes=1, ranks_per_node=1, time="10", python=f"/none/{name}")
    site = Site(
        modules=(name,),
        container=f"./{name}",  # must begin as a path
        environment={"A": name},
        account=name,
        log=f"{name}.log",
        # the script expands variables, and so commands, in this field
        scratch=name if "$" not in name else "/s",
        stage_in=name,
    )
    (tmp_path / name).mkdir()
    for script in (render(job, site), render(dataclasses.replace(job, restarts=1), Site(venv=name))):
        subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            capture_output=True,
            timeout=30,
            env={"PATH": "/usr/bin:/bin"},
        )
        assert not list(tmp_path.rglob("PWNED")), script


# Options that the job script sets, separated by |
OPTIONS_OF_THE_SCRIPT = (
    "--array=1-4|--array 1-4|-a1-4|-a 1-4|-Ha1-4|--arr=1-4|--exclusive --array=1-4|--comment='a b' -a1|"
    "--nodes=3|-N3|-n 3|--ntasks=3|--ntasks-per-node=3|"
    "-o x|--output=x|--signal=USR2|--open-mode=truncate|--wrap=ls"
)


@pytest.mark.parametrize("option", OPTIONS_OF_THE_SCRIPT.split("|"))
def test_site_options_that_contradict_the_job_script_are_refused(option):
    with pytest.raises(ValidationError, match="which conflicts with the job script of Paceline; "):
        Site(sbatch=(option,))


def test_other_options_of_a_site_are_kept():
    options = (
        "--exclusive",
        "--nodelist=n1",
        "--comment=-a",
        "--mail-type=END",
        "--acctg-freq=30",
        "-w n1",
        "-A x",
        "--no-requeue",
    )
    assert Site(sbatch=options).sbatch == options


def test_job_array_is_refused(tmp_path):
    (tmp_path / "site.toml").write_text('sbatch = ["--array=1-4"]\n')
    refused = paceline("submit", "digits", "--dry-run", at=tmp_path)
    assert (refused.status, refused.out) == (2, "")
    assert (
        "site.toml: sbatch has '--array=1-4', which conflicts with the job script of Paceline; "
        "its tasks would all train in one run folder" in refused.err
    )
    assert "leave it out, and use paceline submit --array seed=1..8" in refused.err
    (tmp_path / "r").mkdir()
    job = Job(tmp_path / "r", tmp_path, nodes=1, ranks_per_node=1, time="10", python="true")
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    result = subprocess.run(
        ["bash", "-c", render(job, Site())], capture_output=True, text=True, timeout=30, env=environ
    )
    assert result.returncode == 2, "after sbatch --array=1-4 job.sh by a user"
    assert "tasks of a job array would all train in" in result.stderr
    assert [*(tmp_path / "r").iterdir()] == [], "the script wrote into the run folder"


@pytest.mark.parametrize(
    ("time", "message"),
    [
        ("tomorrow", "is not a time"),
        ("٢", "is not a time"),
        ("1:2:3:4", "is not a time"),
        ("9" * 5000, "is not a time"),
        ("1", "must be above notice_s="),
    ],
)
def test_invalid_time_is_refused_in_a_dry_run(time, message, tmp_path):
    refused = paceline("submit", "digits", "--time", time, "--dry-run", at=tmp_path)
    assert (refused.status, refused.out) == (2, "")
    assert message in refused.err
    assert "Traceback" not in refused.err


# Run folders of other users


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """Return a copy of the run folder `r` of `trained`."""
    shutil.copytree(trained / "r", tmp_path / "r")
    return tmp_path / "r"


def test_only_folders_with_plain_numbers_are_checkpoints(run):
    for name in ("step_٣", "step_007", "step_", "step_-1", "step_1\n", "step_²", "step_1e3", ".step_9"):
        (run / "ckpt" / name).mkdir()
    (run / "ckpt/step_11").touch()
    assert RunFolder(run).checkpoints() == [2, 4]
    result = succeed("export", "r", "w.safetensors", at=run.parent)
    assert "of r/ckpt/step_4" in result.out


def test_run_with_files_of_wrong_kinds_is_refused(run):
    """A pipe would block each reader; a file named like the checkpoint folder would lose the training."""
    for name in (
        "ckpt",
        "ranks",
        "tensorboard",
        "events.jsonl",
        "lock",
        "job",
        "job.sh",
        "log.txt",
        "provenance.json",
    ):
        path, kind = run / name, "folder" if name in ("ckpt", "ranks", "tensorboard") else "file"
        original = path.rename(run / "original") if path.exists() else None
        path.touch() if kind == "folder" else os.mkfifo(path)
        with pytest.raises(RunError, match=rf"r/{name} must be a {kind} in a run folder; move it away"):
            open_run(run)
        path.unlink()
        if original is not None:
            original.rename(path)
    shutil.rmtree(run / "ckpt")
    (run / "ckpt").touch()
    for words in (
        "show r",
        "status r",
        "export r w.safetensors",
        "doctor r",
        "diff r r",
        "cancel r",
        "logs r",
        "resume r --steps 8",
    ):
        refused = paceline(*words.split(), at=run.parent, timeout_s=60.0)
        assert (refused.status, refused.err) == (
            2,
            "paceline: r/ckpt must be a folder in a run folder; move it away\n",
        ), words


def test_only_job_numbers_are_passed_to_slurm(run):
    for job in ("--user=me", "-u me", "1 2", "1;ls", "all", "٣", ""):
        (run / "job").write_text(job)
        with pytest.raises(RunError, match=r"must contain the number of a job, got .*; delete it"):
            RunFolder(run).job  # noqa: B018 (a property)
    for job in ("7", "12_3"):
        (run / "job").write_text(f"{job}\n")
        assert RunFolder(run).job == job
    (run / "job").write_text("--user=me")
    for word, status in (("cancel", 2), ("status", 0)):
        result = paceline(word, "r", at=run.parent)
        assert (result.status, "must contain the number of a job" in result.out + result.err) == (
            status,
            True,
        ), result.all


def test_cancel_does_not_end_a_process_without_the_lock(run):
    other = subprocess.Popen(["sleep", "600"])
    try:
        with open(run / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(f"process {other.pid} on {platform.node()}")
            lock.flush()
            refused = paceline("cancel", "r", at=run.parent)
        assert refused.status == 2
        assert (
            f"process {other.pid} on {platform.node()}, which does not hold the lock of the run"
            in refused.err
        )
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_doctor_does_not_write_through_a_link(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / "ranks").mkdir(exist_ok=True)
    (run / "ranks/asked").unlink(missing_ok=True)
    (run / "ranks/asked").symlink_to(victim)
    beat = {
        "rank": 0,
        "ranks": 1,
        "host": platform.node(),
        "pid": os.getpid(),
        "birth": heartbeat.process_birth(os.getpid()),
        "began": time.time(),
    }
    beat |= {
        "time": time.time(),
        "step": 1,
        "steps": 2,
        "stepped": None,
        "longest_s": 0.0,
        "phase": "forward",
        "since": time.time(),
    }
    (run / "ranks/0.alive").write_text(json.dumps(beat | {"patience_s": None, "spent_s": {}}))
    succeed("doctor", "r", at=run.parent)
    assert (run / "ranks/asked").is_symlink()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [("show", "r"), ("status", "r"), ("export", "r", "w.safetensors"), ("logs", "r"), ("doctor", "r")],
)
def test_reading_a_run_does_not_import_its_task(run, words):
    (run.parent / "evil.py").write_text("open('PWNED', 'w')\n")
    spec = (run / "spec.toml").read_text()
    (run / "spec.toml").write_text(re.sub('task = ".*"', f'task = "{run.parent}/evil.py:Evil"', spec))
    paceline(*words, at=run.parent)
    assert not (run.parent / "PWNED").exists()


def test_long_names_are_refused_in_one_sentence(run):
    long = "x" * 300
    commands = [
        ("train", "digits", "--run-dir", long),
        ("submit", "digits", "--dry-run", "--run-dir", f"a/{long}"),
        ("resume", long),
    ]
    commands += [
        ("export", "r", long),
        ("show", long),
        ("train", f"{long}.py"),
        ("train", f"{long}.toml"),
        ("train", long),
    ]
    commands += [
        ("comms", "digits", "--ranks", "2", "--json", long),
        ("bench", "compute", "--plot", f"{long}.svg"),
        ("probe", long),
    ]
    commands += [
        ("train", "digits", "--run-dir", "/".join([long[:100]] * 60)),
        ("submit", "digits", "--dry-run", "--site", long),
    ]
    for words in commands:
        refused = paceline(*words, at=run.parent)
        assert refused.status == 2, f"{words}\n{refused.all}"
        assert "Traceback" not in refused.err, f"{words}\n{refused.all}"
        assert refused.err.count("\n") == 1, f"{words}\n{refused.all}"
    assert [path.name for path in run.parent.iterdir()] == ["r"]


# Output of runs of other users in the terminal

ESCAPES = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x08\x7f\u2028"


def control_characters(text: str) -> set[str]:
    return {char for char in text if not char.isprintable() and char not in "\n"}


def test_commands_print_no_terminal_escapes_of_a_run(run):
    events = (run / "events.jsonl").read_text().splitlines()
    started, step = json.loads(events[0]), json.loads(events[1])
    started |= {"notes": [f"a note {ESCAPES}"], "device": f"cpu{ESCAPES}"}
    failed = {
        "time": step["time"],
        "event": "failed",
        "what": "run",
        "message": f"reason {ESCAPES}",
        "step": 1,
    }
    evaluated = {
        "time": step["time"],
        "event": "evaluated",
        "step": 1,
        "metrics": {f"loss{ESCAPES}": 1.0},
        "seconds": 1.0,
    }
    (run / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in (started, step, evaluated, failed))
    )
    for words in (("show", "r"), ("status", "r"), ("doctor", "r")):
        result = paceline(*words, at=run.parent)
        assert control_characters(result.out + result.err) == set(), result.all
        assert result.status == 0, result.all
        if words == ("show", "r"):
            assert "reason \ufffd]52" in result.out


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 10**12},
        {"rank": -1},
        {"pid": "one"},
        {"host": 5},
        {"time": None},
        {"spent_s": []},
        {"host": ESCAPES},
        {"rank": 10**7},
        {},
    ],
    ids=str,
)
def test_invalid_heartbeat_is_ignored_and_its_text_is_cleaned(run, change):
    beat = {
        "rank": 0,
        "ranks": 1,
        "host": "elsewhere",
        "pid": 1,
        "began": 1.0,
        "time": 1.0,
        "step": 1,
        "steps": 2,
        "stepped": None,
    }
    beat |= {"longest_s": 0.0, "phase": "data", "since": 1.0, "patience_s": None, "spent_s": {}}
    (run / "ranks").mkdir(exist_ok=True)
    (run / "ranks/0.alive").write_text(json.dumps(beat | change))
    read = heartbeat.read(run / "ranks/0.alive", Heartbeat)
    if change.keys() <= {"host"} and change != {"host": 5}:
        assert read is not None
        assert control_characters(read.host) == set()
    else:
        assert read is None


def test_process_that_does_not_write_stacks_of_the_run_gets_no_signal(run):
    """The other process belongs to the same user and has a handler for this signal."""
    code = (
        "import signal, sys, time; signal.signal(NUMBER, lambda *a: sys.exit(7)); "
        "print(flush=True); time.sleep(600)"
    )
    code = code.replace("NUMBER", str(int(SIGNAL)))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            (run / "ranks").mkdir(exist_ok=True)
            (run / "ranks/0.stacks").touch()
            assert _signal_for_stack(RunFolder(run), 0, other.pid) == ()
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("text", ["٣", "²", "1_0", "9" * 5000, "+1", ""])
def test_numbers_with_other_characters_than_ascii_digits_are_refused(text):
    for read in (lambda: parse_counts(text), lambda: parse(f"dp={text}"), lambda: parse_nodes(text or "x")):
        with pytest.raises(Error):
            read()
    with pytest.raises(ValueError, match="is not a number"):
        expand_hosts(f"n[{text}]")
