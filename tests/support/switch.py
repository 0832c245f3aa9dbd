"""A user-space switch that delays each frame, for kernels without netem: switch.py DELAY_MS NAMESPACE…

It creates the device eth0 in each network namespace.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000  # sched.h
FRAME = 65536


def tap(namespace: str) -> int:
    """Create a network device in a namespace, whose frames this process reads and writes."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, target = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    for current in (target, home):
        if current == home:
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP | IFF_NO_PI))
        if libc.setns(current, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(home)
    os.close(target)
    return file


def main(delay_s: float, ports: list[int]) -> None:
    port_of: dict[bytes, int] = {}  # by address
    # All frames wait equally long, so the first frame is always due first.
    waiting: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for port in ports:
        poll.register(port, select.POLLIN)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, port, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the device may not be up yet
                os.write(port, frame)
        wait_ms = (waiting[0][0] - now) * 1e3 if waiting else 1000.0
        if wait_ms < 1:  # poll waits for whole milliseconds
            select.select(ports, [], [], wait_ms / 1e3)
            wait_ms = 0
        for port, _ in poll.poll(wait_ms):
            frame = os.read(port, FRAME)
            due = time.monotonic() + delay_s
            port_of[frame[6:12]] = port
            to = [port_of[frame[:6]]] if frame[:6] in port_of else [other for other in ports if other != port]
            waiting.extend((due, other, frame) for other in to if other != port)


if __name__ == "__main__":
    devices = [tap(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    main(float(sys.argv[1]) / 1e3, devices)
