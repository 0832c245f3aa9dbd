"""The machine: how fast is each level of memory?

A program is fast if its data is near. Between the nearest cache and another machine lie five orders of
magnitude in latency. This lesson measures the levels of this machine, in one table.
"""

# %%
# ## Bandwidth by size
#
# Copy a tensor again and again. If it fits into a cache, it is copied from the cache; if not, from
# memory. On most processors 16 kB fits into L1, 256 kB into L2, 4 MB into L3, and 128 MB into none. Each
# call costs about half a microsecond, which hides the speed of L1.
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, num_ranks, picture, rows, run

n = num_ranks()
LEVELS = {"L1 cache": 16_000, "L2 cache": 256_000, "L3 cache": 4_000_000, "memory": 128_000_000}


def seconds_of(action):
    """Return the median of 5 times, after a first call that does not count."""
    action()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_speed(size_bytes):
    torch.set_num_threads(1)
    source = torch.ones(size_bytes // 8)  # source and copy together have this size
    target = torch.empty_like(source)
    rounds = max(1, 20_000_000 // size_bytes)

    def copy():
        for _ in range(rounds):
            target.copy_(source)

    duration_s = seconds_of(copy)
    return 2 * source.nbytes * rounds / duration_s, duration_s / rounds


lines = [(name, size, *copy_speed(size)) for name, size in LEVELS.items()]

# %%
# ## Latency of memory
#
# Bandwidth is for long rows of bytes. A single value that is not in a cache costs a trip to memory.
# Following a chain of random positions makes the processor wait for each.


def chain_latency(count=2_000_000, steps=20_000):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    positions, at = following.numpy(), 0
    begin = time.perf_counter()
    for _ in range(steps):
        at = positions[at]
    return (time.perf_counter() - begin) / steps


# %%
# ## Disk and loopback
#
# A file is written and made safe by `fsync`; without it, only the memory of the system is measured.
# Between two ranks of one machine, messages go through the loopback interface: 4 bytes show the latency,
# 4 MB the bandwidth.


def disk(size_bytes):
    with tempfile.NamedTemporaryFile() as file:
        data = bytes(size_bytes)

        def write():
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

        return seconds_of(write)


def message(size_bytes):
    x, peer = torch.ones(size_bytes // 4), 1 - dist.get_rank()

    def exchange():
        if dist.get_rank() == 0:
            dist.send(x, dst=peer)
            dist.recv(x, src=peer)
        else:
            dist.recv(x, src=peer)
            dist.send(x, dst=peer)

    duration_s = seconds_of(exchange)
    return {"one way in seconds": duration_s / 2, "sum": x.sum().item()}


small, large = run(message, 4, ranks=2), run(message, 4_000_000, ranks=2)
check("the messages arrived unchanged", [small[0]["sum"], large[0]["sum"]], [1.0, 1_000_000.0])
by_loopback = 4_000_000 / large[0]["one way in seconds"], small[0]["one way in seconds"]
lines += [
    ("disk, with fsync", 4_000_000, 4_000_000 / disk(4_000_000), disk(4)),
    ("loopback, two ranks", 4_000_000, *by_loopback),
]
rows(
    "This machine (a GB is 10⁹ bytes)",
    ("level", "bytes", "GB/s", "µs for a copy, or 4 bytes"),
    [(name, size, speed / 1e9, latency * 1e6) for name, size, speed, latency in lines],
    is_measured=True,
)
rows("A random access to 16 MB, in Python", ("µs",), [(chain_latency() * 1e6,)], is_measured=True)


@picture("GB/s of the levels")
def draw(figure):
    axes = figure.subplots()
    axes.barh([line[0] for line in lines], [line[2] / 1e9 for line in lines])
    axes.set(xscale="log", xlabel="GB/s")
    axes.invert_yaxis()


# %%
# ## Further levels
#
# Published figures of an H100: its memory has 3,350 GB/s, NVLink to other GPUs of the machine 900 GB/s,
# PCIe 5 64 GB/s in each direction, and a network of 400 Gbit/s is 50 GB/s. Each level is slower than the
# previous level: an algorithm should move most data on the nearest level.
GPU = (("memory of the GPU", 3350), ("NVLink", 900), ("PCIe 5", 64), ("network of 400 Gbit/s", 50))
rows(
    "Seconds for 140 GB, the weights of 70 billion parameters in bfloat16",
    ("level", "GB/s", "seconds"),
    [(name, speed, 140 / speed) for name, speed in GPU],
)
ask(
    "Tensor parallelism sends activations in every layer, data parallelism sends gradients once in a "
    "step. Which belongs on NVLink, and which on the network?",
    "Tensor parallelism on NVLink: it communicates most, and nothing can be computed meanwhile. Data "
    "parallelism can overlap with the backward pass, and its messages are large: it can use the "
    "network. `paceline bench hierarchy` measures the levels of your machine.",
)
