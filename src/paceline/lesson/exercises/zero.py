"""Exercise: a step of ZeRO-2 with momentum."""

# %% exercise
# Write `step(weight, gradient, momentum, lr)`. Every rank has the whole `weight`, the `gradient` of its own
# samples (not averaged yet), and `momentum`: only its part, 1/n of the elements. All three have one dim, and
# n divides their length. Update in place: momentum = 0.9 * momentum + (the part of the averaged gradient),
# then weight = weight - lr * momentum. No rank may ever have the whole momentum or the whole averaged
# gradient: use dist.reduce_scatter and dist.all_gather, and no all-reduce.
import torch
import torch.distributed as dist


def step(weight, gradient, momentum, lr):
    raise NotImplementedError


# %% solution
import torch
import torch.distributed as dist


def step(weight, gradient, momentum, lr):
    rank, size = dist.get_rank(), dist.get_world_size()
    part = torch.empty_like(momentum)
    dist.reduce_scatter(part, list(gradient.chunk(size)))
    momentum.mul_(0.9).add_(part / size)
    mine = weight.chunk(size)[rank] - lr * momentum
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    weight.copy_(torch.cat(parts))


# %% grade
import torch
import torch.distributed as dist

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import find_methods, forbid, run_solution

n = num_ranks()
LENGTH, STEPS, LR = 6 * n, 3, 0.1
FORBIDDEN = ("allreduce", "reduce", "broadcast", "gather", "alltoall")


def gradient_of(weight, rank):
    return torch.sin(weight + rank)


def watch(name, sent):
    """Let an operation of process groups append the tensors that it sends."""
    call = getattr(dist.ProcessGroup, name)

    def watched(group, outputs, inputs, *options, **named):
        sent.extend(part.detach().clone() for part in (inputs if isinstance(inputs, list) else [inputs]))
        return call(group, outputs, inputs, *options, **named)

    setattr(dist.ProcessGroup, name, watched)


def try_solution():
    forbid("use dist.reduce_scatter and dist.all_gather, and no all-reduce", *FORBIDDEN)
    sent = []
    for name in find_methods("allgather"):
        watch(name, sent)
    weight = torch.arange(float(LENGTH), dtype=torch.float64)
    momentum = torch.zeros(LENGTH // dist.get_world_size(), dtype=torch.float64)
    for _ in range(STEPS):
        step(weight, gradient_of(weight, dist.get_rank()), momentum, LR)
    of_momentum = any(len(part) == len(momentum) and torch.equal(part, momentum) for part in sent)
    return weight, momentum, of_momentum


weight, momentum = torch.arange(float(LENGTH), dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
for _ in range(STEPS):
    average = sum(gradient_of(weight, rank) for rank in range(n)) / n
    momentum = 0.9 * momentum + average
    weight = weight - LR * momentum
for rank, (got, part, of_momentum) in enumerate(run_solution(try_solution)):
    check(f"rank {rank} has its part of the momentum", part, momentum.chunk(n)[rank], 1e-9)
    check(f"rank {rank} has the weight of one process", got, weight, 1e-9)
    check(f"rank {rank} does not send its momentum", not of_momentum)
