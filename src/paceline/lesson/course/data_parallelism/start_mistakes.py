"""Mistakes at the start and at the end of a job.

A loop may be right and the job still wrong: two processes believe to be the same rank, two jobs use one
port, weights are saved under names that do not load. All of these appear in course material.
"""

# %%
# ## 1. The rank of another launcher
#
# Slurm started 2 tasks, and in each of them torchrun started some workers. `SLURM_PROCID` is the number of
# the *task*: the workers of a task share it. The launcher that started this process comes first: `RANK` of
# torchrun, then Open MPI's variable, then Slurm's.
import errno
import os
import socket

import torch
import torch.distributed as dist
from torch import nn

from paceline.lesson import ask, check, column, num_ranks, rows, run, table

n = num_ranks()
ORDER = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def read_rank(names):
    workers = -(-dist.get_world_size() // 2)
    environment = dict(os.environ) | {"SLURM_PROCID": str(dist.get_rank() // workers)}
    return next(int(environment[name]) for name in names if name in environment)


def read_both():
    return {"only SLURM_PROCID": read_rank(("SLURM_PROCID",)), "RANK first": read_rank(ORDER)}


read = run(read_both)
table("The rank that each process reads", read)
check("RANK first: every rank once", column(read, "RANK first"), list(range(n)))
check("only SLURM_PROCID: at most two ranks", len(set(column(read, "only SLURM_PROCID"))), min(n, 2))

# %%
# ## 2. A local rank that is computed
#
# `rank % GPUs` is the local rank if the ranks are dealt to the machines in **blocks**. Slurm can also deal
# them **cyclically**. Then two ranks of a machine compute the same number and use the same GPU, while
# another GPU idles. Read `LOCAL_RANK` or `SLURM_LOCALID` instead.
lines = [(rank, rank % 4, rank // 4, rank % 4, rank % 2, rank // 2) for rank in range(8)]
headers = ("rank", "rank % 4", "blocks: machine", "local rank", "cyclic: machine", "local rank ")
rows("8 ranks on 2 machines with 4 GPUs each", headers, lines)
check("right for blocks", [line[1] for line in lines], [line[3] for line in lines])
used = {(line[4], line[1]) for line in lines}
check("for a cyclic distribution, only 4 of 8 GPUs are used", len(used), 4)

# %%
# ## 3. A port that is computed
#
# All tasks of a Slurm array share the id of the array. If `MASTER_PORT` is computed from it, two tasks on
# one machine want the same port, and the second cannot start, or joins the wrong job. Let the system
# choose a free port (port 0), and tell it to the other ranks.
with socket.create_server(("127.0.0.1", 0)) as first:
    computed = first.getsockname()[1]  # stands for 10000 + array id % 20000, in the first task
    try:
        socket.create_server(("127.0.0.1", computed)).close()
        code = 0
    except OSError as error:
        code = error.errno
    with socket.create_server(("127.0.0.1", 0)) as second:
        other = second.getsockname()[1]
check("the second task cannot use the same port", errno.errorcode.get(code), "EADDRINUSE")
check("with port 0, each gets its own", other != computed)

# %%
# ## 4. Gradients that are only averaged on a GPU
#
# `if torch.cuda.is_available(): all_reduce(…)` hides the mistake on every laptop: nothing fails, and every
# rank trains a model of its own. Communication does not depend on the device.


def step(has_gpu):
    w = torch.ones(1, requires_grad=True)
    (w * dist.get_rank()).sum().backward()
    if has_gpu:
        dist.all_reduce(w.grad, op=dist.ReduceOp.AVG)
    return (w - 0.1 * w.grad).item()


always, skipped = run(step, True), run(step, False)
table("The weight after a step", {"averaged": always, "skipped": skipped})
check("averaged: all ranks have equal weights", len(set(always)), 1)
check("skipped: every rank has its own", len(set(skipped)), n)

# %%
# ## 5. Names that begin with `module.`
#
# DDP wraps the model, and its `state_dict` has the prefix `module.` in all names. A plain model refuses
# them. `strict=False` makes the error disappear, and loads *nothing*. Save `model.module.state_dict()`.


def save_and_load(unwraps):
    torch.manual_seed(0)
    trained = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    state = (trained.module if unwraps else trained).state_dict()
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    refused = model.load_state_dict(state, strict=False).unexpected_keys
    return {"refused": " ".join(refused) or None, "loaded": torch.equal(model.weight, trained.module.weight)}


wrapped, unwrapped = run(save_and_load, False), run(save_and_load, True)
table("With the prefix, and strict=False", wrapped)
table("Of model.module", unwrapped)
check("with the prefix nothing is loaded", column(wrapped, "loaded"), [False] * n)
check("without it, everything", column(unwrapped, "loaded"), [True] * n)

# %%
# ## 6. Output and evaluation on the wrong ranks
#
# If every rank prints, n lines arrive at once. If only rank 0 evaluates, the others wait for it; and if
# weights are sharded, rank 0 waits for them, forever. Let all ranks evaluate their part, and rank 0 print.


def evaluate():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(rank, 1000, size)
    sums = torch.tensor([float((mine % 10 != 0).sum()), float(len(mine))])
    dist.all_reduce(sums)
    line = f"accuracy {sums[0] / sums[1]:.3f}"
    return {"samples": len(mine), "prints": line if rank == 0 else None}


evaluated = run(evaluate)
table("1,000 samples, evaluated by all", evaluated)
check("every sample is evaluated once", sum(column(evaluated, "samples")), 1000)
ask(
    "A search of 100 trials downloads 60 GB in every trial, runs on the CPU although a GPU is reserved, and "
    "cannot load its best model at the end. Which checks before the start find this?",
    "The first trial alone, to its end: it shows the download, the device and the names of the weights. Then "
    "share one copy of the data, stop if the device is not the expected one, and load the checkpoint that "
    "was just written. `paceline preflight` does such checks before a job is queued.",
)
