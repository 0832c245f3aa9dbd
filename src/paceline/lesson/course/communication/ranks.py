"""Ranks: one program that runs as many processes.

Distributed training starts the same program several times. Each process is called a **rank**. It has a
number, from 0 to the world size minus 1. Ranks share no memory: each has its own variables, and data
moves between them only by messages.
"""

# %%
# ## One function on every rank
#
# `run` starts the processes, calls the function on each, and returns the results by rank. `table` shows
# them, and `check` compares two values and prints a claim if they are equal. The variable `counter` shows
# that ranks share no memory: every rank adds to its own copy.
import os

import torch
import torch.distributed as dist

from paceline.distributed.store import open_store
from paceline.lesson import ask, check, column, num_ranks, run, table

counter = 0


def introduce():
    global counter
    counter += 1 + dist.get_rank()
    return {"world size": dist.get_world_size(), "counter": counter, "process": os.getpid()}


results = run(introduce)
n = num_ranks()
processes = [result.pop("process") for result in results]
table("What each rank has", results)
check("every rank is a process of its own", len({*processes, os.getpid()}), n + 1)
check("every rank knows the world size", column(results, "world size"), [n] * n)
check("the counter of this process did not change", counter, 0)

# %%
# ## How a rank learns its number
#
# The launcher (`torchrun`, `mpirun`, `srun`, or Paceline) sets environment variables before the program
# starts. torchrun's names are the usual ones. On several machines, `LOCAL_RANK` counts from 0 on each
# machine; it selects the GPU.
#
# A common mistake is to read `SLURM_PROCID` in a program that torchrun started inside a Slurm task. Both
# workers of the task then believe that they are the same rank. Read `RANK` first, then Open MPI's
# variable, then Slurm's.
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def read_variables():
    return {name: int(os.environ[name]) for name in NAMES}


variables = run(read_variables)
table("Environment variables", variables)
check("RANK counts from 0", column(variables, "RANK"), list(range(n)))

# %%
# ## Rendezvous: how ranks find each other
#
# Rank 0 opens a **store**: a small server with keys and values. The others connect to its address, which
# `MASTER_ADDR` and `MASTER_PORT` contain under torchrun. Each rank writes its own address into the store
# and waits for those of the others. This is what `init_process_group` does.


def meet():
    rank, size = dist.get_rank(), dist.get_world_size()
    # torch's own stores listen on all network interfaces; this one is open only to this machine
    store = open_store("127.0.0.1") if rank == 0 else None
    port = [store.port if store else None]
    dist.broadcast_object_list(port)  # here, the ranks are connected already
    if store is None:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
    store.add("joined", 1)
    store.set(f"address of {rank}", f"host-{rank}")
    addresses = [store.get(f"address of {other}").decode() for other in range(size)]  # get() waits
    result = {"it read": " ".join(addresses), "joined": store.add("joined", 0)}
    dist.barrier()  # the server must not end before everybody has read
    return result


met = run(meet)
table("After the rendezvous", met)
check("all ranks joined", column(met, "joined"), [n] * n)

# %%
# ## Process groups
#
# A **process group** is a set of ranks that communicate with each other. All ranks are in the default
# group. Smaller groups are the basis of combined parallelism. Every rank must create every group, in the
# same order, even the groups that it is not in.


def sum_in_pairs():
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=groups[rank // 2])  # the sum over the group
    return {"group": pairs[rank // 2], "before": float(rank), "sum in the group": x.item()}


sums = run(sum_in_pairs)
table("A sum within pairs of ranks", sums)
for line in sums:
    check(f"the sum of ranks {line['group']}", line["sum in the group"], float(sum(line["group"])))

# %%
# ## Question
ask(
    "A program runs on 3 machines with 4 GPUs each, with one rank for each GPU. What are the world "
    "size, and the rank and local rank of the second process of the last machine?",
    "The world size is 12. Ranks are usually given machine by machine: the last machine has ranks 8 to "
    "11, so it is rank 9 with local rank 1. With a cyclic distribution it would be rank 5, and `rank % "
    "4` would still be its local rank only by luck: read LOCAL_RANK instead of computing it.",
)
