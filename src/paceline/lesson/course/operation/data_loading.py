"""A slow loader, found and fixed.

The fastest device waits if its samples are not ready. This lesson finds out whether a training waits for
data, and hides the reading behind the computation.
"""

# %%
# ## Find it: measure two parts of a step
#
# Measure the time until the batch is there, and the time of the computation. If the first is not near 0,
# the loader limits the training. Here a sample takes 2 ms to read, and a step computes for 10 ms on a
# batch of 4 samples.
import queue
import threading
import time

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

SAMPLES, BATCH, READ_S, STEP_S = 32, 4, 0.002, 0.010
n = num_ranks()


def read(index):
    time.sleep(READ_S)
    return torch.tensor([float(index)])


def batches(rank, size):
    mine = range(rank, SAMPLES, size)
    for start in range(0, len(mine), BATCH):
        yield torch.stack([read(index) for index in mine[start : start + BATCH]])


# %%
# ## Fix it: read ahead
#
# A thread reads the next batches into a queue while the current one is used. The queue has a limit, so
# that the memory does not fill. The order must stay the same: the fix changes the time and nothing else.


def prefetch(source, depth=2):
    ready = queue.Queue(depth)

    def fill():
        for item in source:
            ready.put(item)
        ready.put(None)  # the end

    threading.Thread(target=fill, daemon=True).start()
    while (item := ready.get()) is not None:
        yield item


def train(reads_ahead):
    rank, size = dist.get_rank(), dist.get_world_size()
    source = batches(rank, size)
    loader = prefetch(source) if reads_ahead else source
    waited, seen, spans = 0.0, [], []
    dist.barrier()
    begin = start = time.perf_counter()
    for batch in loader:
        arrived = time.perf_counter()
        waited += arrived - start
        time.sleep(STEP_S)
        seen.extend(batch.flatten().tolist())
        start = time.perf_counter()
        spans.append((arrived - begin, start - begin))
    total = start - begin
    return {"samples": seen, "waits": waited / total, "ms": total * 1e3, "spans": spans}


slow, fast = run(train, False), run(train, True)
table("The samples of each rank", {"slow": column(slow, "samples"), "reading ahead": column(fast, "samples")})
check("the order is the same", column(fast, "samples"), column(slow, "samples"))
read_samples = [sample for line in fast for sample in line["samples"]]
check("every sample is read once", sorted(read_samples), [float(i) for i in range(SAMPLES)])
lines = [
    (name, max(column(results, "ms")), max(column(results, "waits")))
    for name, results in (("slow", slow), ("reading ahead", fast))
]
rows("An epoch", ("loader", "milliseconds", "share of waiting"), lines, is_measured=True)


@picture("When rank 0 computes: above with the slow loader, below reading ahead")
def draw(figure):
    axes = figure.subplots()
    for row, results in enumerate((slow, fast)):
        for start, end in results[0]["spans"]:
            axes.barh(row, (end - start) * 1e3, left=start * 1e3, color="#8cc4f0", edgecolor="white")
    axes.set(xlabel="milliseconds", yticks=(0, 1), yticklabels=("slow", "reading ahead"))
    axes.invert_yaxis()


# %%
# ## What remains visible
#
# Reading ahead hides the reading as long as it is faster than the computation. A step then takes
# max(read, compute) instead of their sum. If reading is slower, several workers must read at the same
# time, or the data must be stored differently: few large files instead of many small ones, on a disk of
# the node, decoded only once.
cases = ((8, 10, 1), (40, 10, 1), (40, 10, 4), (40, 10, 8))
lines = [(r, c, workers, r + c, max(r / workers, c)) for r, c, workers in cases]
rows("Milliseconds of a step", ("reading", "computing", "workers", "in turn", "reading ahead"), lines)
check("4 workers hide 40 ms behind 10 ms", lines[2][4], 10.0)

# %%
# ## Question
ask(
    "All 4 ranks of a machine start 16 workers each, and the machine has 16 cores. What happens?",
    "64 processes share 16 cores with the 4 training processes. They take cores from each other and "
    "use memory 64 times. Divide: 16 cores / 4 ranks - 1 = 3 workers for each rank. `paceline bench "
    "data` measures which number is fastest.",
)
