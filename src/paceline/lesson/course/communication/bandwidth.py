"""Measure bandwidth properly.

How fast is an all-reduce? A wrong measurement is easily off by a factor of ten. This lesson measures it
step by step, and explains the two numbers that benchmarks report.
"""

# %%
# ## Warm-up, barrier, median
#
# - The first call is slow: connections are opened and buffers are allocated. It does not count.
# - A **barrier** before each call lets all ranks begin together. Without it, a rank measures how late
#   the others are.
# - The slowest rank decides: take the largest time over ranks, then the **median** over repetitions. The
#   mean follows rare interruptions.
import statistics
import time

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

SIZES, REPEATS = (4_096, 65_536, 1_048_576, 4_194_304), 5
n = num_ranks()


def slowest(duration_s):
    longest = torch.tensor([duration_s], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def measure(size_bytes):
    x = torch.zeros(size_bytes // 4)
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(x)
        times.append(slowest(time.perf_counter() - begin))
    return times


def measure_all():
    return {size_bytes: measure(size_bytes) for size_bytes in SIZES}


results = run(measure_all)
first = [
    (size, times[0] * 1e3, statistics.median(times[1:]) * 1e3, max(times[1:]) * 1e3)
    for size, times in results[0].items()
]
rows("Milliseconds of an all-reduce", ("bytes", "first call", "median", "longest"), first, is_measured=True)
check("all ranks agree on the times", results, [results[0]] * n)

# %%
# ## Algorithm bandwidth and bus bandwidth
#
# The **algorithm bandwidth** is S divided by the time, where S is the size of the whole tensor. It
# depends on the number of ranks. The **bus bandwidth** multiplies it by the share that passes each link,
# so that it can be compared with the link: 2(n - 1)/n for an all-reduce, (n - 1)/n for all-gather,
# reduce-scatter and all-to-all, 1 for broadcast and reduce.
FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}
worlds = (2, 4, 8, 64)
factors = [(name, *(factor(size) for size in worlds)) for name, factor in FACTORS.items()]
rows("Bus bandwidth / algorithm bandwidth", ("collective", *(f"{size} ranks" for size in worlds)), factors)
check(
    "an all-reduce moves as much as a reduce-scatter and an all-gather",
    factors[0][1:],
    [2 * x for x in factors[1][1:]],
)
speeds = [(size, size / ms * 1e-6, size / ms * 1e-6 * 2 * (n - 1) / n) for size, _, ms, _ in first]
rows("GB/s of an all-reduce (GB is 10⁹ bytes)", ("bytes", "algorithm", "bus"), speeds, is_measured=True)


@picture("Algorithm bandwidth in GB/s by size in bytes")
def draw(figure):
    axes = figure.subplots()
    axes.loglog([line[0] for line in speeds], [line[1] for line in speeds], "o-")


# %%
# ## Which size is S? The mistake with reduce-scatter
#
# A reduce-scatter of S bytes leaves S/n bytes on each rank. A program that divides the *output* by the
# time reports a bandwidth that is n times too small, and the more ranks there are, the worse it looks.


def count_bytes():
    size = dist.get_world_size()
    x = torch.ones(1200)
    part = torch.zeros(1200 // size)
    dist.reduce_scatter(part, list(x.chunk(size)))
    return {"input bytes": x.nbytes, "output bytes": part.nbytes, "value": part[0].item()}


counted = run(count_bytes)
table("A reduce-scatter", counted)
check(
    "S is the input: n times the output",
    column(counted, "input bytes"),
    [n * size for size in column(counted, "output bytes")],
)

# %%
# ## Latency and bandwidth
#
# The time is about α + S/β: a latency α for the smallest message, and a bandwidth β for large ones.
# Below S = α·β, the latency takes more than half of the time. Therefore DDP collects gradients in
# buckets of 25 MB.
small_s, large_s = (first[at][2] * 1e-3 for at in (0, -1))
beta = (SIZES[-1] - SIZES[0]) / max(large_s - small_s, 1e-9)
alpha = max(small_s - SIZES[0] / beta, 0.0)
rows(
    "α and β of this run",
    ("α in ms", "β in GB/s", "half of it is latency below, in bytes"),
    [(alpha * 1e3, beta * 1e-9, alpha * beta)],
    is_measured=True,
)

# %%
# ## Question
ask(
    "A benchmark reports 12 GB/s algorithm bandwidth for an all-gather of 1 GB on 4 ranks, and counts "
    "the output. The link has 12.5 GB/s. Is this possible?",
    "Yes: the output is the whole tensor, S. The bus bandwidth is 3/4 · 12 = 9 GB/s, below the link. "
    "For a reduce-scatter, counting the output would be wrong. `paceline bench collectives` reports "
    "both numbers with S defined in its page.",
)
