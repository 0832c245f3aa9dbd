"""Nodes on this machine: network namespaces with host names, behind a shaping bridge or a delaying switch.

with nodes(4, rate="100mbit") as created: created[0].start(words)   -> a process on the first node
"""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from command import clean_environment

SUBNET = "10.78.0"
DEVICE = "eth0"
# Burst of a link, in seconds of its rate. Below the time between two kernel ticks, 4 ms, a link does not
# reach its rate.
BURST_S = 0.008
LETTERS = itertools.cycle("abcdefghij")


@dataclass(frozen=True)
class Node:
    name: str
    address: str

    def start(self, words: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        inside = [
            "nsenter",
            f"--net=/run/netns/{self.name}",
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {self.name}; exec "$@"',
            "sh",
        ]
        return subprocess.Popen([*inside, *words], **options)


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def _rate(rate: str) -> str:
    per_s = float(rate[:-4]) * {"mbit": 1e6, "gbit": 1e9}[rate[-4:]] / 8
    return f"rate {rate} burst {per_s * BURST_S:.0f}"


@cache
def find_missing_requirement() -> str | None:
    """Return why this machine cannot create nodes, or None if it can."""
    name = f"pl{os.getpid()}"
    try:
        _run(f"ip netns add {name}")
        try:
            _run(f"ip -n {name} link set lo up")
            _run(f"tc -n {name} qdisc add dev lo root tbf {_rate('1gbit')} latency 50ms")
            _run(f"nsenter --net=/run/netns/{name} unshare --uts hostname {name}")
        finally:
            _run(f"ip netns del {name}")
    except (OSError, subprocess.SubprocessError) as error:
        return f"needs root with CAP_NET_ADMIN and iproute2 ({error})"
    return None


@cache
def has_netem() -> bool:
    name = f"pl{os.getpid()}n"
    _run(f"ip netns add {name}")
    try:
        _run(f"ip -n {name} link set lo up")
        _run(f"tc -n {name} qdisc add dev lo root netem delay 1ms")
    except OSError:
        return False
    finally:
        _run(f"ip netns del {name}")
    return True


@contextlib.contextmanager
def nodes(count: int, rate: str | None = None, delay_ms: float | None = None) -> Iterator[list[Node]]:
    """Create nodes on one network, and delete them at the end of the context.

    `rate`: of each node in both directions, in the notation of tc. `delay_ms`: one way between two nodes.
    """
    tag = f"pl{os.getpid() % 100000}{next(LETTERS)}"  # unique: links disappear a moment after their namespace
    created = [Node(f"{tag}n{index}", f"{SUBNET}.{index + 1}") for index in range(count)]
    with contextlib.ExitStack() as stack:
        for node in created:
            _run(f"ip netns add {node.name}")
            stack.callback(_run, f"ip netns del {node.name}")
            _run(f"ip -n {node.name} link set lo up")
        if delay_ms is not None and not has_netem():
            stack.enter_context(_switch(created, delay_ms))
        else:
            _bridge(f"{tag}br", created, stack)
            for index, node in enumerate(created):
                if rate is not None:
                    for target in (f"-n {node.name} qdisc add dev {DEVICE}", f"qdisc add dev {tag}v{index}"):
                        _run(f"tc {target} root tbf {_rate(rate)} latency 50ms")
                if delay_ms is not None:
                    _run(f"tc -n {node.name} qdisc add dev {DEVICE} root netem delay {delay_ms}ms")
        yield created


def start_ranks(
    nodes: Sequence[Node], words: Sequence[str], at: Path, port: int, ranks_on_each: int = 1
) -> list["subprocess.Popen[str]"]:
    """Start `ranks_on_each` processes of `words` on each node, with the variables that torchrun sets."""
    size = len(nodes) * ranks_on_each
    started = []
    for rank in range(size):
        node, local = divmod(rank, ranks_on_each)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": ranks_on_each,
            "MASTER_PORT": port,
        }
        env = clean_environment(
            MASTER_ADDR=nodes[0].address,
            OMP_NUM_THREADS="1",
            **{name: str(value) for name, value in variables.items()},
        )
        started.append(
            nodes[node].start(
                words, cwd=at, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return started


def succeed(running: Sequence["subprocess.Popen[str]"], timeout_s: float = 120.0) -> None:
    """Wait for all processes, which must succeed, each within `timeout_s`. Kill them in any case."""
    try:
        for process in running:
            out, _ = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, out
    finally:
        for process in running:
            process.kill()
            process.communicate()


def throttle(node: Node, rate: str) -> None:
    """Change the rate at which a node sends. The node must have been created with a rate."""
    _run(f"tc -n {node.name} qdisc change dev {DEVICE} root tbf {_rate(rate)} latency 50ms")


def _bridge(name: str, nodes: Sequence[Node], stack: contextlib.ExitStack) -> None:
    _run(f"ip link add {name} type bridge")
    stack.callback(_run, f"ip link del {name}")
    _run(f"ip link set {name} up")
    for index, node in enumerate(nodes):
        port = f"{name.removesuffix('br')}v{index}"
        _run(f"ip link add {port} type veth peer name {DEVICE} netns {node.name}")
        _run(f"ip link set {port} master {name} up")
        _run(f"ip -n {node.name} addr add {node.address}/24 dev {DEVICE}")
        _run(f"ip -n {node.name} link set {DEVICE} up")


@contextlib.contextmanager
def _switch(nodes: Sequence[Node], delay_ms: float) -> Iterator[None]:
    words = [
        sys.executable,
        str(Path(__file__).with_name("switch.py")),
        str(delay_ms),
        *(node.name for node in nodes),
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise OSError("the switch did not start")
        for node in nodes:
            _run(f"ip -n {node.name} addr add {node.address}/24 dev {DEVICE}")
            _run(f"ip -n {node.name} link set {DEVICE} up")
        yield
    finally:
        process.kill()
        process.communicate()
