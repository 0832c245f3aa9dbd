"""Ring all-reduce: the same bytes for any number of ranks.

How can n ranks add up their tensors? If all send everything to rank 0, its link carries n - 1 whole
tensors. In a **ring**, each rank talks only to its neighbors, and all links work all the time.
"""

# %%
# ## The ring, step by step
#
# The tensor is cut into n chunks. In step s of the first phase, a **reduce-scatter**, rank r sends chunk
# r - s to rank r + 1, which adds it to its own. After n - 1 steps, rank r has the whole sum of chunk r +
# 1. The second phase, an **all-gather**, passes the finished chunks around in n - 1 more steps.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

n = num_ranks()


def exchange(chunk, size, rank):
    """Send a chunk to the next rank, and return the chunk of the previous rank."""
    received = torch.empty_like(chunk)
    sending = dist.isend(chunk.contiguous(), dst=(rank + 1) % size)
    dist.recv(received, src=(rank - 1) % size)
    sending.wait()
    return received


def ring_all_reduce(x):
    """Add up x over all ranks. Return the states after each step, and the number of bytes sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(x.chunk(size))
    states, sent_bytes = [x.clone()], 0
    for step in range(size - 1):  # reduce-scatter
        mine, its = (rank - step) % size, (rank - step - 1) % size
        sent_bytes += chunks[mine].nbytes
        chunks[its] += exchange(chunks[mine], size, rank)
        states.append(x.clone())
    for step in range(size - 1):  # all-gather
        mine, its = (rank + 1 - step) % size, (rank - step) % size
        sent_bytes += chunks[mine].nbytes
        chunks[its].copy_(exchange(chunks[mine], size, rank))
        states.append(x.clone())
    return states, sent_bytes


def demonstrate():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(float(size)) + rank
    expected = x.clone()
    dist.all_reduce(expected)
    states, sent_bytes = ring_all_reduce(x)
    return {"states": states, "sent bytes": sent_bytes, "result": x, "all_reduce": expected}


results = run(demonstrate)
for step, states in enumerate(zip(*(line["states"] for line in results), strict=True)):
    phase = "before" if step == 0 else "reduce-scatter" if step < n else "all-gather"
    table(f"step {step}: {phase}", [{"tensor": state} for state in states])
total = n * (n - 1) // 2
sums = [n * i + total for i in range(n)]
check("every rank has the sum", column(results, "result"), [sums] * n)
check("dist.all_reduce gives the same", column(results, "all_reduce"), [sums] * n)


@picture("Which ranks have been added into each chunk of rank 0, step by step")
def draw(figure):
    axes = figure.subplots()
    states = torch.stack(results[0]["states"]) - torch.arange(float(n))
    shares = (states / max(total, 1)).tolist()
    axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=1.3)
    for step, state in enumerate(results[0]["states"]):
        for chunk, value in enumerate(state.tolist()):
            axes.text(chunk, step, f"{value:g}", ha="center", va="center")
    axes.set(xlabel="chunk", ylabel="step", xticks=range(n), yticks=range(len(shares)))


# %%
# ## What it costs
#
# Each rank sends 2(n - 1) chunks of S/n bytes: 2(n - 1)/n · S bytes, for a tensor of S bytes. For many
# ranks this is just below 2 S, however many there are. The number of steps grows with n, so small
# tensors, whose cost is the latency, are faster on a **tree** with 2 log₂ n steps.
#
# The first table compares bytes counted by the program above with the formula.
ELEMENTS = 1200


def count():
    x = torch.ones(ELEMENTS)
    _, sent_bytes = ring_all_reduce(x)
    return {"sent bytes": sent_bytes, "sum": x[0].item()}


size_bytes = ELEMENTS * 4
counted = run(count)
table(f"An all-reduce of {size_bytes:,} bytes", counted)
check(
    "each rank sends 2(n - 1)/n · S bytes",
    column(counted, "sent bytes"),
    [2 * (n - 1) * size_bytes // n] * n,
    size_bytes / n,
)
check("and the sum of ones is n", column(counted, "sum"), [float(n)] * n)
worlds = (2, 4, 8, 64, 1024)
rows(
    "Bytes through the busiest link, as a multiple of S",
    ("ranks", "all to rank 0 and back", "ring", "steps of the ring", "steps of a tree"),
    [
        (size, 2 * (size - 1), 2 * (size - 1) / size, 2 * (size - 1), 2 * (size.bit_length() - 1))
        for size in worlds
    ],
)

# %%
# ## Question
ask(
    "A ring all-reduce of 1 GB on 8 ranks takes 0.2 s. What bandwidth does each link have, and is it "
    "right to report 1 GB / 0.2 s = 5 GB/s?",
    "Each link carries 2·7/8 · 1 GB = 1.75 GB in 0.2 s: 8.75 GB/s. This is the **bus bandwidth**, "
    "which can be compared with the speed of the link. 5 GB/s is the **algorithm bandwidth**, which "
    "falls as n grows even if the links stay equally fast.",
)
