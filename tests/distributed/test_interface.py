"""Tests of the network interface: ranks connect even if other machines cannot resolve a host name."""

import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch.distributed as dist

import network
from command import PACELINE, clean_environment, events_of_kind, paceline, write_task
from paceline.distributed import network_interface
from paceline.distributed.network_interface import (
    REMOTE_ADDRESS_KEY,
    check_interfaces,
    choose_interface,
    choose_listen_address,
    find_local_address,
)
from paceline.distributed.store import ALL_INTERFACES
from paceline.errors import LaunchError
from paceline.events import Step

pytestmark = pytest.mark.processes

PORT = 29541
WORDS = (
    "train",
    "my.py:Regression",
    "--steps",
    "6",
    "--batch",
    "12",
    "--set",
    "dropout=0.0",
    "--device",
    "cpu",
    "--run-dir",
)

# On one machine


@pytest.mark.network
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disabled_loopback_interface_is_reported_in_a_sentence(ranks: int, tmp_path: Path) -> None:
    write_task(tmp_path)
    ended = subprocess.run(
        ["unshare", "--net", *PACELINE, *WORDS, "runs/a", "--ranks", str(ranks)],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (
        2,
        "paceline: cannot reach 127.0.0.1, over which the ranks of a machine communicate: Network is "
        "unreachable; enable the loopback interface: ip link set lo up\n",
    ), ended.stdout


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"GLOO_SOCKET_IFNAME": "ib9"},
            "GLOO_SOCKET_IFNAME=ib9, but {host} has no such interface, only lo, eth0",
        ),
        ({"GLOO_SOCKET_IFNAME": "lo,ib9"}, "GLOO_SOCKET_IFNAME=ib9, but"),
        ({"NCCL_SOCKET_IFNAME": "ib,mlx"}, "NCCL_SOCKET_IFNAME=ib,mlx, but"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME==l, but"),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib,l"}, None),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, None),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, None),
        ({"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}, None),
        ({}, None),
    ],
)
def test_check_interfaces(
    environ: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": []})
    if message is None:
        check_interfaces(environ)
        return
    with pytest.raises(LaunchError) as error:
        check_interfaces(environ)
    assert str(error.value).startswith(message.format(host=socket.gethostname()))


def test_error_is_reported_once(tmp_path: Path) -> None:
    write_task(tmp_path)
    result = paceline(*WORDS, "r", "--ranks", "2", at=tmp_path, GLOO_SOCKET_IFNAME="ib9")
    assert result.status == 2
    assert result.err.count("GLOO_SOCKET_IFNAME=ib9") == 1, result.all


def test_find_local_address() -> None:
    assert find_local_address("127.0.0.1", 1) == "127.0.0.1"
    assert find_local_address("::1", 1) == "::1"


def test_is_local_host() -> None:
    assert all(map(network_interface.is_local_host, ("localhost", "127.0.0.1", "::1", "127.0.1.1")))
    assert not any(map(network_interface.is_local_host, ("192.0.2.7", "no.such.host.invalid", "2001:db8::1")))


def test_choose_interface_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    choose_interface(dist.PrefixStore("a", dist.PrefixStore("b", store)), 1)
    assert "GLOO_SOCKET_IFNAME" not in network_interface.os.environ
    assert not store.check([REMOTE_ADDRESS_KEY])


def test_choose_listen_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host name may resolve to the machine itself, as with Debian's 127.0.1.1."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "n1")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"n1": "10.0.0.1"}[name])
    interfaces = {"lo": [Address("127.0.0.1")], "eth0": [Address("10.0.0.1")], "ib0": [Address("10.1.0.1")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    only = ("10.0.0.1", ["10.0.0.1"])
    assert choose_listen_address(None, {}) == choose_listen_address("n1", {}) == only
    assert choose_listen_address("n1", {"GLOO_SOCKET_IFNAME": "ib0"}) == ("10.1.0.1", ["10.1.0.1"]), (
        "the interface that was chosen"
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"n1": "127.0.1.1"}[name])
    assert choose_listen_address(None, {}) == (ALL_INTERFACES, ["10.0.0.1", "10.1.0.1"]), (
        "other machines may reach any of them"
    )
    assert choose_listen_address("n1", {}) == (ALL_INTERFACES, ["n1"])
    del interfaces["ib0"]
    assert choose_listen_address(None, {}) == only
    del interfaces["eth0"]
    assert choose_listen_address(None, {}) == (ALL_INTERFACES, ["n1"])


class Address(NamedTuple):
    address: str
    family: socket.AddressFamily = socket.AF_INET


# On several nodes that know only the addresses of each other


def start_directly(nodes: Sequence[network.Node], at: Path, run: str) -> list["subprocess.Popen[str]"]:
    """Start ranks with the variables that torchrun sets."""
    return network.start_ranks(nodes, [*PACELINE, *WORDS, run], at, PORT)


def start_by_mpirun(nodes: Sequence[network.Node], at: Path, run: str) -> list["subprocess.Popen[str]"]:
    hosts = ",".join(f"{node.name}:1" for node in nodes)
    words = [
        "mpirun",
        "--allow-run-as-root",
        "--bind-to",
        "none",
        "--mca",
        "plm_rsh_agent",
        str(_shell(at)),
        "--host",
        hosts,
    ]
    return [
        _start(
            nodes[0],
            [*words, "-np", str(len(nodes)), *PACELINE, *WORDS, run],
            at,
            clean_environment(OMP_NUM_THREADS="1"),
        )
    ]


def start_by_mpich(nodes: Sequence[network.Node], at: Path, run: str) -> list["subprocess.Popen[str]"]:
    hosts = ",".join(node.name for node in nodes)
    words = [
        "mpiexec.hydra",
        "-launcher",
        "ssh",
        "-launcher-exec",
        str(_shell(at)),
        "-iface",
        network.DEVICE,
        "-hosts",
        hosts,
    ]
    return [
        _start(
            nodes[0],
            [*words, "-np", str(len(nodes)), *PACELINE, *WORDS, run],
            at,
            clean_environment(OMP_NUM_THREADS="1"),
        )
    ]


def _start(
    node: network.Node, words: Sequence[str], at: Path, env: dict[str, str]
) -> "subprocess.Popen[str]":
    return node.start(
        words,
        cwd=at,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _shell(at: Path) -> Path:
    """Write a script that runs a command on a node, as ssh would."""
    shell = at / "shell"
    skip_options = 'while case "$1" in -*) true;; *) false;; esac; do shift; done'
    command = 'hostname "$0"; exec sh -c "$*"'
    enter = "exec nsenter --net=/run/netns/$node unshare --uts"
    shell.write_text(f"#!/bin/sh\n{skip_options}\nnode=$1\nshift\n{enter} sh -c '{command}' $node \"$@\"\n")
    shell.chmod(0o755)
    return shell


@pytest.mark.network
@pytest.mark.parametrize(
    "start",
    [
        start_directly,
        pytest.param(
            start_by_mpirun,
            marks=[
                pytest.mark.slow,
                pytest.mark.mpi("mpirun"),
            ],
        ),
        pytest.param(
            start_by_mpich,
            marks=[
                pytest.mark.slow,
                pytest.mark.mpi("mpiexec.hydra"),
            ],
        ),
    ],
)
def test_host_names_that_other_nodes_cannot_resolve(
    start: Callable[..., list["subprocess.Popen[str]"]], tmp_path: Path
) -> None:
    write_task(tmp_path)
    assert paceline(*WORDS, "single", at=tmp_path).status == 0
    with network.nodes(2) as nodes:
        network.succeed(start(nodes, tmp_path, "two"))
    losses = [[step.loss for step in events_of_kind(tmp_path / run, Step)] for run in ("single", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
