"""Scaling: strong, weak, and Amdahl's law.

Twice the ranks, half the time? Only if all work can be divided and nobody waits. This lesson measures a
program whose parts are known, so that the law can be compared with the clock.
"""

# %%
# ## A program with a serial part
#
# 10 units of work can only be done by rank 0, such as reading a file. 40 units can be divided. A unit is
# a sleep of 3 ms, so that the result does not depend on the number of cores. All ranks wait for the
# slowest.
import time

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

SERIAL, PARALLEL, UNIT_S = 10, 40, 0.003
n = num_ranks()
worlds = [size for size in (1, 2, 4, 8) if size <= n] or [n]


def work(parallel_units):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    begin = time.perf_counter()
    done = 0
    if rank == 0:
        done += SERIAL
    time.sleep(UNIT_S * done)
    dist.barrier()  # the others wait for the serial part
    mine = parallel_units // size + (rank < parallel_units % size)
    time.sleep(UNIT_S * mine)
    dist.barrier()
    longest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return {"units": done + mine, "seconds": longest.item()}


# %%
# ## Strong scaling: the same work on more ranks
#
# With a serial share s, the speedup on n ranks is at most 1/(s + (1 - s)/n). This is **Amdahl's law**.
# Here s = 0.2, and no number of ranks makes the program more than 5 times as fast.
strong = {size: run(work, PARALLEL, ranks=size) for size in worlds}
table("Units of work on the ranks", {"units": column(strong[worlds[-1]], "units")})
check("all units are done once", sum(column(strong[worlds[-1]], "units")), SERIAL + PARALLEL)
base_s = strong[worlds[0]][0]["seconds"]
lines = [(size, base_s / results[0]["seconds"]) for size, results in strong.items()]
rows("Strong scaling, measured", ("ranks", "speedup"), lines, is_measured=True)


def amdahl(share, size):
    return 1 / (share + (1 - share) / size)


counts, shares = (1, 2, 4, 8, 64, 1024), (0.0, 0.01, 0.1, 0.2)
law = [(size, *(amdahl(share, size) for share in shares)) for size in counts]
rows("Amdahl's law: the speedup for serial shares", ("ranks", *(f"s = {share:g}" for share in shares)), law)
check("a serial share of 1 % limits 1,024 ranks to 91 times", round(law[-1][2]), 91)

# %%
# ## Weak scaling: more work on more ranks
#
# Often the problem grows with the machine: each rank keeps 40 units. The time should then stay the same,
# and the **efficiency** is the time of one rank divided by that of n. In training this is a larger
# batch, and the question is whether it still learns as much from each sample.
weak = {size: run(work, PARALLEL * size, ranks=size) for size in worlds}
base_s = weak[worlds[0]][0]["seconds"]
lines = [(size, base_s / results[0]["seconds"]) for size, results in weak.items()]
rows("Weak scaling, measured", ("ranks", "efficiency"), lines, is_measured=True)
check("the work grows with the ranks", sum(column(weak[worlds[-1]], "units")), SERIAL + PARALLEL * worlds[-1])

# %%
# ## When scaling does not pay
#
# A published course measures an epoch of 7.01 s on 2 GPUs and 7.57 s on 8. The speedup is below 1: six
# GPUs are wasted. Say so, instead of showing only that it runs. Always report the efficiency, and what
# the baseline was: against a slow baseline everything scales.
times = ((2, 7.01), (8, 7.57))
lines = [(size, seconds, 7.01 / seconds, 7.01 * 2 / (seconds * size)) for size, seconds in times]
rows("A published measurement", ("GPUs", "seconds", "speedup", "efficiency"), lines)
check("the efficiency on 8 GPUs is 23 %", round(lines[1][3], 2), 0.23)


@picture("The speedup by Amdahl's law")
def draw(figure):
    axes = figure.subplots()
    for at, share in enumerate(shares):
        axes.loglog(counts, [line[1 + at] for line in law], "o-", base=2, label=f"s = {share:g}")
    axes.legend()


# %%
# ## Question
ask(
    "A step takes 100 ms on one GPU. On 8 GPUs with the same global batch it takes 20 ms. What are "
    "speedup and efficiency, and what serial share explains it?",
    "The speedup is 5, the efficiency 5/8 = 63 %. 1/(s + (1 - s)/8) = 5 gives s = 0.086: 8.6 ms of "
    "each step are not divided, such as the wait for an all-reduce. `paceline scale` predicts this "
    "before you reserve the GPUs.",
)
