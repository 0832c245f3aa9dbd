"""The machine: how fast is each level of memory?

A program is fast if its data is near. Between the nearest cache and another machine lie five orders of
magnitude in latency. This lesson measures the levels of this machine, in one table.
"""

# %%
# ## Two numbers for each level
#
# The **bandwidth** is the number of bytes per second of a long copy. The **latency** is the time until a
# single value arrives. A processor hides the latency if it can guess the next address. To measure it,
# follow a **chain**: each link says where the next link is, and all of them are at random places.
#
# The lesson uses the functions of `paceline bench hierarchy`. First a small chain, to see what it is.
import itertools
import tempfile
from pathlib import Path

import torch

from paceline.bench.hierarchy.levels import measure_levels
from paceline.bench.hierarchy.memory import LINK_BYTES, build_chain, measure_access_s
from paceline.lesson import ask, check, picture, rows, say


def follow(count):
    """Return the number of different links on the way back to the first, and of neighbors in memory."""
    with build_chain(count) as first:
        link, addresses = first, []
        while not addresses or link is not first:
            addresses.append(id(link))
            link = link.next
    distances = [abs(there - here) for here, there in itertools.pairwise(addresses)]
    return len(set(addresses)), sum(distance <= LINK_BYTES for distance in distances)


links, neighbors = follow(10_000)
check("a chain of 10,000 links visits each of them once", links, 10_000)
check("fewer than 1 % of its links are neighbors in memory", neighbors < 100)

# %%
# ## The staircase
#
# A short chain fits into the nearest cache, and a longer one does not. The time of an access rises in
# steps, at the sizes of the caches. It contains the time of the program itself, some nanoseconds.
SIZES = [2**power for power in range(12, 27, 2)]
times_s = [measure_access_s(size) for size in SIZES]
lines = [(size, seconds * 1e9) for size, seconds in zip(SIZES, times_s, strict=True)]
rows("An access along a chain", ("bytes of the chain", "ns"), lines, is_measured=True)


@picture("Nanoseconds of an access, by the size of the chain in bytes")
def draw(figure):
    axes = figure.subplots()
    axes.semilogx(SIZES, [seconds * 1e9 for seconds in times_s], "o-", base=2)
    axes.set(xlabel="bytes", ylabel="ns")


# %%
# ## The levels of this machine
#
# Caches and memory by copies and chains; messages between two ranks of this machine over loopback, with
# 4 bytes for the latency and 4 MiB for the bandwidth; the disk, past the cache of the system; and a GPU,
# if there is one. A dash means that the number was not measured.
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
found = list(measure_levels(device, Path(tempfile.gettempdir()), budget_s=4.0))
levels = [item for item in found if not isinstance(item, str)]


def scaled(value, factor):
    return value * factor if value is not None else None


lines = [(row["level"], row["bytes"], scaled(row["Bps"], 1e-9), row["latency_s"]) for row in levels]
rows(
    "This machine (a GB is 10⁹ bytes)",
    ("level", "bytes", "GB/s", "latency in µs"),
    [(name, size, speed, scaled(latency_s, 1e6)) for name, size, speed, latency_s in lines],
    is_measured=True,
)
check(
    "memory, messages and the disk are in the table", {"memory", "disk, read"} <= {line[0] for line in lines}
)
say("What was left out: " + "; ".join(item for item in found if isinstance(item, str)) + ".")


@picture("GB/s of the levels of this machine")
def draw_levels(figure):
    axes = figure.subplots()
    known = [(name, speed) for name, _, speed, _ in lines if speed is not None]
    axes.barh([name for name, _ in known], [speed for _, speed in known])
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
    "network. `paceline bench hierarchy --plot levels.svg` draws the levels of your machine.",
)
