"""Overlap: communicate while computing.

A collective takes time in which the processor could compute. `async_op=True` starts it and returns a
handle, and the program computes something else before it waits. On GPUs, **streams** do the same for
kernels and copies: see the lesson streams.
"""

# %%
# ## The order of calls
#
# A backward pass computes the gradient of the last layer first. Its all-reduce can run while the earlier
# layers still compute. Here, a layer computes for 5 ms (a sleep), and its gradient has a million
# elements.
import time

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

LAYERS, ELEMENTS, COMPUTE_S = 4, 1_000_000, 0.005
n = num_ranks()


def backward(overlaps):
    rank = dist.get_rank()
    gradients = [torch.full((ELEMENTS,), float(rank + layer)) for layer in range(LAYERS)]
    dist.all_reduce(torch.zeros(ELEMENTS))  # warm-up
    dist.barrier()
    begin, spans, handles = time.perf_counter(), [], []
    for layer in reversed(range(LAYERS)):
        start = time.perf_counter()
        time.sleep(COMPUTE_S)
        spans.append((layer, start - begin, time.perf_counter() - begin))
        if overlaps:
            handles.append(dist.all_reduce(gradients[layer], async_op=True))
        else:
            dist.all_reduce(gradients[layer])
    for handle in handles:
        handle.wait()  # the optimizer must not run before
    total = time.perf_counter() - begin
    return {
        "first elements": torch.stack([gradient[0] for gradient in gradients]),
        "ms": total * 1e3,
        "spans": spans,
    }


results = {"waits": run(backward, False), "overlaps": run(backward, True)}
sums = [float(sum(rank + layer for rank in range(n))) for layer in range(LAYERS)]
table("The sums, with overlap", {"first elements": column(results["overlaps"], "first elements")})
for name, lines in results.items():
    check(f"{name}: every rank has the sums", column(lines, "first elements"), [sums] * n)
times = [(name, max(column(lines, "ms")), LAYERS * COMPUTE_S * 1e3) for name, lines in results.items()]
rows("Milliseconds", ("program", "in all", "of computation"), times, is_measured=True)


@picture("When the layers of rank 0 compute; the gaps are communication")
def draw(figure):
    axes = figure.subplots()
    for row, lines in enumerate(results.values()):
        for layer, start, end in lines[0]["spans"]:
            axes.barh(row, (end - start) * 1e3, left=start * 1e3, color="#8cc4f0", edgecolor="white")
            axes.text((start + end) * 500, row, f"layer {layer}", ha="center", va="center", fontsize=7)
    axes.set(xlabel="milliseconds", yticks=range(2), yticklabels=list(results))


# %%
# ## What must not happen before wait()
#
# Until `wait()` returns, the tensor belongs to the collective. Reading it gives the old value, the sum,
# or a mixture: on some runs it looks right. Writing to it destroys the result on other ranks. The safe
# pattern has one handle for each tensor, and a `wait()` before the first use.


def use_after_wait():
    x = torch.full((4,), float(dist.get_rank()))
    handle = dist.all_reduce(x, async_op=True)
    y = torch.arange(4.0) * 2  # does not touch x
    handle.wait()
    return {"x + y": x + y}


used = run(use_after_wait)
table("A computation meanwhile, and the sum afterwards", used)
check(
    "the sum and the other result are right",
    column(used, "x + y"),
    [[sum(range(n)) + 2.0 * i for i in range(4)]] * n,
)

# %%
# ## How much can be hidden?
#
# If a step computes for C and communicates for K, it takes C + K without overlap, and at best max(C, K).
# The communication of the first layer has nothing behind which it can hide, because it becomes ready
# last. DDP therefore sends **buckets**: large enough for the bandwidth, and early enough to overlap.
cases = ((100, 20), (100, 100), (100, 300))
rows(
    "Milliseconds of a step",
    ("computation", "communication", "in turn", "overlapped at best"),
    [(c, k, c + k, max(c, k)) for c, k in cases],
)

# %%
# ## Question
ask(
    "With perfect overlap, a step computes for 100 ms and communicates for 100 ms. Would a network of "
    "twice the speed make training faster?",
    "No: the step takes max(100, 50) = 100 ms. The computation is the limit. Without overlap it would "
    "fall from 200 ms to 150 ms. Measure first what a step waits for: `paceline train --profile`.",
)
