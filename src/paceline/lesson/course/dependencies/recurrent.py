"""Why recurrent networks do not parallelize over time.

A recurrent network computes h[t] = tanh(h[t-1] W + x[t] U): each step needs the step before. An
attention layer computes all positions at once. This is why transformers replaced recurrent networks when
models grew.
"""

# %%
# ## The longest chain
#
# Let every rank have a part of the sequence. In the recurrent network, a rank cannot begin before the
# previous rank has finished its part. A logical clock counts the steps: a message carries the time of its
# sender.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

LENGTH, WIDTH = 24, 3
n = num_ranks()


def inputs():
    draw = torch.Generator().manual_seed(0)
    w, u = torch.randn(2, WIDTH, WIDTH, generator=draw, dtype=torch.float64) / 2
    return w, u, torch.randn(LENGTH, WIDTH, generator=draw, dtype=torch.float64)


def recurrent():
    rank, size = dist.get_rank(), dist.get_world_size()
    w, u, x = inputs()
    message = torch.zeros(WIDTH + 1, dtype=torch.float64)  # the state, and the clock
    if rank > 0:
        dist.recv(message, src=rank - 1)
    h, clock = message[:WIDTH].clone(), int(message[WIDTH])
    begin = clock
    for position in x.tensor_split(size)[rank]:
        h = torch.tanh(h @ w + position @ u)
        clock += 1
    if rank < size - 1:
        dist.send(torch.cat((h, torch.tensor([float(clock)], dtype=torch.float64))), dst=rank + 1)
    return {"begins at": begin, "ends at": clock, "last state": h}


def attention():
    """Every rank computes its own positions at once, after an all-gather of keys."""
    rank, size = dist.get_rank(), dist.get_world_size()
    _, u, x = inputs()
    mine = x.tensor_split(size)[rank]
    scores = (mine @ u) @ x.T
    return {"begins at": 0, "ends at": 1, "first output": (scores.softmax(dim=1) @ x)[0]}


chain, parallel = run(recurrent), run(attention)
w, u, x = inputs()
h = torch.zeros(WIDTH, dtype=torch.float64)
for position in x:
    h = torch.tanh(h @ w + position @ u)
table("A recurrent network, split over time", chain)
table("Attention, split over time", parallel)
check("the last rank has the state of one process", chain[-1]["last state"], h, 1e-12)
check("rank r begins when rank r - 1 ends", column(chain, "begins at")[1:], column(chain, "ends at")[:-1])
check("more ranks do not make it shorter", chain[-1]["ends at"], LENGTH)


@picture("When each rank works (blue: recurrent, orange: attention)")
def draw(figure):
    axes = figure.subplots()
    for rank in range(n):
        for line, shift, color in ((chain[rank], -0.2, "#8cc4f0"), (parallel[rank], 0.2, "#f4b183")):
            axes.barh(
                rank + shift, line["ends at"] - line["begins at"], 0.4, left=line["begins at"], color=color
            )
    axes.set(xlabel="dependent steps", ylabel="rank", yticks=range(n))
    axes.invert_yaxis()


# %%
# ## What does scale
#
# Data parallelism works for every model: the sequences of a batch are independent. The layers of a
# recurrent network can be pipelined, because layer 2 can work on position 1 while layer 1 works on
# position 2. Linear recurrences (state space models) have no tanh between the steps, and can be computed
# as a tree: log₂ T dependent steps instead of T.
worlds = (1_000, 8_192, 131_072)
lines = [(length, length, (length - 1).bit_length(), 1) for length in worlds]
rows("Dependent steps of a layer", ("positions", "recurrent", "linear recurrence", "attention"), lines)

# %%
# ## A linear recurrence as a tree
#
# h[t] = a[t] h[t-1] + b[t] composes: two steps (a₁, b₁) and (a₂, b₂) are one step (a₁ a₂, a₂ b₁ + b₂).
# Each rank composes its own steps without knowing h, and only these pairs travel.


def scan():
    rank, size = dist.get_rank(), dist.get_world_size()
    steps = torch.arange(1.0, LENGTH + 1, dtype=torch.float64).tensor_split(size)[rank]
    a, b = 1.0, 0.0
    for value in steps.tolist():
        a, b = a * 0.5, 0.5 * b + value
    pairs = [None] * size
    dist.all_gather_object(pairs, (a, b))
    h = 0.0
    for a_other, b_other in pairs[: rank + 1]:
        h = a_other * h + b_other
    return {"a": a, "b": b, "h at the end of the part": h}


scanned, h = run(scan), 0.0
for value in range(1, LENGTH + 1):
    h = 0.5 * h + value
table("h[t] = h[t-1]/2 + t, computed in parts", scanned)
check("the last rank has the value of one process", scanned[-1]["h at the end of the part"], h, 1e-9)

# %%
# ## Question
ask(
    "An LSTM is trained under data parallelism on 8 ranks, and it is as fast as on 4. Is this because "
    "of the recurrence?",
    "Not directly: data parallelism does not split time. But each step of an LSTM is a small matrix "
    "product, and with 1/8 of the batch it becomes smaller still, so that the device is idle most of "
    "the time. A larger batch would help.",
)
