"""A parameter server: train without waiting.

In synchronous training, the slowest rank decides. With a **parameter server**, rank 0 keeps the weights.
A worker fetches them, computes a gradient and sends it, whenever it is ready. Nobody waits, but a
gradient may belong to old weights.
"""

# %%
# ## The server
#
# A worker calls `push` on rank 0 by RPC (see the lesson rpc). The server updates the weights, and its
# answer has the new weights. Calls arrive in several threads at once: a lock protects the weights. The
# **staleness** of a gradient is the number of updates since its worker fetched the weights. The loss is
# w²/2: the gradient is w itself.
import sys
import tempfile
import threading
import time
import types
import warnings

import torch
import torch.distributed as dist
from torch.distributed import rpc

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

UPDATES, SLOW_S = 12, 0.01
n = num_ranks()
workers = max(n - 1, 1)
folder = tempfile.TemporaryDirectory()


class Server:
    """bound: updates that a worker may be ahead of the slowest one; None: they take turns."""

    def __init__(self, lr, size, bound):
        self.w, self.lr, self.bound = torch.ones(1, dtype=torch.float64), lr, bound
        self.counts, self.history, self.lead = [0] * size, [], 0
        self.lock = threading.Condition()

    def is_admitted(self, worker):
        if self.bound is None:
            return len(self.history) % len(self.counts) == worker
        return self.counts[worker] - min(self.counts) < self.bound

    def push(self, worker, version, gradient):
        with self.lock:
            self.lock.wait_for(lambda: self.is_admitted(worker))
            self.w = self.w - self.lr * gradient
            self.history.append((worker, len(self.history) - version, self.w.item()))
            self.counts[worker] += 1
            self.lead = max(self.lead, self.counts[worker] - min(self.counts))
            self.lock.notify_all()
            return len(self.history), self.w


def push(*arguments):  # runs on rank 0, called by the workers
    return sys.modules["parameter_server"].server.push(*arguments)


# %%
# ## The workers
#
# RPC finds a function by module and name. A script is a module; here one is made. The first trainings
# let the workers take turns, for the same numbers every time. A real server takes the first that comes.


def train(trainings):
    """Run trainings with a learning rate, a bound and the seconds that worker 0 sleeps in a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = sys.modules["parameter_server"] = types.ModuleType("parameter_server")
    push.__module__, push.__qualname__, module.push = "parameter_server", "push", push
    warnings.simplefilter("ignore")  # of torch about its own back end
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder.name}/{len(trainings)}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    results = []
    for lr, bound, slow_s in trainings:
        module.server = server = Server(lr, max(size - 1, 1), bound)
        dist.barrier()
        worker, version, w = max(rank - 1, 0), 0, torch.ones(1, dtype=torch.float64)
        mine = 0 if rank == 0 < size - 1 else len(range(worker, UPDATES, max(size - 1, 1)))
        for _ in range(mine):
            time.sleep(slow_s if worker == 0 else 0.0)
            version, w = rpc.rpc_sync("rank0", push, (worker, version, w))  # the gradient of w²/2 is w
        dist.barrier()
        role = "server" if mine == 0 else "both" if size == 1 else "worker"
        results.append({"role": role, "gradients": mine, "history": server.history, "lead": server.lead})
    rpc.shutdown()
    return results


RATES, BOUNDS = (0.4, 0.2, 0.9), (1, 2, UPDATES)
given = [(lr, None, 0.0) for lr in RATES] + [(0.2, bound, SLOW_S) for bound in BOUNDS]
trainings = list(zip(*run(train, given), strict=True))  # the results of each training by rank
folder.cleanup()
table("What each rank did", {key: column(trainings[0], key) for key in ("role", "gradients")})
history = trainings[0][0]["history"]
check("all gradients arrived", len(history), sum(column(trainings[0], "gradients")))
lines = [(at, worker + (n > 1), *rest) for at, (worker, *rest) in enumerate(history)]
rows("Updates with a learning rate of 0.4", ("update", "from rank", "staleness", "weight"), lines)
stale = [line[1] for line in history[workers:]]
check("the staleness is the number of other workers", stale, [workers - 1] * (UPDATES - workers))

# %%
# ## What staleness does
#
# A gradient from old weights points past the minimum, and the weight oscillates. With w²/2 and one
# worker, every rate below 2 converges. With a staleness of 1 the limit is 1, and with 2 it is 0.62: the
# more workers, the smaller the rate must be.
paths = {lr: [1.0, *(line[2] for line in trainings[at][0]["history"])] for at, lr in enumerate(RATES)}
lines = [(lr, *(paths[lr][at] for at in (1, 4, 8, 12))) for lr in sorted(RATES)]
rows("The weight, by learning rate", ("rate", "1 update", "4", "8", "12"), lines)


@picture("The weight by update")
def draw(figure):
    axes = figure.subplots()
    for lr, path in paths.items():
        axes.plot(path, ".-", label=f"rate {lr:g}")
    axes.legend()


# %%
# ## Bounded staleness
#
# Now worker 0 is slow, and the server takes the first that comes. The others run ahead, and what worker 0
# sends is old. A server can bound this: a worker that is too far **ahead** of the slowest one waits for
# the answer. With a bound of 1, nobody makes a second update before all have made the first. In Paceline:
# `--plan parameter-server,staleness=2`. The result depends on who is first, so that two runs differ.
bounded = [(bound, trainings[len(RATES) + at][0]) for at, bound in enumerate(BOUNDS)]
lines = [(bound, r["lead"], max(line[1] for line in r["history"])) for bound, r in bounded]
rows("With a slow worker", ("bound", "largest lead", "largest staleness"), lines, is_measured=True)
for bound, lead, _ in lines:
    check(f"bound {bound}: no worker is further ahead", lead <= bound)

# %%
# ## What moves
#
# An update moves the weights and a gradient, 2 P elements, over the link of the server. It becomes the
# bottleneck: therefore the weights are divided among several servers.
lines = [(count, 2 * count, 2 * count / servers) for count, servers in ((4, 1), (16, 1), (16, 4))]
title = "Elements in P through each server, while every worker makes an update"
rows(title, ("workers", "in all", "each server"), lines)
ask(
    "One of 8 workers is ten times slower than the others. What happens in synchronous training, and "
    "with a parameter server?",
    "Synchronous training becomes ten times slower. With a server the others continue, and the slow "
    "worker sends rare gradients with a staleness of about 70, which do harm if the rate is large.",
)
