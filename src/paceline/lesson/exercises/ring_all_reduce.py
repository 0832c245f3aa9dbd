"""Exercise: an all-reduce from messages between neighbors."""

# %% exercise
# Write `all_reduce(x)`: it adds up x over all ranks in place, as dist.all_reduce(x) does, but uses only
# messages to the next rank and from the previous rank (dist.isend, dist.recv). Let each rank send its
# tensor around the ring: in step 1 it sends its own tensor, in step 2 the tensor that it received in step
# 1, and so on. How many steps are needed? The function must also work on 1 rank.
import torch
import torch.distributed as dist


def all_reduce(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError


# %% solution
import torch
import torch.distributed as dist


def all_reduce(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    passing = x.clone()
    for _ in range(size - 1):
        received = torch.empty_like(passing)
        sending = dist.isend(passing, dst=(rank + 1) % size)
        dist.recv(received, src=(rank - 1) % size)
        sending.wait()
        x += received
        passing = received


# %% grade
import torch
import torch.distributed as dist

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import forbid, run_solution


COLLECTIVES = ("allreduce", "reduce", "allgather", "broadcast", "gather", "scatter", "reducescatter")
COLLECTIVES += ("alltoall",)


def try_solution():
    forbid("use only dist.isend, dist.send, dist.irecv and dist.recv", *COLLECTIVES)
    x = torch.arange(4.0) + dist.get_rank()
    all_reduce(x)
    whole = torch.full((3, 2), 2.0 ** dist.get_rank())
    all_reduce(whole)
    return x, whole


n = num_ranks()
results = run_solution(try_solution)
for rank, (x, whole) in enumerate(results):
    expected = [n * i + n * (n - 1) / 2 for i in range(4)]
    check(f"rank {rank} has the sum of [0, 1, 2, 3] + rank", x, expected)
    check(f"rank {rank} has the sum of a matrix of 2^rank", whole, [[2.0**n - 1] * 2] * 3)
