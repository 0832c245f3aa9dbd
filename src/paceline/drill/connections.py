"""Cut TCP connections between processes of this user through a copy of the socket, without privileges."""

import ctypes
import os
import socket
from collections.abc import Iterable
from typing import Any

import psutil

PIDFD_GETFD = 438  # system call of Linux 5.6, on every architecture; Python has no function for it


def cut_connections(process: psutil.Process, others: Iterable[psutil.Process]) -> int:
    """Shut down the TCP connections of `process` to `others` and return their number.

    Raises OSError if the system does not permit it."""
    addresses = {
        (connection.laddr.ip, connection.laddr.port) for other in others for connection in _established(other)
    }
    descriptors = [
        connection.fd
        for connection in _established(process)
        if (connection.raddr.ip, connection.raddr.port) in addresses
    ]
    if not descriptors:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(process.pid)
    try:
        for descriptor in descriptors:
            copy = libc.syscall(PIDFD_GETFD, handle, descriptor, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with socket.socket(fileno=copy) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(handle)
    return len(descriptors)


def _established(process: psutil.Process) -> list[Any]:
    return [
        connection
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr
    ]
