"""`paceline watch HOST:PATH` through a real sshd on this machine."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import paceline, start
from paceline.web.ssh import parse_remote
from run_lines import folder, started
from watching import URL, Watching, why_not_built

pytestmark = pytest.mark.ssh


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A folder with a program `ssh` that knows the host "cluster", which is this machine."""
    at = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", at / name], check=True)
    shutil.copy(at / "user.pub", at / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (at / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {at}/host\nAuthorizedKeysFile {at}/authorized\n"
        f"PidFile {at}/pid\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n"
    )
    (at / "ssh.conf").write_text(
        f"Host cluster\n HostName 127.0.0.1\n Port {port}\n IdentityFile {at}/user\n BatchMode yes\n"
        f" UserKnownHostsFile {at}/known\n StrictHostKeyChecking no\n LogLevel ERROR\n"
        "Host nobody\n HostName 127.0.0.1\n Port 1\n BatchMode yes\n"
    )
    (at / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {at}/ssh.conf "$@"\n')
    (at / "ssh").chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", at / "sshd.conf"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            break
        assert server.poll() is None, server.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield at
    server.terminate()
    server.wait()
    server.stderr.close()


def search_path(host: Path) -> str:
    return f"{host}:{os.environ['PATH']}"


PROGRAM = f"{sys.executable} -m paceline"


@pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))
def test_runs_of_another_machine(host, tmp_path):
    runs = tmp_path / "my 'runs"  # the shell there must not split it
    runs.mkdir()
    folder(runs / "far", [started(0, 1.7e9)])
    options = ("--program", PROGRAM)
    with start("watch", f"cluster:{runs}", *options, at=tmp_path, PATH=search_path(host)) as running:
        running.wait_until(lambda: URL.search(running.output_so_far().out) is not None, "listening")
        name, token = URL.search(running.output_so_far().out).groups()
        watching = Watching(int(name.rpartition(":")[2]), name, token, running).log_in()
        rows = next(watching.messages())["lists"]["runs"]["rows"]
        assert [row["name"] for row in rows] == ["far"]
        assert watching.ask("", cookie=None).status == 403
        sockets = [*Path("/tmp").glob("paceline-*/socket")]
        owned = [path for path in sockets if re.search(path.parent.name, find_commands())]
        assert len(owned) == 1
        running.process.send_signal(signal.SIGINT)
        assert running.wait().status == 0
        deadline = time.monotonic() + 60
        while owned[0].parent.exists():
            assert time.monotonic() < deadline, "the server there has not ended"
            time.sleep(0.1)


def find_commands() -> str:
    return "\n".join(
        path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody:runs"], "ssh could not connect to nobody; check: ssh nobody"),
        (["cluster:runs", "--program", "no-such-program"], "cluster has no program no-such-program; name it"),
        (["cluster:/no/such/folder", "--program", PROGRAM], "paceline watch failed on cluster with status 2"),
    ],
)
def test_what_fails_is_one_sentence(host, tmp_path, words, message):
    result = paceline("watch", *words, at=tmp_path, PATH=search_path(host))
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.all


def test_host_and_path_are_distinguished_from_local_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    assert parse_remote("login1:/scratch/runs") == ("login1", "/scratch/runs")
    assert parse_remote("me@login1.site.org:runs") == ("me@login1.site.org", "runs")
    assert parse_remote("login1:") == ("login1", "")
    for local in ("runs", "a:b", "/tmp/a:b", "./a:c", "-oProxyCommand=x:runs", "a b:c", "me@-x:c"):
        assert parse_remote(local) is None
