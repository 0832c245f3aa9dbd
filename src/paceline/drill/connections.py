"""Cut the connections between processes without any right but that over one's own: through a copy of the socket."""

import ctypes
import os
import socket
from collections.abc import Iterable
from typing import Any

import psutil

PIDFD_GETFD = 438  # of Linux 5.6, on every architecture; Python has no function for it


def cut(process: psutil.Process, others: Iterable[psutil.Process]) -> int:
    """Shut the TCP connections of `process` to `others` down. Returns how many there were; raises OSError where that is not allowed."""
    theirs = {(here.laddr.ip, here.laddr.port) for other in others for here in _established(other)}
    numbers = [here.fd for here in _established(process) if (here.raddr.ip, here.raddr.port) in theirs]
    if not numbers:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(process.pid)
    try:
        for number in numbers:
            copy = libc.syscall(PIDFD_GETFD, handle, number, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with socket.socket(fileno=copy) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(handle)
    return len(numbers)


def _established(process: psutil.Process) -> list[Any]:
    return [
        found
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_ESTABLISHED and found.raddr
    ]
