"""A parameter server: training without waiting for each other.

In synchronous training, the slowest rank decides. With a **parameter server**, rank 0 keeps the weights.
A worker fetches them, computes a gradient and sends it, whenever it is ready. Nobody waits, but a
gradient may belong to old weights.
"""

# %%
# ## The protocol
#
# The server takes gradients one after another, updates the weights, and sends the new weights to this
# worker only. Here the server asks the workers in turn, so that the lesson gives the same numbers every
# time; a real server takes whoever comes first. The loss is w²/2: the gradient is w itself.
#
# The **staleness** of a gradient is the number of updates since its worker fetched the weights.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

UPDATES = 12
n = num_ranks()
workers = max(n - 1, 1)


def serve(lr, size):
    """Return the worker, the staleness and the weight of each update."""
    w = torch.ones(1, dtype=torch.float64)
    fetched, history = [0] * (size - 1), []
    for worker in range(1, size):
        dist.send(w, dst=worker)
    for update in range(UPDATES):
        worker = 1 + update % (size - 1)
        gradient = torch.empty(1, dtype=torch.float64)
        dist.recv(gradient, src=worker)
        w -= lr * gradient
        history.append((worker, update - fetched[worker - 1], w.item()))
        fetched[worker - 1] = update + 1
        dist.send(w, dst=worker)
    return history


def work(rank, size):
    w = torch.empty(1, dtype=torch.float64)
    dist.recv(w, src=0)
    count = len(range(rank - 1, UPDATES, size - 1))
    for _ in range(count):
        dist.send(w.clone(), dst=0)  # the gradient of w²/2 is w
        dist.recv(w, src=0)
    return count


def train(lr):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:  # the only rank is server and worker
        path = [(0, 0, (1 - lr) ** (update + 1)) for update in range(UPDATES)]
        return {"role": "both", "gradients": UPDATES, "history": path}
    if rank == 0:
        return {"role": "server", "gradients": 0, "history": serve(lr, size)}
    return {"role": "worker", "gradients": work(rank, size), "history": None}


results = run(train, 0.4)
history = results[0]["history"]
table("What each rank did", {key: column(results, key) for key in ("role", "gradients")})
rows(
    "Updates with a learning rate of 0.4",
    ("update", "worker", "staleness", "weight"),
    [(update, *line) for update, line in enumerate(history)],
)
check("all gradients arrived", sum(column(results, "gradients")), UPDATES)
check(
    "the staleness is the number of other workers",
    [line[1] for line in history[workers:]],
    [workers - 1] * (UPDATES - workers),
)

# %%
# ## What staleness does
#
# A gradient from old weights points past the minimum, and the weight oscillates. A learning rate that is
# fine for one worker can diverge with many. With w²/2 and one worker, every rate below 2 converges. With
# a staleness of 1 the limit is 1, and with 2 it is 0.62: the more workers, the smaller the rate must be.
rates = (0.2, 0.4, 0.9)
paths = {lr: [1.0, *(line[2] for line in run(train, lr)[0]["history"])] for lr in rates}
lines = [(lr, *(paths[lr][at] for at in (1, 4, 8, 12))) for lr in rates]
rows("The weight, by learning rate", ("rate", "1 update", "4", "8", "12"), lines)
check("a small rate does not diverge", abs(paths[0.2][-1]) < 1)


@picture("The weight by update")
def draw(figure):
    axes = figure.subplots()
    for lr, path in paths.items():
        axes.plot(path, ".-", label=f"rate {lr:g}")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.legend()


# %%
# ## Bounded staleness
#
# Servers limit the staleness: a worker that is too far ahead waits. With a limit of 0 the training is
# synchronous again. In Paceline: `--plan parameter-server,staleness=2`. The result depends on who is
# first, so two runs differ: this is the only kind of training in Paceline that cannot be repeated
# exactly.
#
# ## What moves
#
# In each update, a worker receives the weights and sends a gradient: 2 P elements. All of them pass the
# link of the server, which becomes the bottleneck: therefore the weights are divided among several
# servers.
lines = [(count, 2 * count, 2 * count / servers) for count, servers in ((4, 1), (16, 1), (16, 4))]
rows(
    "Elements in P through each server, while every worker makes an update",
    ("workers", "in all", "each server"),
    lines,
)
ask(
    "One of 8 workers is ten times slower than the others. What happens in synchronous training, and "
    "with a parameter server?",
    "Synchronous training becomes ten times slower. With a server the others continue, and the slow "
    "worker contributes rare gradients with a staleness of about 70: they do harm if the rate is "
    "large. A bound of the staleness makes the others wait.",
)
