"""Let trainings on the same machine have precedence over a server.

Linux divides processors between sessions first (sched_autogroup, see sched(7)), and niceness counts only
within a session. Ranks run in sessions of their own. So the server has its own session, too, which is nice.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

NICENESS = 10  # a tenth of the processors where sessions of trainings use all of them
IS_BY_SESSION = Path("/proc/sys/kernel/sched_autogroup_enabled")
SESSION_NICENESS = Path("/proc/self/autogroup")
AWAITED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h


def give_way() -> None:
    """Continue with a low priority.

    If this process shares its session with others, a child continues in a new one. This process waits for
    it, passes signals on, and exits with its status. It must have no other threads."""
    os.nice(NICENESS)
    if not _is_by_session():
        return
    if os.getsid(0) != os.getpid():
        _continue_in_child()
    with contextlib.suppress(OSError):  # refused in some containers
        SESSION_NICENESS.write_text(str(NICENESS))


def _is_by_session() -> bool:
    try:
        return IS_BY_SESSION.read_text().strip() == "1"
    except OSError:
        return False


def _continue_in_child() -> None:
    sys.stdout.flush()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # one that comes now waits, also for the child
    child = os.fork()
    if child:
        _wait(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(128 + signal.SIGTERM)


def _wait(child: int) -> NoReturn:
    """Pass signals on to the child, and exit when it has ended, with its status. All of them are blocked."""
    while True:
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            os.kill(child, number)  # it was not waited for, so that the number is still its own
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
