"""The server of pages in a session of its own. Sessions and priorities are read from /proc."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
pytestmark = pytest.mark.skipif(
    not AUTOGROUP.exists() or AUTOGROUP.read_text().strip() != "1",
    reason="this machine does not divide its processors between sessions",
)
CODE = """
import os, select, sys
from paceline.web.precedence import give_way
give_way()
try:
    print(os.getpid(), flush=True)
    # Python sees a signal that comes just before a call only after the call, so this one is short
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
except KeyboardInterrupt:
    sys.exit(7)
sys.exit(3)
"""


def start(is_leader: bool) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Return a command that gives way, and the process that continues."""
    command = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=is_leader,
    )
    assert command.stdout is not None
    return command, psutil.Process(int(command.stdout.readline()))


def end(command: subprocess.Popen[str]) -> int:
    with command:
        return command.wait(60)


def test_server_has_a_nice_session_of_its_own():
    before = Path("/proc/self/autogroup").read_text()
    command, server = start(is_leader=False)
    assert server.ppid() == command.pid
    assert os.getsid(server.pid) == server.pid != os.getsid(0)
    assert server.nice() == 10
    assert Path(f"/proc/{server.pid}/autogroup").read_text().endswith("nice 10\n")
    assert Path("/proc/self/autogroup").read_text() == before, "other processes of the session are not nice"
    command.stdin.close()
    assert end(command) == 3, "the status is that of the server"


def test_leader_of_a_session_needs_no_second_process():
    command, server = start(is_leader=True)
    assert server.pid == command.pid
    assert Path(f"/proc/{server.pid}/autogroup").read_text().endswith("nice 10\n")
    command.stdin.close()
    assert end(command) == 3


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 7), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_signals_reach_the_server(number, status):
    command, server = start(is_leader=False)
    command.send_signal(number)
    assert end(command) == status
    assert not server.is_running()


def test_server_ends_with_the_command():
    command, server = start(is_leader=False)
    command.kill()
    end(command)
    deadline = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
