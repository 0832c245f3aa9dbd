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

from paceline.lesson import check, num_ranks, run

n = num_ranks()
LENGTH, STEPS, LR = 24, 3, 0.1


def gradient_of(weight, rank):
    return torch.sin(weight + rank)


def try_solution():
    def refuse(*args, **options):
        raise AssertionError("use dist.reduce_scatter and dist.all_gather, and no all-reduce")

    dist.all_reduce = dist.reduce = dist.broadcast = refuse
    sent, gather = [], dist.all_gather

    def all_gather(parts, part, *args, **options):
        sent.append(part.detach().clone())
        return gather(parts, part, *args, **options)

    dist.all_gather = all_gather
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
for rank, (got, part, of_momentum) in enumerate(run(try_solution)):
    check(f"rank {rank} has its part of the momentum", part, momentum.chunk(n)[rank], 1e-9)
    check(f"rank {rank} has the weight of one process", got, weight, 1e-9)
    check(f"rank {rank} does not send its momentum", not of_momentum)
